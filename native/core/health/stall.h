// The stall check.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// Warns about operations that wait too long for some rank, and ends the job if that was requested (stall.c). Checks
// only once a second; does nothing on other ranks than 0.
void stall_check(bhvd_context *ctx);
// Handles the coordinator's notice that other ranks wait for this one.
bhvd_status stall_on_notice(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
