// Collectives of tensors on GPUs by NCCL, where the members of a process set can: each has a GPU of its own and the same NCCL.
// Where only the members of each host can among themselves, or that is asked for, allreduces and broadcasts go in two levels:
// NCCL within the hosts, the CPU transports between them (nccl_two_level.c). All other operations are staged then.
//
// Agreed on in the first execution on GPUs of a set (nccl_agree): the members tell each other over the CPU transports what they
// have; all can, or none does. The path of an operation depends on that and on the request, so all members choose the same. What was staged before (gpu/staging.h) has its tensors on the device as well: in an execution, NCCL
// takes staged and direct operations alike.
//
// An execution only puts work on the device's stream from_host: it waits for the events of the framework's streams there, and
// operations end when all is enqueued. NCCL's own errors, and those of peers, are found by looking (nccl_look): the run
// fails, and every communicator is aborted, so that no stream hangs (decision 28).
#pragma once

#include "run/group.h"
#include "run/reduction.h"
#include "run/work.h"

// How a process set agreed, with the communicator of all its members, if there is one. Who has the set keeps it.
struct nccl_group {
    bool is_on;                 // has a communicator, or had one
    bool two_level;             // the members of each host have one too
    struct nccl_group *local;   // that of this host; NULL: there is none
    bool scales;                // all members have the kernels for scaling
    bool encodes;               // all members have those of the codecs too
    struct bhvd_device *device; // held; NULL when not on
    void *comm;                 // NULL: aborted, or not on
    void *done;                 // event: the last execution has ended,
    int64_t last_ns;            // which was enqueued then; 0: it has
    bool finished;              // nothing is left to do, here and at the peers
};

// What a context was asked for (bhvd_context_options.nccl_two_level).
enum nccl_two_level { TWO_LEVEL_WHERE_NEEDED, TWO_LEVEL_FOR_ALLREDUCE, TWO_LEVEL_ONLY };

// The path of an operation on GPUs: staged through the host, by NCCL among all members, or in two levels.
enum nccl_path { PATH_HOST, PATH_NCCL, PATH_TWO_LEVEL };

// What decides on the path, at posting and again in the execution.
struct nccl_facts {
    bool is_on, two_level;      // NCCL among all members; two levels
    bool scales, encodes;
    bool is_hierarchical;       // the primitive itself works between hosts, see primitive_is_hierarchical
    int device;                 // index; -1: none is on
};

// Of such an operation in this set. group NULL: not agreed on yet.
struct nccl_facts nccl_facts_of(const struct nccl_group *group, const struct group *set, bhvd_kind kind, bool hierarchical);
// Depends only on what is equal on all members.
enum nccl_path nccl_path_of(const struct nccl_facts *facts, const struct work *work);
// BHVD_ERR_UNSUPPORTED: the set's communicator is on another GPU.
bhvd_status nccl_check_gpu(const struct nccl_facts *facts, const struct bhvd_args *args, struct bhvd_error *error);

// In an execution on GPUs, of a set that has not agreed yet. two_level: enum nccl_two_level, this rank's option. *out is there after
// errors too, to be given to nccl_abort; NULL: no memory.
bhvd_status nccl_agree(struct run *run, struct group *set, const struct work *work, int two_level, struct nccl_group **out);
// One execution that NCCL takes: begin, any of the collectives below, end, also after errors. All but `end` only enqueue, but
// for what goes in two levels: members that send to other hosts wait for the GPU.
// index: of the tensor in op; rows: of the result; part and parts as for the host's collectives (collective/collective.h).
struct nccl_run;
bhvd_status nccl_begin(struct run *run, struct group *set, struct nccl_group *group, enum nccl_path path,
                       struct work *const *works, int count, struct nccl_run **out);
// All tensors of the reduction's dtype of all works, as one vector.
bhvd_status nccl_allreduce(struct nccl_run *run, bhvd_op op, const struct reduction *reduction);
bhvd_status nccl_reducescatter(struct nccl_run *run, struct work *work, size_t index, int64_t rows,
                               const struct reduction *reduction, const size_t *part);
bhvd_status nccl_allgather(struct nccl_run *run, struct work *work, size_t index, int64_t rows,
                           const size_t *part);
bhvd_status nccl_alltoall(struct nccl_run *run, struct work *work, size_t index, int64_t rows,
                          const struct parts *parts);
bhvd_status nccl_broadcast(struct nccl_run *run, struct work *work, size_t index, int root);
bhvd_status nccl_c_lp_s(struct nccl_run *run, struct work *work);
bhvd_status nccl_d_lp_s(struct nccl_run *run, const struct work *work);
// Marks the end on the stream. Waits for it only where a result goes to the host's memory. status: of what was run.
bhvd_status nccl_end(struct nccl_run *run, bhvd_status status);
// After calls that may not have enqueued all they do: waits until they have.
bhvd_status nccl_settle(struct run *run, struct nccl_group *group);
// Fails the run with NCCL's words.
bhvd_status nccl_failed(struct run *run, const struct nccl_group *group, int result, const char *what);

// All of these take what is on this host along; NULL is fine. Engine only.
// Fails the run where NCCL reports an error, or where the GPU has not finished in time what was enqueued last.
void nccl_look(struct run *run, struct nccl_group *group);
// Ends what is on the GPU, at once, of all these groups: an abort waits for the GPU, where another group's kernel may hang.
void nccl_abort(struct nccl_group *const *groups, int count);
// Before nccl_close: waits a moment for what is on the GPU. False: it has not finished, and is to be aborted.
bool nccl_finish(struct nccl_group *group);
// Whether the GPU has not done yet what it was given. group: may be NULL.
bool nccl_is_busy(const struct nccl_group *group);
void nccl_close(struct nccl_group *group);
