// What one rank can check by itself of an operation that is to be posted. Whether ranks agree is the coordinator's affair.
#pragma once

#include "gpu/nccl.h"

// Of the operation's process set, when it was looked up: it may change or go.
struct set_facts {
    int size, rank;
    uint32_t number;
    struct nccl_facts nccl;
};

// *facts: filled when all is well. Names are not looked up.
bhvd_status arguments_check(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                            struct bhvd_error *error);
