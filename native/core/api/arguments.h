// The checks of a posted operation that one rank can make alone. The coordinator checks that ranks agree.
#pragma once

#include "gpu/nccl.h"

// Properties of the operation's process set at lookup: the set may change or be removed later.
struct set_facts {
    int size, rank;
    uint32_t number;
    struct nccl_facts nccl;
};

// *facts: set on success. Does not check that the name is unique.
bhvd_status arguments_check(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                            struct bhvd_error *error);
