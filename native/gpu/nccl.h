// Collectives on GPU tensors by NCCL, for process sets whose members each have their own GPU and the same NCCL. If only the members
// of each host can use it among themselves, or on request, allreduces and broadcasts are hierarchical: NCCL within hosts, the CPU
// transports between them (nccl_hierarchical.c). All other operations are then staged.
//
// The members agree in a set's first execution on GPUs (nccl_agree): they exchange their capabilities over the CPU transports; all
// use NCCL, or none does. An operation's path depends only on that and on the request, so all choose the same. Staged operations
// (gpu/staging.h) have their tensors on the device too, so in an execution NCCL takes staged and direct operations alike.
//
// An execution only puts work on the device's stream from_host, which waits for the events of the framework's streams. Operations
// end when all is enqueued. Errors of NCCL and of peers are found by polling (nccl_poll): the executor fails, and every
// communicator is aborted, so that no stream hangs (decision 28).
#pragma once

#include "executor/collective.h"
#include "executor/executor.h"
#include "executor/group.h"

// A process set's agreement, with the communicator of all its members, if there is one. It belongs to the owner of the set.
struct nccl_comm {
    bool is_on;                 // has a communicator, or had one
    bool by_host;               // the members of each host have a communicator too
    struct nccl_comm *local;    // the communicator of this host; NULL: none
    bool scales;                // all members have the kernels for scaling
    bool encodes;               // all members have the kernels for the codecs too
    struct bhvd_device *device; // held; NULL: never had a communicator
    void *handle;               // NULL: aborted, or not on
    void *done;                 // event: end of the last execution
    int64_t last_ns;            // when that was enqueued; 0: it has ended
    bool finished;              // no work is left, here and at the peers
};

// The context's option (bhvd_context_options.nccl_hierarchical).
enum nccl_hierarchical { HIERARCHICAL_WHERE_NEEDED, HIERARCHICAL_FOR_ALLREDUCE, HIERARCHICAL_ONLY };

// The path of an operation on GPUs: staged through the host, NCCL among all members, or hierarchical.
enum nccl_path { PATH_HOST, PATH_NCCL, PATH_HIERARCHICAL };

// The facts that determine the path, when an operation is posted and again when it is executed.
struct nccl_facts {
    bool is_on, by_host;        // NCCL among all members; among those of each host
    bool scales, encodes;
    bool is_hierarchical;       // the primitive itself works between hosts, see primitive_is_hierarchical
    int device;                 // index; -1: NCCL is not used
};

// For such an operation in this set. comm NULL: no agreement yet.
struct nccl_facts nccl_facts_of(const struct nccl_comm *comm, const struct group *set, bhvd_kind kind, bool hierarchical);
// Depends only on values that are equal on all members.
enum nccl_path nccl_path_of(const struct nccl_facts *facts, const struct collective *coll);
// BHVD_ERR_UNSUPPORTED: the set's communicator is on another GPU.
bhvd_status nccl_check_gpu(const struct nccl_facts *facts, const struct bhvd_args *args, struct bhvd_error *error);

// Called in the first execution on GPUs of a set. hierarchical: enum nccl_hierarchical, this rank's option. *out is set after
// errors too, for nccl_abort; NULL: out of memory.
bhvd_status nccl_agree(struct executor *exec, struct group *set, const struct collective *coll, int hierarchical,
                       struct nccl_comm **out);
// One execution by NCCL: begin, any of the collectives below, end, also after errors. All but `end` only enqueue, except
// hierarchical operations: members that send to other hosts wait for the GPU. index: of the tensor in the operation; rows: of the
// result; part and parts as in collective/collectives.h.
struct nccl_execution;
bhvd_status nccl_begin(struct executor *exec, struct group *set, struct nccl_comm *comm, enum nccl_path path,
                       struct collective *const *colls, int count, struct nccl_execution **out);
// Reduces all tensors of all collectives that have the reduction's dtype, as one vector.
bhvd_status nccl_allreduce(struct nccl_execution *exec, bhvd_op op, const struct reduction *reduction);
bhvd_status nccl_reducescatter(struct nccl_execution *exec, struct collective *coll, size_t index, int64_t rows,
                               const struct reduction *reduction, const size_t *part);
bhvd_status nccl_allgather(struct nccl_execution *exec, struct collective *coll, size_t index, int64_t rows,
                           const size_t *part);
bhvd_status nccl_alltoall(struct nccl_execution *exec, struct collective *coll, size_t index, int64_t rows,
                          const struct parts *parts);
bhvd_status nccl_broadcast(struct nccl_execution *exec, struct collective *coll, size_t index, int root);
bhvd_status nccl_c_lp_s(struct nccl_execution *exec, struct collective *coll);
bhvd_status nccl_d_lp_s(struct nccl_execution *exec, struct collective *coll);
// Marks the end on the stream. Waits for it only if a result goes to the host's memory. status: of the execution.
bhvd_status nccl_end(struct nccl_execution *exec, bhvd_status status);
// Waits until calls that returned NCCL_IN_PROGRESS have enqueued all their work.
bhvd_status nccl_settle(struct executor *exec, struct nccl_comm *comm);
// Fails the executor with NCCL's error message.
bhvd_status nccl_failed(struct executor *exec, const struct nccl_comm *comm, int result, const char *what);

// These include the communicator of this host; NULL is allowed. Called by the engine only.
// Fails the executor if NCCL reports an error, or if the GPU exceeds the time limit for the work that was enqueued last.
void nccl_poll(struct executor *exec, struct nccl_comm *comm);
// Aborts the GPU work of all these communicators together: an abort waits for the GPU, where another one's kernel may hang.
void nccl_abort(struct nccl_comm *const *comms, int count);
// Before nccl_close: waits briefly for pending GPU work. False: it has not finished; abort it.
bool nccl_finish(struct nccl_comm *comm);
// Whether the GPU still has work pending. comm: may be NULL.
bool nccl_is_busy(const struct nccl_comm *comm);
void nccl_close(struct nccl_comm *comm);
