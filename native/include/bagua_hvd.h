/* bagua_hvd: the whole public interface of the native core.
 *
 * build.py gives this very file to cffi, so it holds enums, structs and prototypes only (lines that begin with '#' are
 * stripped before cffi reads it). Words: a *rank* is one participant, a *process set* the ranks taking part in an
 * operation, a *handle* a running operation. Docs: docs/architecture.md, docs/glossary.md.
 *
 * Every function that can fail returns a bhvd_status (BHVD_OK is the only success) and, where it takes a
 * struct bhvd_error, fills it with the sentence for people. No function writes to a global; all state hangs off
 * bhvd_context, so several ranks may live in one process as threads. MPI alone is the whole process's.
 */
#ifndef BAGUA_HVD_H
#define BAGUA_HVD_H

#include <stddef.h>
#include <stdint.h>

typedef enum bhvd_status {
    BHVD_OK = 0,
    BHVD_IN_PROGRESS = 1,       /* only from bhvd_wait: the time given ran out, the operation goes on */
    BHVD_ERR_ARGUMENT = 2,      /* this call is wrong; nothing was posted */
    BHVD_ERR_MISMATCH = 3,      /* ranks disagree about an operation; all of them get this; the context stays usable */
    BHVD_ERR_UNSUPPORTED = 4,   /* a valid call that this build or state cannot serve; the context stays usable */
    BHVD_ERR_PEER_LOST = 5,     /* a rank died; the context then accepts only bhvd_context_destroy */
    BHVD_ERR_SHUTDOWN = 6,      /* this or another rank left the job */
    BHVD_ERR_TIMEOUT = 7,       /* no progress within the limit */
    BHVD_ERR_AUTH = 8,          /* the other side does not know the job's secret */
    BHVD_ERR_SYSTEM = 9         /* the operating system refused: memory, descriptors, sockets */
} bhvd_status;

/* Order is fixed: the numbers travel on the wire and index the kernel table. */
typedef enum bhvd_dtype {
    BHVD_UINT8 = 0, BHVD_INT8 = 1, BHVD_UINT16 = 2, BHVD_INT16 = 3, BHVD_INT32 = 4, BHVD_INT64 = 5,
    BHVD_FLOAT16 = 6, BHVD_FLOAT32 = 7, BHVD_FLOAT64 = 8, BHVD_BOOL = 9, BHVD_BFLOAT16 = 10,
    BHVD_DTYPE_COUNT = 11
} bhvd_dtype;

/* The values are Horovod's reduction constants. */
typedef enum bhvd_op {
    BHVD_OP_AVERAGE = 0, BHVD_OP_SUM = 1, BHVD_OP_ADASUM = 2, BHVD_OP_MIN = 3, BHVD_OP_MAX = 4, BHVD_OP_PRODUCT = 5
} bhvd_op;

typedef enum bhvd_kind {
    BHVD_ALLREDUCE = 0, BHVD_ALLGATHER = 1, BHVD_BROADCAST = 2, BHVD_ALLTOALL = 3, BHVD_REDUCESCATTER = 4,
    BHVD_BARRIER = 5,
    BHVD_JOIN = 6,              /* result: bhvd_handle_value is the rank that joined last */
    BHVD_C_LP_S = 7,            /* primitive: centralized, low precision, synchronous (native/primitive/c_lp_s.c) */
    BHVD_D_FP_S = 8,            /* primitive: decentralized, full precision, synchronous (native/primitive/d_fp_s.c) */
    BHVD_D_LP_S = 9,            /* primitive: decentralized, low precision, synchronous (native/primitive/d_lp_s.c) */
    BHVD_PROCESS_SET_ADD = 10,  /* ranks in args.splits, their number in args.split_count; bhvd_handle_value is the id.
                                 * args.root_rank 0: every rank of the job posts it; 1: the members alone do, and get the
                                 * id of the set that was asked for so with these ranks already, if one was */
    BHVD_PROCESS_SET_REMOVE = 11 /* the set's id in args.root_rank; bhvd_handle_value is 1 when it was removed */
} bhvd_kind;

/* Lossy encodings of floating point numbers, native/kernel/<name>.h (block8, block4, float8: blocks.h; the last four:
 * rotated.h). */
typedef enum bhvd_codec {
    BHVD_CODEC_NONE = 0, BHVD_CODEC_MINMAX_UINT8 = 1, BHVD_CODEC_SIGN = 2, BHVD_CODEC_SIGN_RMS = 3, BHVD_CODEC_QSGD = 4,
    BHVD_CODEC_FLOAT16 = 5, BHVD_CODEC_BFLOAT16 = 6, BHVD_CODEC_FLOAT32 = 7, BHVD_CODEC_TOPK = 8,
    BHVD_CODEC_TOPK_2BIT = 9, BHVD_CODEC_BLOCK8 = 10, BHVD_CODEC_BLOCK4 = 11, BHVD_CODEC_FLOAT8 = 12,
    BHVD_CODEC_ROTATED1 = 13, BHVD_CODEC_ROTATED2 = 14, BHVD_CODEC_ROTATED3 = 15, BHVD_CODEC_ROTATED4 = 16,
    BHVD_CODEC_COUNT = 17
} bhvd_codec;

/* Equal on the side that encodes and the one that decodes, but for seed and stochastic, which only encoding reads. Zeros:
 * defaults. */
struct bhvd_codec_options {
    double parameter;           /* topk, topk_2bit: the share of elements kept, 0 < p <= 1, default 0.01; qsgd: the number
                                 * of levels, a whole number of 1..127, default 127; block8, block4, float8: elements of
                                 * a block, 64, 128, 256 or 512, default 256; rotated: 256 to 2048, default 512;
                                 * others ignore it */
    uint64_t seed;              /* of random rounding, which qsgd always does, and of the random signs of rotated1
                                 * to rotated4; equal seeds give equal bytes, so give every chunk of every step its own;
                                 * others ignore it */
    int32_t stochastic;         /* block8, block4: 1, round at random; others ignore it */
};

/* Who exchanges with whom in d_fp_s: native/primitive/peers.h. */
typedef enum bhvd_topology {
    BHVD_TOPOLOGY_SHIFT_ONE = 0, BHVD_TOPOLOGY_RING = 1, BHVD_TOPOLOGY_EXPONENTIAL = 2, BHVD_TOPOLOGY_ROUND_ROBIN = 3
} bhvd_topology;

/* How c_lp_s moves codes. SCATTER_GATHER: a chunk for each rank, whose owner sends its mean encoded again; constant
 * traffic. ALLGATHER: every rank's code to every rank, encoded once; for codes so small, or ranks so few, that this is
 * less. */
typedef enum bhvd_exchange { BHVD_EXCHANGE_SCATTER_GATHER = 0, BHVD_EXCHANGE_ALLGATHER = 1 } bhvd_exchange;

typedef struct bhvd_context bhvd_context;
typedef struct bhvd_handle bhvd_handle;
typedef struct bhvd_rendezvous bhvd_rendezvous;
typedef struct bhvd_device bhvd_device;
typedef struct bhvd_device_array bhvd_device_array;
typedef struct bhvd_completions bhvd_completions;

/* What another rank did that ended an operation, or everything. The numbers travel on the wire. */
typedef enum bhvd_cause {
    BHVD_CAUSE_NONE = 0,        /* nothing: this call is wrong, ranks disagree, or this rank failed or left by itself */
    BHVD_CAUSE_ENDED = 1,       /* its process ended, or its connections broke, without a goodbye */
    BHVD_CAUSE_SILENT = 2,      /* nothing comes from it any more: it was stopped, or is out of reach */
    BHVD_CAUSE_LEFT = 3,        /* it left the job */
    BHVD_CAUSE_FAILED = 4,      /* it failed itself, and said so */
    BHVD_CAUSE_TIMEOUT = 5,     /* it did not take its part in time */
    BHVD_CAUSE_PROTOCOL = 6,    /* it sent something that breaks the protocol */
    BHVD_CAUSE_COUNT = 7
} bhvd_cause;

/* For programs status, cause and rank; for people the message. No program reads the message. */
struct bhvd_error {
    bhvd_status status;
    bhvd_cause cause;
    int32_t rank;               /* whose the cause is, a global rank; -1: nobody's, or (BHVD_CAUSE_TIMEOUT) several ranks' */
    char message[1024];         /* one sentence with the facts and the remedy; "" when status is BHVD_OK */
};

/* ------------------------------------------------------------------------------------------------- rendezvous ---- */

/* Starts the rendezvous of a job: a thread that lets `size` ranks exchange their addresses
 * (native/transport/rendezvous_server.c). host: numeric address to bind, "::": all. It listens on the first free port
 * from port to last_port; 0: any, see bhvd_rendezvous_port. secret: bytes that every rank must prove to know.
 * Errors: BHVD_ERR_SYSTEM, naming address and ports, when none is free. */
bhvd_status bhvd_rendezvous_create(const char *host, int port, int last_port, const void *secret, size_t secret_size,
                                   bhvd_rendezvous **out, struct bhvd_error *error);
int bhvd_rendezvous_port(const bhvd_rendezvous *rendezvous);
/* The process of this rank has ended: ranks that wait for it at the rendezvous, or will, hear so at once. scope: in which it had
 * this rank; "": in any. Thread-safe, does not wait. */
void bhvd_rendezvous_rank_ended(bhvd_rendezvous *rendezvous, const char *scope, int rank, int exit_code);
void bhvd_rendezvous_destroy(bhvd_rendezvous *rendezvous);      /* destroy(NULL) is fine */

/* -------------------------------------------------------------------------------------------------------- mpi ---- */

struct bhvd_mpi_options {
    const char *libraries;      /* files to try, separated by ':'; NULL or "": none. One that the process has loaded already
                                 * comes before them, the usual names after them, unless only_these */
    int only_these;
    const char *vendor;         /* "openmpi", "mpich" (and its relatives): whose mpirun started the process; NULL: any */
    int rank, size;             /* what MPI_COMM_WORLD must agree with */
};

/* Finds the MPI library of the process and initializes it, unless somebody has. Does so once; a later call checks rank
 * and size. Blocks until all ranks are there, as MPI_Init does. Errors: BHVD_ERR_UNSUPPORTED, no library, or none that
 * started this process, or one without threads; BHVD_ERR_SYSTEM, it failed. */
bhvd_status bhvd_mpi_open(const struct bhvd_mpi_options *options, struct bhvd_error *error);
/* 0 to 3: MPI_THREAD_SINGLE, FUNNELED, SERIALIZED, MULTIPLE; -1: bhvd_mpi_open has not succeeded, or MPI is finalized. */
int bhvd_mpi_threads(void);
/* Rank 0's bytes for all; blocks. */
bhvd_status bhvd_mpi_broadcast(void *buffer, int nbytes, struct bhvd_error *error);
/* Finalizes MPI, if it was initialized here and still runs; waits for all ranks, as MPI_Finalize does. No context may use
 * it any more. */
void bhvd_mpi_close(void);

/* ---------------------------------------------------------------------------------------------------- context ---- */

struct bhvd_context_options {
    int rank, size;
    const char *transport;          /* "auto" (shm on one host, tcp between), "shm", "tcp", "inproc",
                                     * "mpi" (shm on one host, MPI between; after bhvd_mpi_open) */
    const char *rendezvous_host;    /* numeric address of the rendezvous; unused when size is 1 or inproc */
    int rendezvous_port;
    const char *scope;              /* names this meeting of the ranks ("init.3"): ranks of an older or newer one never mix */
    const char *listen_host;        /* numeric address of the interface for data connections */
    int listen_port, listen_port_last;      /* there the first of these that is free; 0: any */
    const char *host_id;            /* equal exactly on ranks that share memory; NULL: derived from the machine */
    const void *secret;
    size_t secret_size;
    void *inproc_world;             /* transport "inproc": from bhvd_inproc_world_create, shared by all ranks */
    int64_t fusion_threshold;       /* bytes; 0: no fusion */
    int64_t cache_capacity;         /* response cache entries; 0: no cache */
    int start_timeout_ms;           /* until all ranks are connected */
    int timeout_ms;                 /* longest time without progress inside an operation that has started; while a
                                     * member is busy with an earlier one, its limit is the one that counts */
    int heartbeat_timeout_ms;       /* of silence, until a rank whose process does not end is lost: stopped, or out of
                                     * reach; 0: never */
    int stall_warning_ms;           /* 0: no stall check */
    int stall_shutdown_ms;          /* 0: never */
    const char *allreduce_path;     /* NULL or "": chosen (docs/architecture.md); "shared", "ring", "doubling",
                                     * "halving", "hierarchical": forced where the process set allows it */
    int streams;                    /* TCP connections for data to each rank of another host, 1 to 8; 0: by the round trip. The smaller
                                     * number of two ranks holds between them */
    int64_t emulated_bytes_per_s;       /* bytes a second that each of them sends, to try a slow network; 0: as many as it can */
    int64_t known_bytes_per_s;      /* rank 0's: struct bhvd_measured_network's, which is not measured then; 0: unknown */
    const char *negotiation;        /* "star", "tree" (of relays, docs/decisions/engine.md), NULL or "": a tree beyond 64 ranks */
    int nccl_two_level;             /* tensors on GPUs, sets on several hosts. 0: NCCL among all members where it can, else
                                     * within hosts; 1: NCCL within hosts in allreduces; 2: NCCL only within hosts */
    int negotiation_fanout;         /* children of a relay on its host, and as many on other hosts; 0: 16 */
};

/* A world of `size` ranks inside this process, for tests: pass it to every rank's options. */
void *bhvd_inproc_world_create(int size);
void bhvd_inproc_world_destroy(void *world);    /* after every context of it is destroyed */

/* Connects this rank to all others and starts its progress thread. Blocks until all ranks are there or
 * start_timeout_ms passed. Strings are copied. On error *out is NULL and nothing is left behind. */
bhvd_status bhvd_context_create(const struct bhvd_context_options *options, bhvd_context **out,
                                struct bhvd_error *error);

/* Leaves the job: operations in progress end with BHVD_ERR_SHUTDOWN, other ranks notice, the progress thread ends.
 * Handles stay valid until dropped. Idempotent, and safe while other threads wait. */
void bhvd_context_shutdown(bhvd_context *ctx);
/* shutdown, then frees. No other thread may be inside a call with this context. destroy(NULL) is fine. */
void bhvd_context_destroy(bhvd_context *ctx);

/* In a child after fork(): marks the context unusable without touching the parent's connections. Its memory stays, also when
 * it is destroyed: a thread that did not come along may have been changing it. */
void bhvd_context_after_fork(bhvd_context *ctx);

/* Monotonic counters since bhvd_context_create. Payload only: headers and negotiation are in control_bytes_sent. */
struct bhvd_counters {
    uint64_t operations;            /* finished, one per posted handle */
    uint64_t executions;            /* collectives run: less than operations where tensors were fused */
    uint64_t payload_bytes_sent;    /* bytes of tensors or codes that went to other ranks, over any transport */
    uint64_t payload_bytes_received;
    uint64_t control_bytes_sent;    /* of negotiation, with the values of small allreduces that travel with it */
    uint64_t cache_hits, cache_misses;
    uint64_t coordinator_ns;        /* rank 0: processor time spent coordinating, counted after
                                     * bhvd_context_measure_coordinator */
    uint64_t negotiation_messages;  /* announcements and answers, sent and received; a message holds any number of them */
    uint64_t shm_bytes_sent, tcp_bytes_sent, mpi_bytes_sent;    /* payload_bytes_sent, by what they went over; in shared memory
                                     * what each other rank reads is counted */
    uint64_t nccl_bytes;            /* bytes of the tensors that NCCL took; how often it sends them it alone knows */
};
void bhvd_context_counters(bhvd_context *ctx, struct bhvd_counters *out);

/* Of operations, what they sent is counted on the account that they were posted with, too: payload_bytes_sent in parts. */
enum { BHVD_ACCOUNTS = 64 };
struct bhvd_sent {
    uint64_t shm_bytes, tcp_bytes, mpi_bytes;
};
/* Of ended operations; zeros for an account that is none. Thread-safe. */
void bhvd_context_sent(bhvd_context *ctx, int account, struct bhvd_sent *out);

/* Between hosts, as measured when the ranks connected. */
struct bhvd_measured_network {
    double latency_s;               /* one way, to the farthest rank; 0: one host */
    double bytes_per_s;             /* of the slowest line that was looked at; 0: one host, more than could be told, or no TCP */
};
/* What schedules are chosen by: as rank 0 said it with the last operation that was executed here, equal on all ranks after the
 * same one; zeros before the first. Thread-safe. */
void bhvd_context_network(bhvd_context *ctx, struct bhvd_measured_network *out);

/* For whom the others waited, since bhvd_context_create. */
struct bhvd_waited_for {
    uint64_t operations;            /* which this rank was the last to ask for */
    uint64_t waited_ns;             /* from the last but one's asking for them to its own, in all */
};
/* Of each rank of the job, `capacity` at most, on the coordinator, rank 0; returns how many were written: 0 on others, who do
 * not know, and in jobs of one rank. Times are kept while the stall check is on. Thread-safe. */
int bhvd_context_waited_for(bhvd_context *ctx, struct bhvd_waited_for *out, int capacity);

/* Operations that other ranks wait for one rank to ask for, for longer than the stall check's warning time. */
enum { BHVD_STALLED_NAMES = 6 };
struct bhvd_stalled {
    int rank, operations;
    char names[BHVD_STALLED_NAMES][101];             /* of the first ones, cut where they are longer */
};
/* One for each such rank, rising, `capacity` at most, on rank 0, which alone knows, as of its last look (one a second); returns
 * how many were written. Thread-safe. */
int bhvd_context_stalled(bhvd_context *ctx, struct bhvd_stalled *out, int capacity);
/* Counts coordinator_ns from now on: two system calls a frame, too much to be always on. Thread-safe. */
void bhvd_context_measure_coordinator(bhvd_context *ctx);
/* While it awaits the state of a running elastic job, posts fail with BHVD_ERR_ARGUMENT: the other ranks would wait. Thread-safe. */
void bhvd_context_await_state(bhvd_context *ctx, int awaits);

/* BHVD_OK while usable; else the reason it is not, with the sentence. */
bhvd_status bhvd_context_status(bhvd_context *ctx, struct bhvd_error *error);
/* What made this rank fail, if it does: how the first operation ended that another rank ended (error->cause); else as
 * bhvd_context_status. */
bhvd_status bhvd_context_first_loss(bhvd_context *ctx, struct bhvd_error *error);

/* Waits until this GPU has done all that ended operations of the context have put on it. They end when that is enqueued, so
 * only after this are their results known to be good, to be kept in a checkpoint. Blocks; thread-safe. Errors: what the
 * context failed for, or BHVD_ERR_SYSTEM, the GPU failed; what operations since the last such call wrote is undefined. */
bhvd_status bhvd_context_wait_gpu(bhvd_context *ctx, bhvd_device *device, struct bhvd_error *error);

/* Levels of what the core says, as Python's logging counts. */
typedef enum bhvd_log_level {
    BHVD_LOG_LATE = 0,          /* none of people's: other ranks wait for this one; the text names the operations */
    BHVD_LOG_DEBUG = 10, BHVD_LOG_INFO = 20, BHVD_LOG_WARNING = 30, BHVD_LOG_ERROR = 40
} bhvd_log_level;

struct bhvd_record {
    bhvd_log_level level;
    int line;                   /* of `file`, of the sources */
    const char *file, *text;    /* the text may have several lines; it lives as long as the record */
};

/* Waits, timeout_ms at most, until the core has something to say. Returns 1, and the record, which the caller frees; 0:
 * time ran out; -1: the context is shut down, and all that it said has been taken. For one thread. The core never waits for
 * it: it keeps some hundred records, and counts those that it lost. */
int bhvd_context_next_record(bhvd_context *ctx, int timeout_ms, struct bhvd_record **out);
void bhvd_record_free(struct bhvd_record *record);

/* Writes a Chrome trace of the coordinator's view to `path`, from now on; rank 0 does, other ranks ignore it. The file is
 * valid JSON after every event. Starting the open file again changes nothing; another one takes its place. */
bhvd_status bhvd_timeline_start(bhvd_context *ctx, const char *path, int mark_cycles, struct bhvd_error *error);
void bhvd_timeline_stop(bhvd_context *ctx);

/* Process sets. Id 0 holds all ranks. Ids come from BHVD_PROCESS_SET_ADD operations, equal on all ranks. */
/* Size of the set, or -1 when there is none with this id. */
int bhvd_process_set_size(bhvd_context *ctx, int id);
/* This rank's position in the set, -1 when not a member, -2 when there is no such set. */
int bhvd_process_set_rank(bhvd_context *ctx, int id);
/* Copies at most `capacity` global ranks of the set, rising; returns their number, or -1. */
int bhvd_process_set_ranks(bhvd_context *ctx, int id, int32_t *ranks, int capacity);
/* Hosts that its ranks are on, the participants of hierarchical d_fp_s and d_lp_s; -1: no such set, or not a member. */
int bhvd_process_set_hosts(bhvd_context *ctx, int id);

/* -------------------------------------------------------------------------------------------------- operations ---- */

struct bhvd_tensor {
    const void *src;        /* contiguous; NULL allowed when it has no elements */
    void *dst;              /* equal src: in place (allreduce, broadcast, c_lp_s, d_fp_s). NULL: the core allocates:
                             * bhvd_result */
    const int64_t *shape;
    int32_t ndim;
    int32_t dtype;          /* bhvd_dtype */
    int32_t dst_on_host;    /* 1: of an operation on a GPU, dst is the host's memory nevertheless */
};

/* One operation over tensor_count tensors (more than one: a grouped operation, all or nothing). Pointers inside are read
 * during bhvd_post only, except tensor memory and error states, which must live until the operation ended. */
struct bhvd_args {
    int32_t kind;                   /* bhvd_kind */
    int32_t process_set;
    const char *name;               /* full name; ranks match operations by it */
    const struct bhvd_tensor *tensors;
    size_t tensor_count;            /* barrier, join, process sets: 0 */
    int32_t op;                     /* bhvd_op: allreduce, reducescatter, c_lp_s (average or sum) */
    int32_t root_rank;              /* broadcast: global rank */
    double prescale_factor, postscale_factor;   /* decentralized primitives: 1.0 */
    const int32_t *splits;          /* alltoall: rows of dim 0 for each set rank; NULL: even */
    size_t split_count;
    int32_t codec;                  /* c_lp_s, d_lp_s: bhvd_codec; parameters equal on all ranks, seeds need not be */
    struct bhvd_codec_options codec_options;
    int32_t blocking;               /* 1: the caller calls bhvd_wait next, so that its own thread makes the progress */
    int32_t exchange;               /* c_lp_s: bhvd_exchange */
    float *worker_error;            /* c_lp_s: error feedback, one float per element of all tensors; NULL: none */
    float *server_error;            /* c_lp_s: one float per element of one chunk, see bhvd_chunk_count; hierarchical: one
                                     * per element of all tensors; NULL: none; not used by the exchange ALLGATHER, which
                                     * encodes once */
    bhvd_device_array *worker_copy;  /* of worker_error and server_error, which operations on a GPU keep there: they need */
    bhvd_device_array *server_copy;  /* device copies. An array that has one is given with it to every operation */
    bhvd_device_array *replica_copies[3];   /* the same of replicas */
    double before[3];               /* d_lp_s: v = values + the sum of these times own, left and right, when not all are 0 */
    double after[4];                /* d_lp_s: dst = the sum of these times values, own, left and right, when not all but the */
                                    /* first are 0; else dst is left alone. Replicas as they are then. */
    float *replicas[3];             /* d_lp_s: own, left and right, one float per element of all tensors; NULL: not
                                     * kept */
    int32_t topology;               /* d_fp_s: bhvd_topology; d_lp_s is a ring */
    int32_t round;                  /* d_fp_s: which round of the topology's schedule, from 0; equal on all ranks */
    int32_t hierarchical;           /* primitives: 1: in full precision within each host, and the primitive between hosts,
                                     * see native/primitive/primitive.h; equal on all ranks */
    int32_t device;                 /* -1: the host's memory; else the GPU's index: src and dst of all tensors are on it */
    bhvd_device *gpu;               /* of that index; NULL on the CPU */
    void *stream;                   /* the framework's: what it was given before is what the operation sees */
    int32_t account;                /* 0 to BHVD_ACCOUNTS - 1, this rank's own affair: see bhvd_context_sent */
};

/* Posts an operation and returns at once. Thread-safe. Posting order need not agree between ranks: operations match by
 * name, within a process set. On BHVD_OK *out must be given to bhvd_handle_drop in the end.
 * Now: BHVD_ERR_ARGUMENT (nothing was posted), BHVD_ERR_UNSUPPORTED, or the context's own failure.
 * Later, from bhvd_wait: BHVD_ERR_MISMATCH on every rank of the set, BHVD_ERR_PEER_LOST, _SHUTDOWN, _TIMEOUT. */
bhvd_status bhvd_post(bhvd_context *ctx, const struct bhvd_args *args, bhvd_handle **out, struct bhvd_error *error);

/* Waits until the operation ended, about timeout_ms at most (negative: for ever), and returns how it ended, or
 * BHVD_IN_PROGRESS. The calling thread may be the one that executes operations: one that it has begun it finishes first,
 * however small timeout_ms is; that is bounded by the context's own timeout_ms. May be called again, and from several
 * threads. */
bhvd_status bhvd_wait(bhvd_handle *handle, int timeout_ms, struct bhvd_error *error);
/* Of an operation on a GPU that ended with BHVD_OK: what `stream` is given from now on runs after its results are there.
 * bhvd_wait alone says only that they are on their way. Returns how the operation ended; does not block. */
bhvd_status bhvd_handle_join(bhvd_handle *handle, void *stream, struct bhvd_error *error);
/* 1 when the operation ended, else 0. Never blocks. */
int bhvd_poll(bhvd_handle *handle);
/* The number an operation yields (join, process sets); 0 for others. */
int64_t bhvd_handle_value(bhvd_handle *handle);
/* Gives the handle back. An operation still running goes on; its tensors must live until then. drop(NULL) is fine. */
void bhvd_handle_drop(bhvd_handle *handle);

/* A list of what has ended, for threads that wait for many operations. NULL: no memory. */
bhvd_completions *bhvd_completions_create(void);
/* When the operation has ended, or now if it has, `number` is put into the list. One list for a handle, which may be
 * dropped before. Thread-safe. Errors: BHVD_ERR_ARGUMENT, it waits to be put into a list already; BHVD_ERR_SYSTEM. */
bhvd_status bhvd_completions_add(bhvd_completions *list, bhvd_handle *handle, int64_t number);
/* Puts a number into the list that is no operation's, so that who waits hears of something else. Thread-safe. */
bhvd_status bhvd_completions_put(bhvd_completions *list, int64_t number);
/* Takes the number that came first; waits for one timeout_ms at most (negative: for ever). -1: there was none. The
 * calling thread executes nothing meanwhile, unlike one in bhvd_wait. Thread-safe: each number goes to one thread. */
int64_t bhvd_completions_next(bhvd_completions *list, int timeout_ms);
/* Nobody may be in another call with it; operations that were added may be in progress. destroy(NULL) is fine. */
void bhvd_completions_destroy(bhvd_completions *list);

/* What the core allocated for tensor `index` (posted with dst NULL) of an operation that ended with BHVD_OK. */
struct bhvd_result {
    void *data;             /* 64-byte aligned; NULL when it has no bytes */
    size_t nbytes;
    int64_t dim0;           /* the first dimension; the others are those of the input */
    int on_device;          /* 1: NCCL left it on the GPU, where data points: bhvd_result_copy takes it */
};
bhvd_status bhvd_result(bhvd_handle *handle, size_t index, struct bhvd_result *out);
/* The same, and ownership passes to the caller: bhvd_result_free(data). BHVD_ERR_ARGUMENT for one on a GPU. */
bhvd_status bhvd_result_take(bhvd_handle *handle, size_t index, struct bhvd_result *out);
void bhvd_result_free(void *data);
/* bhvd_post of one tensor in the host's memory, and unless wait_ms is 0, blocking, with bhvd_wait and for a dst of 0
 * bhvd_result_take: for small operations, beside which it takes long to fill structs. Addresses are numbers; other
 * fields of struct bhvd_args are as they mostly are. *result is filled on BHVD_OK. Errors are those of all calls. *out is NULL
 * but with BHVD_IN_PROGRESS: then the operation is to be waited for, and *out to be dropped. */
bhvd_status bhvd_post_tensor(bhvd_context *ctx, int kind, const char *name, int process_set, uintptr_t src, uintptr_t dst,
                             const int64_t *shape, int ndim, int dtype, int op, int root_rank, double prescale_factor,
                             double postscale_factor, int account, int wait_ms, struct bhvd_result *result,
                             bhvd_handle **out, struct bhvd_error *error);
/* Copies a result that is on the GPU to dst there, in the order of `stream`, for which bhvd_handle_join was called before.
 * Does not block; the handle may be dropped at once. */
bhvd_status bhvd_result_copy(bhvd_handle *handle, size_t index, void *dst, void *stream, struct bhvd_error *error);
/* alltoall: rows received from each set rank of tensor `index`; count = set size. */
bhvd_status bhvd_received_splits(bhvd_handle *handle, size_t index, int32_t *splits, size_t count);

/* Tensors as one flat vector and back: pack reads every src, unpack writes every dst, one after the other. flat: the
 * vector's dtype. BHVD_FLOAT32 takes tensors of every floating dtype, rounded to nearest even (their mixture too); others
 * take tensors of their own dtype, copied. BHVD_ERR_UNSUPPORTED: something else; nothing was written. Any alignment. */
bhvd_status bhvd_pack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, void *dst);
bhvd_status bhvd_unpack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src);
/* dst = src + the vector's elements, of floating dtypes; where they differ, added in float32 and rounded once. */
bhvd_status bhvd_unpack_add(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src);

/* Adam whose momentum travels (algorithms/qadam.py): of one weight, with p = sqrt(v) / correction + eps. */
struct bhvd_adam {
    double beta1, correction, eps;
    double longest;             /* an element of m is at most as large as longest p; infinity: no bound */
    double weight_decay;        /* times x is added to the gradient */
    double rate;                /* the learning rate by Adam's correction of m */
    double decay;               /* of x in a step, decoupled: the learning rate times the weight decay; else 0 */
};
/* sent = beta1 m + (1 - beta1) (g + weight_decay x), 0 where v is, bounded; in_steps: by p. Tensors are lists of `count`; sent
 * and arithmetic are of dtype `flat`, float32 or float64, as for bhvd_pack. x: NULL where no weight_decay is. */
bhvd_status bhvd_adam_momentum(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *g,
                               const struct bhvd_tensor *x, const struct bhvd_adam *by, size_t count, int in_steps,
                               bhvd_dtype flat, void *sent);
/* m = sent, times p where in_steps, 0 where v is, bounded; x -= rate m / p + decay x. */
bhvd_status bhvd_adam_step(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *x,
                           const struct bhvd_adam *by, size_t count, int in_steps, bhvd_dtype flat, const void *sent);

/* Adam's variance among relaxed steps (training/variance.py): of one weight, in step t. */
struct bhvd_adam_variance {
    double beta2;
    double exact_rate;          /* by which g^2 enters `exact`: 0 in a relaxed step */
    double own_rate, correction, ranks;     /* by which it enters `own`; 1 - beta2^t; n */
};
/* exact += exact_rate (g^2 - exact), own += own_rate (g^2 - own), flat vectors; v becomes that of which the optimizer will make
 * min(max(exact, own / ranks), own), bias corrected. */
bhvd_status bhvd_adam_variance(const struct bhvd_tensor *v, const struct bhvd_tensor *g, const struct bhvd_adam_variance *by,
                               size_t count, bhvd_dtype flat, void *exact, void *own);

/* ----------------------------------------------------------------------------------------------------- devices ---- */

/* Kernels of native/device/kernels.cu that operations use where they are set: by their names there, in capitals. All but the
 * first are four, of float32, float64, float16 and bfloat16. */
typedef enum bhvd_device_kernel {
    BHVD_DEVICE_COPY_SPANS,
    BHVD_DEVICE_SCALE, BHVD_DEVICE_FEED_ERROR, BHVD_DEVICE_UPDATE_RESIDUAL, BHVD_DEVICE_MIX,
    BHVD_DEVICE_MINMAX_UINT8_RANGES, BHVD_DEVICE_MINMAX_UINT8_ENCODE, BHVD_DEVICE_MINMAX_UINT8_DECODE,
    BHVD_DEVICE_MINMAX_UINT8_DECODE_ADD, BHVD_DEVICE_MINMAX_UINT8_DECODE_SUM,
    BHVD_DEVICE_SIGN_ENCODE, BHVD_DEVICE_SIGN_HEADER, BHVD_DEVICE_SIGN_DECODE, BHVD_DEVICE_SIGN_DECODE_ADD,
    BHVD_DEVICE_SIGN_DECODE_SUM,
    BHVD_DEVICE_QSGD_ENCODE, BHVD_DEVICE_QSGD_HEADER, BHVD_DEVICE_QSGD_DECODE, BHVD_DEVICE_QSGD_DECODE_ADD,
    BHVD_DEVICE_QSGD_DECODE_SUM,
    BHVD_DEVICE_ROTATED_ENCODE, BHVD_DEVICE_ROTATED_HEADER, BHVD_DEVICE_ROTATED_DECODE, BHVD_DEVICE_ROTATED_DECODE_ADD,
    BHVD_DEVICE_ROTATED_DECODE_SUM, BHVD_DEVICE_ROTATED_RECODE,
    BHVD_DEVICE_KERNEL_COUNT
} bhvd_device_kernel;

struct bhvd_device_options {
    int index;                  /* as the driver counts: CUDA_VISIBLE_DEVICES is heeded */
    const char *libraries;      /* files to try for libcuda.so.1, separated by ':', before the one that the process has
                                 * loaded already; NULL or "": none */
    const char *nccl_libraries; /* the same for libnccl.so.2; NULL: NCCL is not used. A missing one is no error */
};

/* Opens a GPU: NVIDIA's driver is loaded at run time. The caller's reference is dropped by bhvd_device_drop; operations
 * in progress hold their own. Errors: BHVD_ERR_UNSUPPORTED, no driver, or too old, naming what is missing;
 * BHVD_ERR_ARGUMENT, no such GPU; BHVD_ERR_SYSTEM, it failed. */
bhvd_status bhvd_device_create(const struct bhvd_device_options *options, bhvd_device **out, struct bhvd_error *error);
void bhvd_device_drop(bhvd_device *device);     /* drop(NULL) is fine */
/* The driver's function handle, compiled for this GPU; it must live as long as the device. NULL: do without. type: 0 to 3. */
bhvd_status bhvd_device_set_kernel(bhvd_device *device, bhvd_device_kernel kernel, int type, void *function);
/* The stream that reads tensors of operations (to_host 1) or writes them (0): memory that the framework gives to others
 * must wait for both. */
void *bhvd_device_stream(bhvd_device *device, int to_host);
/* Copies every src to dst, between host and GPU in any direction, after what `stream` was given before, and waits for
 * it. The shape counts, not the dtype. Blocks. */
bhvd_status bhvd_device_copy(bhvd_device *device, const struct bhvd_tensor *tensors, size_t count, void *stream,
                             struct bhvd_error *error);

/* An array of the host's memory whose newest values may lie on a GPU, since the operation that wrote them last ran there
 * (struct bhvd_args). To be used by one operation at a time, and by nobody else while it is in progress.
 * values: count floats that live as long as the device copy. NULL: no memory. */
bhvd_device_array *bhvd_device_array_create(float *values, size_t count);
void bhvd_device_array_destroy(bhvd_device_array *device_copy);  /* destroy(NULL) is fine */
/* Brings the newest values into the array, where they may be read and written until the next operation. Waits for the
 * GPU where they are on it. BHVD_ERR_SYSTEM: the GPU failed; the array is as it was. */
bhvd_status bhvd_device_array_fetch(bhvd_device_array *device_copy, struct bhvd_error *error);
/* Gives `to` the newest values of `from`, an array of as many floats, on the GPU where they are on it. Errors as above. */
bhvd_status bhvd_device_array_copy(bhvd_device_array *to, bhvd_device_array *from, struct bhvd_error *error);

/* What is there. *version: the driver's, 12040 for CUDA 12.4; device_count: GPUs. Errors as bhvd_device_create. */
bhvd_status bhvd_cuda_probe(const char *libraries, int *version, int *device_count, struct bhvd_error *error);
/* *version: of libnccl.so.2, 22000 for NCCL 2.20. libraries: files to try, as above. BHVD_ERR_UNSUPPORTED: none, or too
 * old; the sentence names package and variable. */
bhvd_status bhvd_nccl_probe(const char *libraries, int *version, struct bhvd_error *error);

/* --------------------------------------------------------------------------------------------------- simulation ---- */

/* Hosts with one rank and one line each. */
struct bhvd_network {
    double latency_s;           /* one way, between any two hosts */
    double bytes_per_s;         /* of a host's line, each way; packets' headers count */
    int slow_rank;              /* -1: none. One whose line is another: */
    double slow_latency_s, slow_bytes_per_s;
    double message_s;           /* of a core for a message, at the sender and at the receiver */
    double load_s_per_byte, reduce_s_per_byte, scale_s_per_byte, store_s_per_byte, copy_s_per_byte;     /* of a core */
    double encode_s_per_byte, decode_s_per_byte;    /* of values; decode: for each of the codes that are added */
};

/* An operation of one tensor of `nbytes`. */
struct bhvd_simulated {
    int32_t kind;               /* BHVD_ALLREDUCE, BHVD_C_LP_S, BHVD_D_FP_S, BHVD_D_LP_S */
    int32_t dtype;              /* bhvd_dtype */
    size_t nbytes;
    int32_t codec;              /* c_lp_s, d_lp_s: bhvd_codec, with its parameter, 0: the default */
    double codec_parameter;
    int32_t exchange;           /* c_lp_s: bhvd_exchange */
    int32_t topology, round;    /* d_fp_s: as in struct bhvd_args */
};

/* What these operations, posted at once in this order, would take: simulates the schedules of all ranks. path: of allreduces,
 * "ring", "doubling", "halving"; NULL or "": the one that would be chosen. agrees: 1, they are agreed on first, all together.
 * seconds: [size], when each rank is done. Not thread-bound; no context. Errors: BHVD_ERR_ARGUMENT;
 * BHVD_ERR_UNSUPPORTED, more than 8 Mi steps under way (a ring or C_LP_S of more than 1,000 hosts); BHVD_ERR_SYSTEM, no memory. */
bhvd_status bhvd_simulate(int size, const char *path, const struct bhvd_simulated *operations, size_t count, int agrees,
                          const struct bhvd_network *network, double *seconds, struct bhvd_error *error);

/* -------------------------------------------------------------------------------------- codecs, kernels, facts ---- */

/* Elements of the longest chunk when `count` elements are cut for `size` ranks (first count % size chunks one longer). */
size_t bhvd_chunk_count(size_t count, int size);
/* Codecs. options: NULL for the defaults. Memory of any alignment. Errors, which leave dst untouched:
 * BHVD_ERR_UNSUPPORTED, no such codec or it does not take this dtype; BHVD_ERR_ARGUMENT, options out of range, too many
 * elements, or (decode) bytes that do not begin with a header of this codec's version. */
/* Bytes that `count` elements of `dtype` take encoded; 0 for count > 0: one of these errors. */
size_t bhvd_encoded_size(bhvd_codec codec, bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options);
/* dst and the encoded src hold bhvd_encoded_size bytes. Decoding is safe whatever these bytes are. */
bhvd_status bhvd_encode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options);
bhvd_status bhvd_decode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options);
/* dst[i] += decoded[i], in float32 whatever the dtype. */
bhvd_status bhvd_decode_add(bhvd_codec codec, bhvd_dtype dtype, float *dst, const void *src, size_t count,
                            const struct bhvd_codec_options *options);

size_t bhvd_dtype_size(bhvd_dtype dtype);
const char *bhvd_dtype_name(bhvd_dtype dtype);
/* "scalar", "avx2" or "avx512": the widest instruction set this CPU runs and this build has. */
const char *bhvd_cpu_features(void);
const char *bhvd_version(void);

#endif
