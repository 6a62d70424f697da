/* bagua_hvd: the complete public interface of the native core.
 *
 * build.py passes this file to cffi, so it holds enums, structs and prototypes only (lines that begin with '#' are
 * stripped before cffi reads it). Words: a *rank* is one participant, a *process set* the ranks that take part in an
 * operation, a *handle* one posted operation. Docs: docs/architecture.md, docs/glossary.md.
 *
 * Every function that can fail returns a bhvd_status (BHVD_OK is the only success) and, where it takes a
 * struct bhvd_error, fills in the message. No function writes to a global: all state belongs to a
 * bhvd_context, so several ranks can run in one process as threads. Only MPI is global to the process.
 */
#ifndef BAGUA_HVD_H
#define BAGUA_HVD_H

#include <stddef.h>
#include <stdint.h>

typedef enum bhvd_status {
    BHVD_OK = 0,
    BHVD_IN_PROGRESS = 1,       /* from bhvd_wait and bhvd_post_tensor: the timeout expired, the operation continues */
    BHVD_ERR_ARGUMENT = 2,      /* this call is wrong; nothing was posted */
    BHVD_ERR_MISMATCH = 3,      /* ranks disagree about an operation; all of them get this; the context stays usable */
    BHVD_ERR_UNSUPPORTED = 4,   /* a valid call that this build or state cannot serve; the context stays usable */
    BHVD_ERR_PEER_LOST = 5,     /* a rank died; after that the context accepts only bhvd_context_destroy */
    BHVD_ERR_SHUTDOWN = 6,      /* this or another rank left the job */
    BHVD_ERR_TIMEOUT = 7,       /* no progress within the limit */
    BHVD_ERR_AUTH = 8,          /* the other side does not know the job's secret */
    BHVD_ERR_SYSTEM = 9         /* the operating system refused: memory, descriptors, sockets */
} bhvd_status;

/* The order is fixed: the numbers are part of the wire format and index the kernel table. */
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
    BHVD_ALLREDUCE = 0, BHVD_ALLGATHER = 1, BHVD_BROADCAST = 2,
    BHVD_ALLTOALL = 3,          /* args.root_rank 2: speculative, posted before any call waits for it, so no stall */
    BHVD_REDUCESCATTER = 4, BHVD_BARRIER = 5,
    BHVD_JOIN = 6,              /* result: bhvd_handle_value is the rank that joined last */
    BHVD_C_LP_S = 7,            /* primitive: centralized, low precision, synchronous (native/primitive/c_lp_s.c) */
    BHVD_D_FP_S = 8,            /* primitive: decentralized, full precision, synchronous (native/primitive/d_fp_s.c) */
    BHVD_D_LP_S = 9,            /* primitive: decentralized, low precision, synchronous (native/primitive/d_lp_s.c) */
    BHVD_PROCESS_SET_ADD = 10,  /* ranks in args.splits, their number in args.split_count; bhvd_handle_value is the id.
                                 * args.root_rank 0: every rank of the job posts it; 1: only the members do, and get the
                                 * id of an existing set if one with these ranks was added this way before; 2: as 1, for
                                 * speculative operations */
    BHVD_PROCESS_SET_REMOVE = 11 /* the set's id in args.root_rank; bhvd_handle_value is 1 when it was removed */
} bhvd_kind;

/* Lossy encodings of floating point numbers, native/kernel/<name>.h or <name>_kernels.c (block8, block4, float8: blocks; the last
 * four: rotated). */
typedef enum bhvd_codec {
    BHVD_CODEC_NONE = 0, BHVD_CODEC_MINMAX_UINT8 = 1, BHVD_CODEC_SIGN = 2, BHVD_CODEC_SIGN_RMS = 3,
    BHVD_CODEC_FLOAT16 = 4, BHVD_CODEC_BFLOAT16 = 5, BHVD_CODEC_FLOAT32 = 6, BHVD_CODEC_TOPK = 7,
    BHVD_CODEC_TOPK_2BIT = 8, BHVD_CODEC_BLOCK8 = 9, BHVD_CODEC_BLOCK4 = 10, BHVD_CODEC_FLOAT8 = 11,
    BHVD_CODEC_ROTATED1 = 12, BHVD_CODEC_ROTATED2 = 13, BHVD_CODEC_ROTATED3 = 14, BHVD_CODEC_ROTATED4 = 15,
    BHVD_CODEC_COUNT = 16
} bhvd_codec;

/* Must be equal on the encoding and the decoding side, except seed and stochastic, which only encoding reads. Zeros:
 * defaults. */
struct bhvd_codec_options {
    double parameter;           /* topk, topk_2bit: the fraction of elements kept, 0 < p <= 1, default 0.01; block8,
                                 * block4, float8: elements per block, 64, 128, 256 or 512, default 256; rotated: 256 to
                                 * 2048, default 512; others ignore it */
    uint64_t seed;              /* for random rounding (block8 and block4, if stochastic) and the random signs of
                                 * rotated1 to rotated4; equal seeds give equal bytes, so use another for every chunk of every step;
                                 * others ignore it */
    int32_t stochastic;         /* block8, block4: 1 rounds at random; others ignore it */
};

/* Which ranks exchange with each other in d_fp_s: native/primitive/peers.h. */
typedef enum bhvd_topology {
    BHVD_TOPOLOGY_SHIFT_ONE = 0, BHVD_TOPOLOGY_RING = 1, BHVD_TOPOLOGY_EXPONENTIAL = 2, BHVD_TOPOLOGY_ROUND_ROBIN = 3
} bhvd_topology;

/* How c_lp_s moves codes. SCATTER_GATHER: each rank owns a chunk, averages it and sends the mean encoded again; the traffic is
 * constant. ALLGATHER: every rank sends its code to every rank, encoded once; less traffic for small codes or
 * few ranks. */
typedef enum bhvd_exchange { BHVD_EXCHANGE_SCATTER_GATHER = 0, BHVD_EXCHANGE_ALLGATHER = 1 } bhvd_exchange;

typedef struct bhvd_context bhvd_context;
typedef struct bhvd_operation bhvd_handle;
typedef struct bhvd_device bhvd_device;
typedef struct bhvd_device_array bhvd_device_array;
typedef struct bhvd_completions bhvd_completions;

/* What another rank did to end an operation or the whole job. The numbers are part of the wire format. */
typedef enum bhvd_cause {
    BHVD_CAUSE_NONE = 0,        /* no other rank: this call is wrong, ranks disagree, or this rank failed or left by itself */
    BHVD_CAUSE_ENDED = 1,       /* its process ended or its connections broke, without a goodbye */
    BHVD_CAUSE_SILENT = 2,      /* it no longer responds: it was stopped, or is unreachable */
    BHVD_CAUSE_LEFT = 3,        /* it left the job */
    BHVD_CAUSE_FAILED = 4,      /* it reported its own failure */
    BHVD_CAUSE_TIMEOUT = 5,     /* it did not participate in time */
    BHVD_CAUSE_PROTOCOL = 6,    /* it violated the protocol */
    BHVD_CAUSE_COUNT = 7
} bhvd_cause;

/* Programs read status, cause and rank; people read the message. No program parses the message. */
struct bhvd_error {
    bhvd_status status;
    bhvd_cause cause;
    int32_t rank;               /* the global rank that caused it; -1: none, or (BHVD_CAUSE_TIMEOUT) several */
    char message[1024];         /* one sentence with the facts and the remedy; "" when status is BHVD_OK */
};

/* -------------------------------------------------------------------------------------------------------- mpi ---- */

struct bhvd_mpi_options {
    const char *libraries;      /* files to try, separated by ':'; NULL or "": none. A library that the process has already loaded
                                 * is tried before them, the usual names after them, unless only_these */
    int only_these;
    const char *vendor;         /* "openmpi", "mpich" (and its derivatives): the MPI whose mpirun started the process; NULL: any */
    int rank, size;             /* MPI_COMM_WORLD must agree with these */
};

/* Finds the MPI library of the process and initializes it, unless it is already initialized. Does so once; a later call checks
 * rank and size. Blocks until all ranks have called it, as MPI_Init does. Errors: BHVD_ERR_UNSUPPORTED, no library was found, or
 * none that started this process, or it has no thread support; BHVD_ERR_SYSTEM, initialization failed. */
bhvd_status bhvd_mpi_open(const struct bhvd_mpi_options *options, struct bhvd_error *error);
/* 0 to 3: MPI_THREAD_SINGLE, FUNNELED, SERIALIZED, MULTIPLE; -1: bhvd_mpi_open has not succeeded, or MPI is finalized. */
int bhvd_mpi_threads(void);
/* Copies rank 0's bytes to all ranks; blocks. */
bhvd_status bhvd_mpi_broadcast(void *buffer, int nbytes, struct bhvd_error *error);
/* Finalizes MPI if bhvd_mpi_open initialized it and it still runs; waits for all ranks, as MPI_Finalize does. After this no
 * context may use MPI. */
void bhvd_mpi_close(void);

/* ---------------------------------------------------------------------------------------------------- context ---- */

/* What two ranks send each other when they connect a channel, by channel: only a rank that knows the job's secret knows it
 * (native/transport/auth.h). */
enum { BHVD_PROOF_BYTES = 32, BHVD_CHANNELS = 10 };

struct bhvd_proofs {
    unsigned char sent[BHVD_CHANNELS][BHVD_PROOF_BYTES], received[BHVD_CHANNELS][BHVD_PROOF_BYTES];
};

struct bhvd_context_options {
    int rank, size;
    const char *transport;          /* "auto" (shm on one host, tcp between), "shm", "tcp", "inproc",
                                     * "mpi" (shm on one host, MPI between; after bhvd_mpi_open) */
    /* Gathers the endpoints of all ranks: called once, by bhvd_context_create, with this rank's `nbytes` bytes; fills `all` with
     * size * nbytes bytes, and `proofs`, both in the order of ranks. It may block until start_timeout_ms. Not BHVD_OK: `error` is
     * filled. Unused when size is 1 or inproc. */
    bhvd_status (*gather)(void *user, const void *mine, int nbytes, void *all, struct bhvd_proofs *proofs,
                          struct bhvd_error *error);
    void *user;                     /* of gather */
    const char *listen_host;        /* numeric address of the interface for data connections */
    int listen_port, listen_port_last;      /* it listens on the first free port of this range; 0: any */
    const char *host_id;            /* equal on two ranks if and only if they share memory; NULL: derived from the machine */
    void *inproc_world;             /* transport "inproc": from bhvd_inproc_world_create, shared by all ranks */
    int64_t fusion_threshold;       /* bytes; 0: no fusion */
    int64_t cache_capacity;         /* response cache entries; 0: no cache */
    int start_timeout_ms;           /* limit for connecting all ranks */
    int timeout_ms;                 /* longest time without progress inside an operation that has started; while a
                                     * member is busy with an earlier operation, the limit of that one applies */
    int heartbeat_timeout_ms;       /* a rank that is silent for this long (stopped or unreachable, although its process has not
                                     * ended) is lost; 0: never */
    int stall_warning_ms;           /* 0: no stall check */
    int stall_shutdown_ms;          /* 0: never */
    const char *allreduce_path;     /* NULL or "": collectives take the fastest path (docs/architecture.md). "ring", "doubling",
                                     * "halving": all go over links between all ranks, allreduces in this way */
    int streams;                    /* TCP connections for data to each rank of another host, 1 to 8; 0: chosen by round-trip time.
                                     * Two ranks use the smaller of their numbers */
    int64_t emulated_bytes_per_s;       /* rate limit of each of these connections, to emulate a slow network; 0: no limit */
    int64_t known_bytes_per_s;      /* rank 0: bytes_per_s of struct bhvd_measured_network, then not measured; 0: unknown */
    const char *negotiation;        /* "star", "tree" (of relays, docs/decisions/engine.md), NULL or "": a tree beyond 64 ranks */
    int nccl_hierarchical;          /* tensors on GPUs, sets on several hosts. 0: NCCL among all members if possible, else
                                     * within hosts; 1: NCCL within hosts in allreduces; 2: NCCL only within hosts */
    int negotiation_fanout;         /* a relay has this many children on its host, and as many on other hosts; 0: 16 */
};

/* A world of `size` ranks inside this process, for tests: pass it to every rank's options. */
void *bhvd_inproc_world_create(int size);
void bhvd_inproc_world_destroy(void *world);    /* after every context of it is destroyed */

/* Connects this rank to all others and starts its progress thread. Blocks until all ranks are connected or
 * start_timeout_ms has passed. Strings are copied. On error *out is NULL and nothing is left behind. */
bhvd_status bhvd_context_create(const struct bhvd_context_options *options, bhvd_context **out,
                                struct bhvd_error *error);

/* Leaves the job: operations in progress end with BHVD_ERR_SHUTDOWN, other ranks notice, the progress thread ends.
 * Handles stay valid until dropped. Idempotent, and safe while other threads wait. */
void bhvd_context_shutdown(bhvd_context *ctx);
/* shutdown, then frees. No other thread may be inside a call with this context. destroy(NULL) is fine. */
void bhvd_context_destroy(bhvd_context *ctx);

/* In a child after fork(): marks the context unusable without touching the parent's connections. Its memory is never freed, even
 * by bhvd_context_destroy: a thread that exists only in the parent may have been changing it. */
void bhvd_context_after_fork(bhvd_context *ctx);

/* Monotonic counters since bhvd_context_create. Payload only: headers and negotiation are in control_bytes_sent. */
struct bhvd_counters {
    uint64_t operations;            /* finished, one per posted handle */
    uint64_t executions;            /* collectives run: fewer than operations if tensors were fused */
    uint64_t payload_bytes_sent;    /* bytes of tensors or codes sent to other ranks, over any transport */
    uint64_t payload_bytes_received;
    uint64_t control_bytes_sent;    /* of negotiation, including the inline payload of small allreduces */
    uint64_t cache_hits, cache_misses;
    uint64_t coordinator_ns;        /* rank 0: processor time spent coordinating, counted after
                                     * bhvd_context_measure_coordinator */
    uint64_t negotiation_messages;  /* requests and responses, sent and received; one message holds any number of them */
    uint64_t shm_bytes_sent, tcp_bytes_sent, mpi_bytes_sent;    /* payload_bytes_sent by medium; in shared memory
                                     * it counts the bytes that each other rank reads */
    uint64_t nccl_bytes;            /* bytes of the tensors given to NCCL; only NCCL knows how often it sends them */
};
void bhvd_context_counters(bhvd_context *ctx, struct bhvd_counters *out);

/* Each operation is posted with a counter's number; that counter and payload_bytes_sent both count the bytes that it sends. */
enum { BHVD_BYTE_COUNTERS = 64 };
struct bhvd_sent {
    uint64_t shm_bytes, tcp_bytes, mpi_bytes;
};
/* Bytes sent by ended operations on this counter; zeros for an invalid number. Thread-safe. */
void bhvd_context_sent(bhvd_context *ctx, int byte_counter, struct bhvd_sent *out);

/* The network between hosts, as measured when the ranks connected. */
struct bhvd_measured_network {
    double latency_s;               /* one way, to the farthest rank; 0: one host */
    double bytes_per_s;             /* of the slowest measured line; 0: one host, too fast to measure, or no TCP */
};
/* The values by which schedules are chosen. Rank 0 sends them with each operation, so after the same operation they are equal on
 * all ranks; zeros before the first. Thread-safe. */
void bhvd_context_network(bhvd_context *ctx, struct bhvd_measured_network *out);

/* How long the others waited for one rank, since bhvd_context_create. */
struct bhvd_waited_for {
    uint64_t operations;            /* that this rank was the last to request */
    uint64_t waited_ns;             /* total time between the second-to-last rank's request and this rank's */
};
/* Fills in one entry per rank of the job, at most `capacity`, and returns how many. Only the coordinator, rank 0, knows them: 0 on
 * other ranks, and in jobs of one rank. Times are kept only while the stall check is on. Thread-safe. */
int bhvd_context_waited_for(bhvd_context *ctx, struct bhvd_waited_for *out, int capacity);

/* A rank that has not requested operations that others requested, longer ago than the stall check's warning time. */
enum { BHVD_STALLED_NAMES = 6 };
struct bhvd_stalled {
    int rank, operations;
    char names[BHVD_STALLED_NAMES][101];             /* of the first ones, truncated */
};
/* One entry for each stalled rank, ascending, at most `capacity`, as of the last stall check (one a second); returns how many were
 * written. Only rank 0 knows them. Thread-safe. */
int bhvd_context_stalled(bhvd_context *ctx, struct bhvd_stalled *out, int capacity);
/* Counts coordinator_ns from now on. Off by default: it costs two system calls per frame. Thread-safe. */
void bhvd_context_measure_coordinator(bhvd_context *ctx);
/* While the context awaits the state of a running elastic job, posts fail (BHVD_ERR_ARGUMENT): others would wait. Thread-safe. */
void bhvd_context_await_state(bhvd_context *ctx, int awaits);

/* BHVD_OK while usable; else the reason, with a message. */
bhvd_status bhvd_context_status(bhvd_context *ctx, struct bhvd_error *error);
/* How the first operation ended here that another rank ended (with error->cause); if there was none, the same as
 * bhvd_context_status. */
bhvd_status bhvd_context_first_loss(bhvd_context *ctx, struct bhvd_error *error);

/* Waits until this GPU has finished all work that ended operations of the context enqueued. An operation ends when its work is
 * enqueued, so its results are known to be valid, for a checkpoint say, only after this call. Blocks; thread-safe. Errors: the
 * context's failure, or BHVD_ERR_SYSTEM if the GPU failed; results of operations since the last such call are then undefined. */
bhvd_status bhvd_context_wait_gpu(bhvd_context *ctx, bhvd_device *device, struct bhvd_error *error);

/* Log levels of the core; those from 10 are the levels of Python's logging. */
typedef enum bhvd_log_level {
    BHVD_LOG_STALLED = 0,       /* not for people: other ranks wait for this one; the text names the operations */
    BHVD_LOG_DEBUG = 10, BHVD_LOG_INFO = 20, BHVD_LOG_WARNING = 30, BHVD_LOG_ERROR = 40
} bhvd_log_level;

struct bhvd_record {
    bhvd_log_level level;
    int line;                   /* of `file`, a source file of the core */
    const char *file, *text;    /* the text may have several lines; it lives as long as the record */
};

/* Waits at most timeout_ms for a log record. Returns 1 and the record, which the caller frees; 0: the timeout expired; -1: the
 * context is shut down and all records have been taken. Only one thread may call this. The core never waits for
 * it: it keeps some hundred records and counts those that it drops. */
int bhvd_context_next_record(bhvd_context *ctx, int timeout_ms, struct bhvd_record **out);
void bhvd_record_free(struct bhvd_record *record);

/* Starts writing a Chrome trace of the coordinator's view to `path`; only rank 0 does, other ranks ignore it. The file is
 * valid JSON after every event. Starting with the path that is already open changes nothing; another path replaces it. */
bhvd_status bhvd_timeline_start(bhvd_context *ctx, const char *path, int mark_cycles, struct bhvd_error *error);
void bhvd_timeline_stop(bhvd_context *ctx);

/* Process sets. Id 0 holds all ranks. Ids come from BHVD_PROCESS_SET_ADD operations, equal on all ranks. */
/* Size of the set, or -1 if no set has this id. */
int bhvd_process_set_size(bhvd_context *ctx, int id);
/* This rank's position in the set, -1 when not a member, -2 if there is no such set. */
int bhvd_process_set_rank(bhvd_context *ctx, int id);
/* Number of hosts of the set's ranks, the participants of hierarchical d_fp_s and d_lp_s; -1: no such set, or not a member. */
int bhvd_process_set_hosts(bhvd_context *ctx, int id);

/* -------------------------------------------------------------------------------------------------- operations ---- */

struct bhvd_tensor {
    const void *src;        /* contiguous; NULL allowed when it has no elements */
    void *dst;              /* equal src: in place (allreduce, broadcast, c_lp_s, d_fp_s). NULL: the core allocates:
                             * bhvd_result */
    const int64_t *shape;
    int32_t ndim;
    int32_t dtype;          /* bhvd_dtype */
    int32_t dst_on_host;    /* 1: dst is in host memory although the operation is on a GPU */
};

/* One operation over tensor_count tensors (more than one: a grouped operation, all or nothing). Pointers inside are read
 * only during bhvd_post, except tensor memory and error states, which must live until the operation has ended. */
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
    int32_t codec;                  /* c_lp_s, d_lp_s: bhvd_codec; parameters must be equal on all ranks, seeds need not */
    struct bhvd_codec_options codec_options;
    int32_t blocking;               /* 1: the caller calls bhvd_wait next, so its own thread makes the progress */
    int32_t exchange;               /* c_lp_s: bhvd_exchange */
    float *worker_residual;         /* c_lp_s: error feedback, one float per element of all tensors; NULL: none */
    float *server_residual;         /* c_lp_s: one float per element of one chunk, see bhvd_chunk_count; hierarchical: one
                                     * per element of all tensors; NULL: none; not used by the exchange ALLGATHER, which
                                     * encodes once */
    bhvd_device_array *worker_copy;  /* device copies of worker_residual and server_residual, required by operations on a GPU, */
    bhvd_device_array *server_copy;  /* which keep the values there. Pass an array's copy to every operation on that array */
    bhvd_device_array *replica_copies[3];   /* the same for replicas */
    double before[3];               /* d_lp_s: v = values + the sum of these times own, left and right, when not all are 0 */
    double after[4];                /* d_lp_s: dst = the sum of these times values, own, left and right, when not all but the */
                                    /* first are 0; else dst is not written. Uses the updated replicas. */
    float *replicas[3];             /* d_lp_s: own, left and right, one float per element of all tensors; NULL: not
                                     * kept */
    int32_t topology;               /* d_fp_s: bhvd_topology; d_lp_s is a ring */
    int32_t round;                  /* d_fp_s: which round of the topology's schedule, from 0; equal on all ranks */
    int32_t hierarchical;           /* primitives: 1: full precision within each host, the primitive between hosts,
                                     * see native/primitive/primitive.h; equal on all ranks */
    int32_t device;                 /* -1: host memory; else the GPU's index: src and dst of all tensors are on it */
    bhvd_device *gpu;               /* the device of that index; NULL on the CPU */
    void *stream;                   /* the framework's stream: the operation sees the results of all work enqueued on it before */
    int32_t byte_counter;           /* byte counter of this rank, 0 to BHVD_BYTE_COUNTERS - 1, see bhvd_context_sent */
};

/* Posts an operation and returns at once. Thread-safe. Posting order need not agree between ranks: operations match by
 * name, within a process set. On BHVD_OK the caller must eventually pass *out to bhvd_handle_drop.
 * Errors of this call: BHVD_ERR_ARGUMENT (nothing was posted), BHVD_ERR_UNSUPPORTED, or the context's own failure.
 * Errors from bhvd_wait: BHVD_ERR_MISMATCH on every rank of the set, BHVD_ERR_PEER_LOST, _SHUTDOWN, _TIMEOUT. */
bhvd_status bhvd_post(bhvd_context *ctx, const struct bhvd_args *args, bhvd_handle **out, struct bhvd_error *error);

/* Waits until the operation has ended, at most about timeout_ms (negative: for ever), and returns how it ended, or
 * BHVD_IN_PROGRESS. The calling thread may execute operations itself: it finishes an operation that it has started,
 * even after timeout_ms; the context's own timeout_ms bounds that. May be called again, and from several
 * threads. */
bhvd_status bhvd_wait(bhvd_handle *handle, int timeout_ms, struct bhvd_error *error);
/* For an operation on a GPU that ended with BHVD_OK: work enqueued on `stream` after this call sees its results. After bhvd_wait
 * alone they may still be in flight. Returns how the operation ended; does not block. */
bhvd_status bhvd_handle_join(bhvd_handle *handle, void *stream, struct bhvd_error *error);
/* 1 if the operation has ended, else 0. Never blocks. */
int bhvd_poll(bhvd_handle *handle);
/* The number an operation yields (join, process sets); 0 for others. */
int64_t bhvd_handle_value(bhvd_handle *handle);
/* Releases the handle. A running operation continues; its tensors must live until it has ended. drop(NULL) is fine. */
void bhvd_handle_drop(bhvd_handle *handle);

/* A queue of ended operations, for threads that wait for many of them. NULL: no memory. */
bhvd_completions *bhvd_completions_create(void);
/* Puts `number` into the list when the operation ends, or now if it has ended. One list per handle, which may be dropped before
 * the operation ends. Thread-safe. Errors: BHVD_ERR_ARGUMENT, it is already added and still in progress; BHVD_ERR_SYSTEM. */
bhvd_status bhvd_completions_add(bhvd_completions *list, bhvd_handle *handle, int64_t number);
/* Takes the oldest number; waits for one at most timeout_ms (negative: for ever). -1: none came. Unlike bhvd_wait, the
 * calling thread never executes operations. Thread-safe: each number goes to one thread. */
int64_t bhvd_completions_next(bhvd_completions *list, int timeout_ms);
/* No other thread may be in a call with it; added operations may be in progress. destroy(NULL) is fine. */
void bhvd_completions_destroy(bhvd_completions *list);

/* The memory that the core allocated for tensor `index` (posted with dst NULL) of an operation that ended with BHVD_OK. */
struct bhvd_result {
    void *data;             /* 64-byte aligned; NULL when it has no bytes */
    size_t nbytes;
    int64_t dim0;           /* the first dimension; the others are those of the input */
    int on_device;          /* 1: data points to GPU memory, written by NCCL: copy it with bhvd_result_copy */
};
bhvd_status bhvd_result(bhvd_handle *handle, size_t index, struct bhvd_result *out);
/* The same, and the caller owns the memory: bhvd_result_free(data). BHVD_ERR_ARGUMENT for a result on a GPU. */
bhvd_status bhvd_result_take(bhvd_handle *handle, size_t index, struct bhvd_result *out);
void bhvd_result_free(void *data);
/* Posts one tensor in host memory; unless wait_ms is 0, also waits (blocking, bhvd_wait) and, if dst is 0, takes the result
 * (bhvd_result_take). For small operations, where filling structs takes a noticeable time. Addresses are numbers; other
 * fields of struct bhvd_args have their usual values. *result is set on BHVD_OK. Errors: those of the three calls. *out is NULL
 * except with BHVD_IN_PROGRESS: then the caller must wait for it and drop it. */
bhvd_status bhvd_post_tensor(bhvd_context *ctx, int kind, const char *name, int process_set, uintptr_t src, uintptr_t dst,
                             const int64_t *shape, int ndim, int dtype, int op, int root_rank, double prescale_factor,
                             double postscale_factor, int byte_counter, int wait_ms, struct bhvd_result *result,
                             bhvd_handle **out, struct bhvd_error *error);
/* Copies a result on the GPU to dst there, in the order of `stream`, for which bhvd_handle_join must have been called.
 * Does not block; the handle may be dropped at once. */
bhvd_status bhvd_result_copy(bhvd_handle *handle, size_t index, void *dst, void *stream, struct bhvd_error *error);
/* alltoall: rows received from each set rank of tensor `index`; count = set size. */
bhvd_status bhvd_received_splits(bhvd_handle *handle, size_t index, int32_t *splits, size_t count);

/* Copies tensors to one flat vector and back: pack reads every src, unpack writes every dst, in order. flat: the
 * vector's dtype. BHVD_FLOAT32 takes tensors of any floating dtypes, also mixed, rounded to nearest even; other dtypes
 * take tensors of the same dtype, copied. BHVD_ERR_UNSUPPORTED: any other combination; nothing was written. Any alignment. */
bhvd_status bhvd_pack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, void *dst);
bhvd_status bhvd_unpack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src);
/* dst = src + the vector's elements, for floating dtypes; where they differ, added in float32 and rounded once. */
bhvd_status bhvd_unpack_add(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src);

/* Adam that communicates its momentum (algorithms/qadam.py), for one weight, with p = sqrt(v) / correction + eps. */
struct bhvd_adam {
    double beta1, correction, eps;
    double longest;             /* |m| is bounded by longest * p; infinity: no bound */
    double weight_decay;        /* weight_decay * x is added to the gradient */
    double rate;                /* the learning rate, divided by Adam's bias correction of m */
    double decay;               /* decoupled decay of x per step: learning rate times weight decay; else 0 */
};
/* sent = beta1 m + (1 - beta1) (g + weight_decay x), 0 where v is 0, bounded; in_steps: divided by p. Tensors are lists of `count`;
 * sent and arithmetic have dtype `flat`, float32 or float64, as for bhvd_pack. x: NULL without weight_decay. */
bhvd_status bhvd_adam_momentum(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *g,
                               const struct bhvd_tensor *x, const struct bhvd_adam *by, size_t count, int in_steps,
                               bhvd_dtype flat, void *sent);
/* m = sent, times p if in_steps, 0 where v is 0, bounded; x -= rate m / p + decay x. */
bhvd_status bhvd_adam_step(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *x,
                           const struct bhvd_adam *by, size_t count, int in_steps, bhvd_dtype flat, const void *sent);

/* Adam's variance with relaxed steps (training/variance.py), for one weight, in step t. */
struct bhvd_adam_variance {
    double beta2;
    double exact_rate;          /* weight of g^2 in `exact`: 0 in a relaxed step */
    double own_rate, correction, ranks;     /* weight of g^2 in `own`; 1 - beta2^t; n */
};
/* exact += exact_rate (g^2 - exact), own += own_rate (g^2 - own), flat vectors; v is set so that the optimizer's update makes it
 * min(max(exact, own / ranks), own), bias corrected. */
bhvd_status bhvd_adam_variance(const struct bhvd_tensor *v, const struct bhvd_tensor *g, const struct bhvd_adam_variance *by,
                               size_t count, bhvd_dtype flat, void *exact, void *own);

/* ----------------------------------------------------------------------------------------------------- devices ---- */

/* Kernels of native/device/kernels.cu that operations use if they are set, named as there, in capitals. All but the
 * first have four variants: float32, float64, float16 and bfloat16. NCCL sends codes only if all kernels are set. */
typedef enum bhvd_device_kernel {
    BHVD_DEVICE_COPY_SPANS,
    BHVD_DEVICE_SCALE, BHVD_DEVICE_FEED_RESIDUAL, BHVD_DEVICE_UPDATE_RESIDUAL, BHVD_DEVICE_MIX,
    BHVD_DEVICE_MINMAX_UINT8_RANGES, BHVD_DEVICE_MINMAX_UINT8_ENCODE, BHVD_DEVICE_MINMAX_UINT8_DECODE,
    BHVD_DEVICE_MINMAX_UINT8_DECODE_ADD, BHVD_DEVICE_MINMAX_UINT8_DECODE_SUM,
    BHVD_DEVICE_SIGN_ENCODE, BHVD_DEVICE_SIGN_HEADER, BHVD_DEVICE_SIGN_DECODE, BHVD_DEVICE_SIGN_DECODE_ADD,
    BHVD_DEVICE_SIGN_DECODE_SUM,
    BHVD_DEVICE_ROTATED_ENCODE, BHVD_DEVICE_ROTATED_HEADER, BHVD_DEVICE_ROTATED_DECODE, BHVD_DEVICE_ROTATED_DECODE_ADD,
    BHVD_DEVICE_ROTATED_DECODE_SUM, BHVD_DEVICE_ROTATED_REENCODE,
    BHVD_DEVICE_KERNEL_COUNT
} bhvd_device_kernel;

struct bhvd_device_options {
    int index;                  /* as the driver counts: CUDA_VISIBLE_DEVICES applies */
    const char *libraries;      /* files to try for libcuda.so.1, separated by ':', before the one that the process has
                                 * already loaded; NULL or "": none */
    const char *nccl_libraries; /* the same for libnccl.so.2; NULL: NCCL is not used. A missing library is not an error */
};

/* Opens a GPU: NVIDIA's driver is loaded at run time. The caller's reference is dropped by bhvd_device_drop; operations
 * in progress hold their own. Errors: BHVD_ERR_UNSUPPORTED, no driver or one that is too old, naming the missing part;
 * BHVD_ERR_ARGUMENT, no such GPU; BHVD_ERR_SYSTEM, it failed. */
bhvd_status bhvd_device_create(const struct bhvd_device_options *options, bhvd_device **out, struct bhvd_error *error);
void bhvd_device_drop(bhvd_device *device);     /* drop(NULL) is fine */
/* Sets the driver's function handle, compiled for this GPU; it must outlive the device. NULL: no kernel. type: 0 to 3. */
bhvd_status bhvd_device_set_kernel(bhvd_device *device, bhvd_device_kernel kernel, int type, void *function);
/* The stream that reads tensors of operations (to_host 1) or writes them (0): memory that the framework reuses
 * must wait for both. */
void *bhvd_device_stream(bhvd_device *device, int to_host);
/* Copies every src to dst, between host and GPU in any direction, after the work already enqueued on `stream`, and waits for
 * the copies. Only the shape counts, not the dtype. Blocks. */
bhvd_status bhvd_device_copy(bhvd_device *device, const struct bhvd_tensor *tensors, size_t count, void *stream,
                             struct bhvd_error *error);

/* A host array whose newest values may be on a GPU, if the operation that wrote them last ran there
 * (struct bhvd_args). Only one operation at a time may use it, and nobody else while it is in progress.
 * values: count floats that must outlive the device copy. NULL: no memory. */
bhvd_device_array *bhvd_device_array_create(float *values, size_t count);
void bhvd_device_array_destroy(bhvd_device_array *device_copy);  /* destroy(NULL) is fine */
/* Copies the newest values into the array, where they may be read and written until the next operation. Waits for the
 * GPU if they are on it. BHVD_ERR_SYSTEM: the GPU failed; the array is unchanged. */
bhvd_status bhvd_device_array_fetch(bhvd_device_array *device_copy, struct bhvd_error *error);
/* Copies the newest values of `from` to `to`, an array of equal length, on the GPU if they are there. Errors as above. */
bhvd_status bhvd_device_array_copy(bhvd_device_array *to, bhvd_device_array *from, struct bhvd_error *error);

/* Reports the driver and GPUs. *version: the driver's, 12040 for CUDA 12.4; device_count: GPUs. Errors as bhvd_device_create. */
bhvd_status bhvd_cuda_probe(const char *libraries, int *version, int *device_count, struct bhvd_error *error);
/* *version: of libnccl.so.2, 22000 for NCCL 2.20. libraries: files to try, as above. BHVD_ERR_UNSUPPORTED: none found, or too
 * old; the message names package and variable. */
bhvd_status bhvd_nccl_probe(const char *libraries, int *version, struct bhvd_error *error);

/* --------------------------------------------------------------------------------------------------- simulation ---- */

/* Hosts with one rank and one network line each. */
struct bhvd_network {
    double latency_s;           /* one way, between any two hosts */
    double bytes_per_s;         /* of a host's line, each way; packets' headers count */
    int slow_rank;              /* -1: none. This rank's line has other values: */
    double slow_latency_s, slow_bytes_per_s;
    double message_s;           /* CPU time for a message, at the sender and at the receiver */
    double load_s_per_byte, reduce_s_per_byte, scale_s_per_byte, store_s_per_byte, copy_s_per_byte;     /* CPU time per byte */
    double encode_s_per_byte, decode_s_per_byte;    /* per byte of values; decode: for each code that is added */
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

/* Simulates the schedules of all ranks: how long these operations take if posted together in this order. path: of allreduces,
 * "ring", "doubling", "halving"; NULL or "": as it would be chosen. agrees: 1, all are negotiated first, together.
 * seconds: [size], when each rank is done. Any thread; no context. Errors: BHVD_ERR_ARGUMENT;
 * BHVD_ERR_UNSUPPORTED, more than 8 Mi steps in flight (a ring or C_LP_S of more than 1,000 hosts); BHVD_ERR_SYSTEM, no memory. */
bhvd_status bhvd_simulate(int size, const char *path, const struct bhvd_simulated *operations, size_t count, int agrees,
                          const struct bhvd_network *network, double *seconds, struct bhvd_error *error);

/* -------------------------------------------------------------------------------------- codecs, kernels, facts ---- */

/* Elements of the longest chunk if `count` elements are split among `size` ranks (the first count % size chunks are one longer). */
size_t bhvd_chunk_count(size_t count, int size);
/* Codecs. options: NULL for the defaults. Memory of any alignment. Errors, which leave dst untouched:
 * BHVD_ERR_UNSUPPORTED, no such codec or it does not take this dtype; BHVD_ERR_ARGUMENT, options out of range, too many
 * elements, or (decode) bytes that do not begin with a header of this codec's version. */
/* Encoded size of `count` elements of `dtype` in bytes; 0 for count > 0: one of these errors. */
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
/* "scalar", "avx2" or "avx512": the widest instruction set that both this CPU and this build support. */
const char *bhvd_cpu_features(void);
const char *bhvd_version(void);

#endif
