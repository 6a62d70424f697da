// D_FP_S: decentralized, full precision, synchronous. Every participant averages with its peers (peers.h):
//
//     dst_i = sum_j W_ij x_j      SHIFT_ONE: (x_i + x_p) / 2; a rank that pauses keeps x_i
//                                 RING:      (x_i + x_{i-1} + x_{i+1}) / 3;  n = 2: (x_i + 2 x_p) / 3
//
// Hierarchical, with hosts that hold different numbers of ranks: weighted by peers_shares().
//
// Values are added in the order written, in float32 (float64: in double), multiplied by the weight, and rounded to the dtype once.
// Both sides of a pair compute the same bits. src is only read, so weights may be sent while a backward pass uses them.
//
// The vector is sent in segments; a few are on the wire while one is averaged (coded.h). In place is safe: a segment
// is written only after it has been sent.
// Cost: N elements to each peer: N per rank for SHIFT_ONE (0 in a pause), 2 N for RING (n = 2: N). Hierarchical: that much per
// host, and N elements within hosts for the mean and as many to distribute the result.
#include "executor/group.h"
#include "primitive/coded.h"

struct d_fp_s {
    struct executor *exec;
    struct codes codes;                 // the values, not encoded
    struct span_list list;
    bhvd_dtype wide;            // of the sum: float32, or float64
    double weight;              // of each value, or of the sum of values multiplied by their shares
    struct shares shares;
    bool is_weighted;           // the shares differ
};

struct segment {
    const unsigned char *mine, *received;
    void *sum, *wide;           // scratch, in float32 or float64
};

static const unsigned char *received_at(const struct d_fp_s *a, const struct segment *segment, int p)
{
    return segment->received + (size_t)p * a->codes.received.each;
}

// Returns the values in the type of the sum: themselves, or converted into `scratch`.
static const void *widen(const struct d_fp_s *a, void *scratch, const void *values, size_t count)
{
    if (a->codes.dtype == a->wide)
        return values;
    a->exec->kernels.to_float[a->codes.dtype](scratch, values, count);
    return scratch;
}

// dst = weight * sum
static void store(const struct d_fp_s *a, const struct segment *segment, void *dst, const void *sum, size_t count)
{
    void *to = a->codes.dtype == a->wide ? dst : segment->sum;
    a->exec->kernels.scale[a->wide](to, sum, a->weight, count);
    if (a->codes.dtype != a->wide)
        a->exec->kernels.from_float[a->codes.dtype](dst, to, count);
}

// dst = weight * (mine + times * all received)
static void average(const struct d_fp_s *a, const struct segment *segment, void *dst, size_t count)
{
    const kernel_reduce_fn add = a->exec->kernels.reduce[KERNEL_SUM][a->wide];
    void *to = a->codes.dtype == a->wide ? dst : segment->sum;
    const void *sum = widen(a, segment->sum, segment->mine, count);
    for (int i = 0; i < a->codes.peers.count * a->codes.peers.times; i++, sum = to)
        add(to, sum, widen(a, segment->wide, received_at(a, segment, i % a->codes.peers.count), count), count);
    store(a, segment, dst, sum, count);
}

// Multiplies each value by its share before adding, so both sides of a pair compute the same bits.
static void average_weighted(const struct d_fp_s *a, const struct segment *segment, void *dst, size_t count)
{
    const struct kernel_table *kernels = &a->exec->kernels;
    kernels->scale[a->wide](segment->sum, widen(a, segment->sum, segment->mine, count), a->shares.own, count);
    for (int i = 0; i < a->codes.peers.count; i++) {
        const void *value = widen(a, segment->wide, received_at(a, segment, i), count);
        kernels->scale[a->wide](segment->wide, value, a->shares.peer[i], count);
        kernels->reduce[KERNEL_SUM][a->wide](segment->sum, segment->sum, segment->wide, count);
    }
    store(a, segment, dst, segment->sum, count);
}

static void combine(struct d_fp_s *a, const struct step *step, unsigned char *const *buffers)
{
    enum { WIDE_BYTES = PLAIN_SEGMENT_NBYTES / 2 * sizeof(float) };
    const size_t begin = step->values.begin, nbytes = step->values.nbytes, count = nbytes / a->codes.element;
    unsigned char *scratch = executor_acquire(a->exec, PLAIN_SEGMENT_NBYTES + 2 * WIDE_BYTES);
    if (!scratch) {
        executor_fail(a->exec, BHVD_ERR_SYSTEM, "no memory for a segment of %zu bytes", nbytes);
        return;
    }
    const struct segment segment = {location_pointer(buffers, step->other), location_pointer(buffers, step->from),
                                    scratch + PLAIN_SEGMENT_NBYTES, scratch + PLAIN_SEGMENT_NBYTES + WIDE_BYTES};
    void *dst = span_target(&a->list, begin, nbytes, scratch);
    (a->is_weighted ? average_weighted : average)(a, &segment, dst, count);
    span_store(&a->list, begin, nbytes, dst);
    executor_release(a->exec, scratch);
}

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    struct d_fp_s *a = arg;
    if (step->kind == STEP_COMBINE) {
        combine(a, step, buffers);
        return;
    }
    struct span_cursor cursor = span_cursor_at(&a->list, step->values.begin);
    span_pack(&cursor, location_pointer(buffers, step->to), step->values.nbytes);
}

// Without peers the result is the value itself.
static void keep(const struct span_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        if (list->spans[i].dst != list->spans[i].src)
            span_copy(list->spans[i].dst, list->spans[i].src, list->spans[i].nbytes);
    }
}

// Number of ranks that a member of the group represents: those of its host, or only itself.
static int members_of(const struct hierarchy *hosts, int i) { return hosts ? hierarchy_members_of(hosts, i) : 1; }

static void weigh(struct d_fp_s *a, const struct hierarchy *hosts, int rank, bhvd_topology topology)
{
    const int own = members_of(hosts, rank);
    int sizes[PEERS_MAX] = {0};
    a->weight = 1.0 / (1 + a->codes.peers.times * a->codes.peers.count);
    for (int p = 0; p < a->codes.peers.count; p++) {
        sizes[p] = members_of(hosts, a->codes.peers.index[p]);
        a->is_weighted |= sizes[p] != own;
    }
    if (a->is_weighted) {
        a->shares = peers_shares(topology, &a->codes.peers, own, sizes);
        a->weight = 1.0 / a->shares.of;
    }
}

// Of member `rank` of `size`; if there are hosts, each represents one of them. A single span is the schedule's input.
static struct d_fp_s d_fp_s_of(struct executor *exec, const struct collective *coll, const struct hierarchy *hosts, int size,
                               int rank, const struct span_list *list, const struct network_cost *network)
{
    struct d_fp_s a = {
        .exec = exec,
        .codes = coded_of(coll, list->nbytes, size, rank, network),
        .list = *list,
        .wide = coll->tensors[0].dtype == BHVD_FLOAT64 ? BHVD_FLOAT64 : BHVD_FLOAT32,
    };
    weigh(&a, hosts, rank, coll->args.topology);
    if (list->count == 1) {
        a.codes.encodes = false;
        a.codes.own = (struct code_lay){INPUT_BUFFER, 0, 0, PLAIN_SEGMENT_NBYTES};
    }
    return a;
}

static bhvd_status plan_among(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    const struct d_fp_s x = d_fp_s_of(exec, coll, NULL, group->size, group->rank, list, &exec->network);
    (void)gpu;
    if (!x.codes.peers.count) {
        keep(list);
        return BHVD_OK;
    }
    struct d_fp_s *a = primitive_create(exec, sizeof *a, coll, run_custom_step, list, plan);
    if (!a)
        return exec->failure.status;
    *a = x;
    plan->operands.input = plan->list.spans[0].src;
    coded_schedule(plan_begin(plan, group), &a->codes);
    return BHVD_OK;
}

// ----------------------------------------------------------------------------------------------------------- hierarchical

static struct d_fp_s shard_of(const struct shards *shards, const struct span_list *shard)
{
    return d_fp_s_of(shards->exec, shards->coll, shards->h, shards->h->hosts, shards->h->host, shard, &shards->network);
}

static void run_shard_step(const struct shards *shards, struct byte_range mine, const struct span_list *shard,
                           const struct step *step, unsigned char *const *buffers)
{
    struct d_fp_s a = shard_of(shards, shard);
    (void)mine;
    run_custom_step(&a, step, buffers);
}

// Without peers the shard stays as it is.
static void write_shard(const struct shards *shards, struct schedule *schedule, struct byte_range mine)
{
    const struct d_fp_s a = shard_of(shards, &(struct span_list){.count = 1, .nbytes = mine.nbytes});
    if (a.codes.peers.count)
        coded_schedule(schedule, &a.codes);
}

// The peers are hosts, each with the mean of its members.
static bhvd_status plan_hosts(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    (void)gpu;
    static const struct shards_work work = {PRIMITIVE_SHARD_BYTES, PRIMITIVE_SHARDS_IN_FLIGHT, write_shard, run_shard_step};
    const struct hierarchy *h = group->hierarchy;
    const int members = h ? h->local->size : group->size;
    const struct reduction mean = reduction_of(&exec->kernels, KERNEL_SUM, coll->tensors[0].dtype, 1.0, 1.0 / members);
    return h ? shards_plan(exec, group, coll, &mean, &work, list, plan) : allreduce_shared(exec, group, &mean, list);
}

const struct primitive d_fp_s = {plan_among, plan_hosts};
