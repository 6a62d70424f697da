// A late rank hears from the coordinator's stall check that others wait for it, and for what. A thread of the process waits
// for that (Python's, which can tell where the program is): the engine itself must not call into Python.
#ifndef BHVD_LATE_H
#define BHVD_LATE_H

#include <stdatomic.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/bytes.h"

enum { LATE_TEXT_BYTES = 1024 };

struct link;

struct late {
    _Atomic uint32_t count;             // of what was told; the waiting thread sleeps on it
    char text[LATE_TEXT_BYTES];         // the last of it; under post_lock
};

// Keeps the text and wakes the thread. Engine only.
void late_tell(bhvd_context *ctx, const void *text, size_t size);
// The same, from a coordinator's frame.
bhvd_status late_take(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
// Ends the waiting, when the context ends.
void late_close(bhvd_context *ctx);

#endif
