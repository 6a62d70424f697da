// Accepts connections, and lets those who prove the job's secret say who they are. Strangers are served side by side: a
// slow, silent or hostile one delays nobody, is dropped after HANDSHAKE_STRANGER_MS, and their number is bounded. One more evicts a
// random one that has not proven the secret, so that a flood cannot keep a rank out, which comes again (connector.h). Nothing is said
// to who says nothing. It never waits itself: who has one waits, for what it names and whatever else. One thread.
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
    struct auth_binding bindings[HANDSHAKE_LISTENERS_MAX];      // what their connections are for. AUTH_LOCAL: of this user only
    const void *secret;                         // these bytes must outlive the handshake server
    size_t secret_size;
    size_t name_size;                           // bytes that a peer says after its proof, at most HANDSHAKE_NAME_MAX; 0: none
};

struct handshake_server;

// One who has proven the secret and said its name.
struct authenticated {
    int fd;                                     // the receiver's
    int listener;                               // the index of the listener that it came through
    int32_t rank;                               // as it was proven
    unsigned char name[HANDSHAKE_NAME_MAX];
};

// NULL: no memory.
struct handshake_server *handshake_server_create(const struct handshake_server_options *options);
// Hangs up on those who have not been handed out.
void handshake_server_destroy(struct handshake_server *handshakes);
// In a forked child: its copies of their descriptors are closed.
void handshake_server_after_fork(struct handshake_server *handshakes);

// What is to be waited for: fills in at most HANDSHAKE_POLLS_MAX entries, returns how many, and lowers *wake_ns to when it has
// something to do in any case.
int handshake_server_poll(struct handshake_server *handshakes, struct pollfd *polls, int64_t *wake_ns);
// After the wait, with these entries, until it is not BHVD_OK: the next who has proven the secret and said its name.
// BHVD_ERR_TIMEOUT: nobody any more. BHVD_ERR_SYSTEM, with errno: so too, and this process has had no descriptor or memory to accept
// one for HANDSHAKE_LACKING_MS.
bhvd_status handshake_server_next(struct handshake_server *handshakes, struct pollfd *polls, struct authenticated *out);
