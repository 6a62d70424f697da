// Accepts connections, and lets those who prove the job's secret say who they are. Strangers are served side by side: a
// slow, silent or hostile one delays nobody, is dropped after GREETER_STRANGER_MS, and their number is bounded; one more
// evicts the one that has waited longest, whom a rank in earnest takes as a reason to come again (connect.c). Nothing
// is said to who says nothing. One thread.
#ifndef BHVD_GREETER_H
#define BHVD_GREETER_H

#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

enum { GREETER_STRANGERS_MAX = 256, GREETER_STRANGER_MS = 5000, GREETER_LISTENERS_MAX = 2, GREETER_NAME_MAX = 40 };

struct greeter_options {
    int listeners[GREETER_LISTENERS_MAX];       // non-blocking; -1: none
    const void *secret;                         // these bytes must outlive the greeter
    size_t secret_size;
    size_t name_size;                           // bytes that a peer says after its proof, at most GREETER_NAME_MAX
    int stop_fd;                                // readable: nobody is waited for any more; 0: none
};

struct greeter;

// NULL: no memory.
struct greeter *greeter_create(const struct greeter_options *options);
// Hangs up on those who have not been handed out.
void greeter_destroy(struct greeter *greeter);

// The next who has proven the secret and said its name, within `deadline_ns`: *fd is the caller's, *listener the index of
// the listener that it came through. BHVD_ERR_TIMEOUT. BHVD_ERR_SHUTDOWN: stop_fd says so. BHVD_ERR_SYSTEM, with errno: out of descriptors, and no stranger is
// there whose descriptor would help.
bhvd_status greeter_next(struct greeter *greeter, void *name, int *fd, int *listener, int64_t deadline_ns);

#endif
