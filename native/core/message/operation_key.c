#include "core/message/operation_key.h"

const struct operation_traits OPERATION_TRAITS[OPERATION_KINDS] = {
    [BHVD_ALLREDUCE] = {"ALLREDUCE", "Allreduce", .has_tensors = true},
    [BHVD_ALLGATHER] = {"ALLGATHER", "Allgather", .has_tensors = true},
    [BHVD_BROADCAST] = {"BROADCAST", "Broadcast", .has_tensors = true},
    [BHVD_ALLTOALL] = {"ALLTOALL", "Alltoall", .has_tensors = true},
    [BHVD_REDUCESCATTER] = {"REDUCESCATTER", "Reducescatter", .has_tensors = true},
    [BHVD_BARRIER] = {"BARRIER", "Barrier"},
    [BHVD_JOIN] = {"JOIN", "Join", .is_of_all = true},
    [BHVD_C_LP_S] = {"C_LP_S", "Low-precision allreduce", .has_tensors = true, .has_one_dtype = true},
    [BHVD_D_FP_S] = {"D_FP_S", "Decentralized averaging", .has_tensors = true, .has_one_dtype = true},
    [BHVD_D_LP_S] = {"D_LP_S", "Decentralized low-precision exchange", .has_tensors = true, .has_one_dtype = true},
    [BHVD_PROCESS_SET_ADD] = {"PROCESS_SET_ADD", "Process set addition", .is_of_all = true, .changes_sets = true},
    [BHVD_PROCESS_SET_REMOVE] = {"PROCESS_SET_REMOVE", "Process set removal", .is_of_all = true, .changes_sets = true},
};

const char *operation_kind_name(bhvd_kind kind, bhvd_op op)
{
    return kind == BHVD_ALLREDUCE && op == BHVD_OP_ADASUM ? "ADASUM" : OPERATION_TRAITS[kind].name;
}
