// The stall check.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// Warns about operations that wait too long for some rank, and ends the job when that was asked for (stall.c). Looks at
// the clock only once a second; does nothing on other ranks.
void stall_check(bhvd_context *ctx);
// A coordinator's frame says that the others wait for this rank.
bhvd_status stall_take_late(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
