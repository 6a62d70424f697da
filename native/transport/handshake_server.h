// Accepts connections and reads an introduction (auth.h) from each. Peers that have not sent theirs (strangers) are served
// concurrently: a slow, silent or hostile one delays nobody and is dropped after HANDSHAKE_STRANGER_MS, and their number is
// bounded. A new one evicts a random stranger, so a flood cannot keep out a rank, which retries (connector.h). The server sends
// nothing. It never blocks: the owner polls for it (handshake_server_poll). One thread.
#pragma once

#include <poll.h>

#include "transport/auth.h"

enum {
    HANDSHAKE_STRANGERS_MAX = 256, HANDSHAKE_STRANGER_MS = 5000, HANDSHAKE_LACKING_MS = 3000,
    HANDSHAKE_TCP = 0, HANDSHAKE_LOCAL = 1, HANDSHAKE_LISTENERS = 2,    // HANDSHAKE_LOCAL: a UNIX socket, for this user only
    HANDSHAKE_POLLS_MAX = HANDSHAKE_LISTENERS + HANDSHAKE_STRANGERS_MAX
};

struct handshake_server;

// A peer that has sent its introduction, which is not checked yet.
struct introduced {
    int fd;                                     // the caller owns it
    int listener;                               // HANDSHAKE_TCP or HANDSHAKE_LOCAL
    struct introduction introduction;
};

// listeners: non-blocking; -1: none. NULL: no memory.
struct handshake_server *handshake_server_create(const int listeners[HANDSHAKE_LISTENERS]);
// Closes connections that have not been handed out.
void handshake_server_destroy(struct handshake_server *handshakes);
// In a forked child: closes its copies of the descriptors.
void handshake_server_after_fork(struct handshake_server *handshakes);

// Fills in the descriptors to poll, at most HANDSHAKE_POLLS_MAX, returns how many, and lowers *wake_ns to the server's next
// timeout.
int handshake_server_poll(struct handshake_server *handshakes, struct pollfd *polls, int64_t *wake_ns);
// After the poll, with these entries, until it is not BHVD_OK: the next peer that has sent its introduction.
// BHVD_ERR_TIMEOUT: no more. BHVD_ERR_SYSTEM, with errno: no more, and this process has lacked descriptors or memory to accept
// connections for HANDSHAKE_LACKING_MS.
bhvd_status handshake_server_next(struct handshake_server *handshakes, struct pollfd *polls, struct introduced *out);
