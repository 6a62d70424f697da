// NCCL, libnccl.so.2, opened at run time; with our own prototypes, no NCCL header.
//
// Communicators are nonblocking: a call may return NCCL_IN_PROGRESS, and later calls must not depend on it until async_error
// returns another state. All calls need the device's context (device_ops.enter).
#pragma once

#include "bagua_hvd.h"

typedef int nccl_result;
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum nccl_type {
    NCCL_INT8 = 0, NCCL_UINT8 = 1, NCCL_INT32 = 2, NCCL_INT64 = 4, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_FLOAT64 = 8,
    NCCL_BFLOAT16 = 9
};
enum nccl_op { NCCL_SUM = 0, NCCL_PROD = 1, NCCL_MAX = 2, NCCL_MIN = 3 };

enum { NCCL_UNIQUE_ID_BYTES = 128 };
struct nccl_unique_id {
    char bytes[NCCL_UNIQUE_ID_BYTES];
};

// ncclConfig_t as introduced by NCCL 2.14; newer libraries use their defaults for missing fields.
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
};
#define NCCL_CONFIG_UNBLOCKED {sizeof(struct nccl_config), 0xcafebeef, 21400, 0}

// Exported symbol, member, prototype. Streams are the driver's handles.
#define NCCL_FUNCTIONS(X)                                                                                              \
    X("ncclGetVersion", get_version, nccl_result, (int *version))                                                      \
    X("ncclGetUniqueId", get_unique_id, nccl_result, (struct nccl_unique_id *id))                                      \
    X("ncclCommInitRankConfig", comm_init, nccl_result,                                                                \
      (void **comm, int size, struct nccl_unique_id id, int rank, struct nccl_config *config))                         \
    X("ncclCommFinalize", comm_finalize, nccl_result, (void *comm))                                                    \
    X("ncclCommDestroy", comm_destroy, nccl_result, (void *comm))                                                      \
    X("ncclCommAbort", comm_abort, nccl_result, (void *comm))                                                          \
    X("ncclCommGetAsyncError", async_error, nccl_result, (void *comm, nccl_result *error))                             \
    X("ncclGetErrorString", error_string, const char *, (nccl_result result))                                          \
    X("ncclGetLastError", last_error, const char *, (void *comm))                                                      \
    X("ncclGroupStart", group_start, nccl_result, (void))                                                              \
    X("ncclGroupEnd", group_end, nccl_result, (void))                                                                  \
    X("ncclAllReduce", all_reduce, nccl_result,                                                                        \
      (const void *src, void *dst, size_t count, enum nccl_type type, enum nccl_op op, void *comm, void *stream))      \
    X("ncclReduce", reduce, nccl_result,                                                                               \
      (const void *src, void *dst, size_t count, enum nccl_type type, enum nccl_op op, int root, void *comm,           \
       void *stream))                                                                                                  \
    X("ncclReduceScatter", reduce_scatter, nccl_result,                                                                \
      (const void *src, void *dst, size_t count, enum nccl_type type, enum nccl_op op, void *comm, void *stream))      \
    X("ncclBroadcast", broadcast, nccl_result,                                                                         \
      (const void *src, void *dst, size_t count, enum nccl_type type, int root, void *comm, void *stream))             \
    X("ncclAllGather", all_gather, nccl_result,                                                                        \
      (const void *src, void *dst, size_t count, enum nccl_type type, void *comm, void *stream))                       \
    X("ncclSend", send, nccl_result,                                                                                   \
      (const void *src, size_t count, enum nccl_type type, int peer, void *comm, void *stream))                        \
    X("ncclRecv", recv, nccl_result, (void *dst, size_t count, enum nccl_type type, int peer, void *comm, void *stream))

#define NCCL_MEMBER(symbol, member, result, prototype) result(*member) prototype;
struct nccl {
    NCCL_FUNCTIONS(NCCL_MEMBER)
    int version;                // 22105 for 2.21.5
};

// libraries: files to try, see library_open. BHVD_ERR_UNSUPPORTED: not found, or too old; the message names the package and the
// environment variable.
bhvd_status nccl_open(const char *libraries, struct nccl *out, struct bhvd_error *error);
