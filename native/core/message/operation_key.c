#include "core/message/operation_key.h"

static const struct {
    const char *name, *word;
} KINDS[OPERATION_KINDS] = {
    [BHVD_ALLREDUCE] = {"ALLREDUCE", "Allreduce"},
    [BHVD_ALLGATHER] = {"ALLGATHER", "Allgather"},
    [BHVD_BROADCAST] = {"BROADCAST", "Broadcast"},
    [BHVD_ALLTOALL] = {"ALLTOALL", "Alltoall"},
    [BHVD_REDUCESCATTER] = {"REDUCESCATTER", "Reducescatter"},
    [BHVD_BARRIER] = {"BARRIER", "Barrier"},
    [BHVD_JOIN] = {"JOIN", "Join"},
    [BHVD_C_LP_S] = {"C_LP_S", "Low-precision allreduce"},
    [BHVD_D_FP_S] = {"D_FP_S", "Decentralized averaging"},
    [BHVD_D_LP_S] = {"D_LP_S", "Decentralized low-precision exchange"},
    [BHVD_PROCESS_SET_ADD] = {"PROCESS_SET_ADD", "Process set addition"},
    [BHVD_PROCESS_SET_REMOVE] = {"PROCESS_SET_REMOVE", "Process set removal"},
};

const char *operation_kind_name(bhvd_kind kind, bhvd_op op)
{
    return kind == BHVD_ALLREDUCE && op == BHVD_OP_ADASUM ? "ADASUM" : KINDS[kind].name;
}

const char *operation_kind_word(bhvd_kind kind) { return KINDS[kind].word; }

bool operation_needs_tensors(bhvd_kind kind)
{
    return kind <= BHVD_REDUCESCATTER || (kind >= BHVD_C_LP_S && kind <= BHVD_D_LP_S);
}
