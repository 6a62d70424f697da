// Accepts connections and lets peers that prove the job's secret send their name. Unauthenticated peers (strangers) are served
// concurrently: a slow, silent or hostile one delays nobody and is dropped after HANDSHAKE_STRANGER_MS, and their number is
// bounded. A new one evicts a random stranger, so a flood cannot keep out a rank, which retries (connector.h). The server sends
// nothing before the peer does. It never blocks: the owner polls for it (handshake_server_poll). One thread.
#pragma once

#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "transport/auth.h"

enum {
    HANDSHAKE_STRANGERS_MAX = 256, HANDSHAKE_STRANGER_MS = 5000, HANDSHAKE_LACKING_MS = 3000, HANDSHAKE_LISTENERS_MAX = 2, HANDSHAKE_NAME_MAX = 44,
    HANDSHAKE_POLLS_MAX = HANDSHAKE_LISTENERS_MAX + HANDSHAKE_STRANGERS_MAX
};

struct handshake_server_options {
    int listeners[HANDSHAKE_LISTENERS_MAX];     // non-blocking; -1: none
    struct auth_binding bindings[HANDSHAKE_LISTENERS_MAX];      // purposes of their connections. AUTH_LOCAL: only of this user
    const void *secret;                         // these bytes must outlive the handshake server
    size_t secret_size;
    size_t name_size;                           // length of the name in bytes, at most HANDSHAKE_NAME_MAX; 0: none
};

struct handshake_server;

// A peer that has proven the secret and sent its name.
struct authenticated {
    int fd;                                     // the caller owns it
    int listener;                               // the index of the listener that accepted it
    int32_t rank;                               // as proven
    unsigned char name[HANDSHAKE_NAME_MAX];
};

// NULL: no memory.
struct handshake_server *handshake_server_create(const struct handshake_server_options *options);
// Closes connections that have not been handed out.
void handshake_server_destroy(struct handshake_server *handshakes);
// In a forked child: closes its copies of the descriptors.
void handshake_server_after_fork(struct handshake_server *handshakes);

// Fills in the descriptors to poll, at most HANDSHAKE_POLLS_MAX, returns how many, and lowers *wake_ns to the server's next
// timeout.
int handshake_server_poll(struct handshake_server *handshakes, struct pollfd *polls, int64_t *wake_ns);
// After the poll, with these entries, until it is not BHVD_OK: the next peer that has proven the secret and sent its name.
// BHVD_ERR_TIMEOUT: no more. BHVD_ERR_SYSTEM, with errno: no more, and this process has lacked descriptors or memory to accept
// connections for HANDSHAKE_LACKING_MS.
bhvd_status handshake_server_next(struct handshake_server *handshakes, struct pollfd *polls, struct authenticated *out);
