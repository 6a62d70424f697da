#include "primitive/coded.h"

// Three segments keep the processor and the wire busy. A link with high latency needs as many in flight as it holds, and as many
// again, since slots are freed in order.
enum { SLOTS = 3, SLOTS_MAX = SCHEDULE_PIECES_MAX, SLOTS_NBYTES = 8 << 20 };

static size_t slots_for(const struct network_cost *network, size_t nbytes)
{
    const double round_trip_ps = 2000.0 * network->alpha_ns, held = round_trip_ps / network_beta_ps(network);
    const double wanted = 2 * held < SLOTS_NBYTES ? 2 * held : SLOTS_NBYTES;
    const size_t fit = SLOTS_NBYTES / nbytes, most = fit < SLOTS_MAX ? fit : SLOTS_MAX;
    const size_t slots = SLOTS + (size_t)(wanted / (double)nbytes);
    return most < SLOTS ? SLOTS : slots < most ? slots : most;
}

static size_t code_size(const struct codes *codes, struct segment_part part)
{
    const size_t count = part.count;
    if (!count)
        return 0;
    return codes->codec ? bhvd_encoded_size(codes->codec, codes->dtype, count, &codes->options) : count * codes->element;
}

void coded_in_scratch(struct codes *codes, int size, const struct network_cost *network)
{
    const size_t own = codes->cut.chunks, received = (size_t)(codes->pattern == CODES_TO_PEERS ? codes->peers.count : size);
    const size_t stride = size_round_up(code_size(codes, segments_part(&codes->cut, 0, 0)), CACHE_LINE);
    const size_t slot = (own + received) * stride, segments = segments_in_chunk(&codes->cut);
    const size_t most = slot ? slots_for(network, slot) : SLOTS_MAX;
    codes->slots = segments < most ? segments : most;
    codes->own = (struct code_lay){SCRATCH_BUFFER, 0, stride, slot};
    codes->received = (struct code_lay){SCRATCH_BUFFER, own * stride, stride, slot};
    codes->encodes = codes->decodes = true;
}

static struct location code_at(const struct codes *codes, const struct code_lay *lay, int k, size_t s)
{
    const size_t slot = lay->buffer == SCRATCH_BUFFER ? s % codes->slots : s;
    return in_buffer(lay->buffer, lay->at + (size_t)k * lay->each + slot * lay->segment);
}

static struct byte_range values_of(const struct codes *codes, struct segment_part part)
{
    return (struct byte_range){part.begin * codes->element, part.count * codes->element};
}

// Does another segment use the slot after this one?
static bool is_used_again(const struct codes *codes, size_t s) { return s + codes->slots < segments_in_chunk(&codes->cut); }

// ---------------------------------------------------------------------------------------------------- scatter, gather

// The mean of rank k. If codes are decoded here, it reuses the slot of a code that is no longer needed.
static struct location mean_at(const struct codes *codes, int k, size_t s, int me)
{
    const struct code_lay *lay = !codes->decodes ? &codes->results : k == me ? &codes->own : &codes->received;
    return code_at(codes, lay, k, s);
}

// Sends every chunk's segment to its owner. Returns the step after which all ranks' codes for the own chunk have arrived. It need
// not wait for the sends: a mean arrives only from a rank that has received this rank's code.
static int scatter(struct schedule *schedule, const struct codes *codes, size_t s, int after)
{
    const int n = schedule->size, me = schedule->rank;
    const size_t mine = code_size(codes, segments_part(&codes->cut, (uint64_t)me, s));
    int came = after;
    for (int i = 0; i < n && mine; i++)
        if (i != me)
            came = schedule_both(schedule, came,
                                 schedule_receive(schedule, i, code_at(codes, &codes->received, i, s), mine, after));
    for (int i = 0; i < n; i++) {
        const int k = (me + 1 + i) % n;         // each rank begins with a different owner; the own chunk comes last
        const struct segment_part part = segments_part(&codes->cut, (uint64_t)k, s);
        const struct location own = code_at(codes, &codes->own, k, s);
        const size_t nbytes = code_size(codes, part);
        if (!nbytes)
            continue;
        const int made = codes->encodes ? schedule_encode(schedule, own, nbytes, values_of(codes, part), after) : after;
        if (k == me)
            came = schedule_both(schedule, came, made);
        else
            schedule_send(schedule, k, own, nbytes, made);
    }
    return came;
}

// Sends the mean to all, and decodes theirs. Returns the step after which the slot is free, if it is used again.
static int gather(struct schedule *schedule, const struct codes *codes, size_t s, int came)
{
    const int me = schedule->rank;
    const struct segment_part own = segments_part(&codes->cut, (uint64_t)me, s);
    const struct location mean = mean_at(codes, me, s, me);
    const size_t mine = code_size(codes, own);
    const bool again = is_used_again(codes, s);
    int reencoded = came, done = STEP_NONE;
    if (mine)
        reencoded = schedule_reencode(schedule, mean, mine, code_at(codes, &codes->received, 0, s),
                                      code_at(codes, &codes->own, me, s), values_of(codes, own), came);
    for (int i = 0; i < schedule->size; i++) {
        const int k = (me + i) % schedule->size;
        const struct segment_part part = segments_part(&codes->cut, (uint64_t)k, s);
        const struct location theirs = mean_at(codes, k, s, me);
        const size_t nbytes = code_size(codes, part);
        int there = reencoded;
        if (k != me && mine) {
            const int sent = schedule_send(schedule, k, mean, mine, reencoded);
            done = again ? schedule_both(schedule, done, sent) : done;
        }
        if (k != me && nbytes)
            there = schedule_receive(schedule, k, theirs, nbytes, reencoded);
        if (nbytes && codes->decodes)
            there = schedule_decode(schedule, theirs, nbytes, values_of(codes, part), there);
        done = again ? schedule_both(schedule, done, there) : done;
    }
    return done;
}

static int scatter_gather(const void *codes, struct schedule *schedule, size_t s, int after)
{
    return gather(schedule, codes, s, scatter(schedule, codes, s, after));
}

// ----------------------------------------------------------------------------------------------------------- exchange

static int exchange(const void *arg, struct schedule *schedule, size_t s, int after)
{
    const struct codes *codes = arg;
    const bool to_all = codes->pattern == CODES_TO_ALL;
    const int count = to_all ? schedule->size : codes->peers.count;
    const struct code_lay *theirs = codes->decodes ? &codes->received : &codes->results;
    const struct segment_part part = segments_part(&codes->cut, 0, s);
    const size_t nbytes = code_size(codes, part);
    const struct location own = code_at(codes, &codes->own, 0, s);
    const int made = codes->encodes ? schedule_encode(schedule, own, nbytes, values_of(codes, part), after) : after;
    const bool again = is_used_again(codes, s), is_awaited = again || !codes->encodes;
    int sent = STEP_NONE, there = made;
    for (int i = 0; i < count; i++) {
        const int p = to_all ? (schedule->rank + 1 + i) % count : i, peer = to_all ? p : codes->peers.index[i];  // staggered
        if (peer == schedule->rank)
            continue;
        const int gone = schedule_send(schedule, peer, own, nbytes, made);
        sent = is_awaited ? schedule_both(schedule, sent, gone) : sent;
        there = schedule_both(schedule, there,
                              schedule_receive(schedule, peer, code_at(codes, theirs, p, s), nbytes, after));
    }
    // If the own code is the values, the result may overwrite it.
    if (codes->decodes)
        there = schedule_combine(schedule, code_at(codes, theirs, 0, s), own, nbytes, values_of(codes, part),
                                 codes->encodes ? there : schedule_both(schedule, there, sent));
    return again ? schedule_both(schedule, there, sent) : STEP_NONE;
}

// --------------------------------------------------------------------------------------------------------- primitives

struct codes coded_of(const struct collective *coll, size_t nbytes, int size, int rank, const struct network_cost *network)
{
    const bhvd_dtype dtype = coll->tensors[0].dtype;
    const bool is_plain = coll->args.kind == BHVD_D_FP_S, is_central = coll->args.kind == BHVD_C_LP_S;
    const bool scatters = is_central && coll->args.exchange == BHVD_EXCHANGE_SCATTER_GATHER;
    const size_t element = bhvd_dtype_size(dtype);
    struct codes codes = {
        .pattern = scatters ? CODES_TO_OWNERS : is_central ? CODES_TO_ALL : CODES_TO_PEERS,
        .peers = is_central ? (struct peers){0} : primitive_peers(coll, size, rank),
        .cut = {nbytes / element, scatters ? (uint64_t)size : 1, is_plain ? PLAIN_SEGMENT_NBYTES / element : ENCODER_SEGMENT},
        .element = element,
        .codec = is_plain ? BHVD_CODEC_NONE : coll->args.codec,
        .dtype = dtype,
        .options = coll->args.codec_options,
    };
    coded_in_scratch(&codes, size, network);
    return codes;
}

void coded_schedule(struct schedule *schedule, const struct codes *codes)
{
    schedule_pieces(schedule, segments_in_chunk(&codes->cut), codes->slots,
                    codes->pattern == CODES_TO_OWNERS ? scatter_gather : exchange, NULL, codes);
}

void coded_on_gpu(struct codes *codes, const struct gpu_codes *gpu, struct operands *operands)
{
    codes->encodes = codes->decodes = false;
    codes->own = (struct code_lay){INPUT_BUFFER, 0, gpu->each, gpu->segment};
    codes->results = (struct code_lay){OUTPUT_BUFFER, 0, gpu->each, gpu->segment};
    operands->input = gpu->own;
    operands->output = gpu->results;
}

struct coded_scratch coded_acquire(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t floats)
{
    const size_t longest = segments_part(&codes->cut, 0, 0).count, values = size_round_up(longest * codes->element, CACHE_LINE);
    const size_t wide = size_round_up(longest * sizeof(float), CACHE_LINE);
    unsigned char *memory = executor_acquire(exec, 2 * values + wide + floats * sizeof(float));
    if (!memory) {
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for codes of %zu elements", longest);
        return (struct coded_scratch){0};
    }
    encoder->value = memory + values;
    encoder->wide = (float *)(void *)(memory + 2 * values);
    return (struct coded_scratch){memory, (float *)(void *)(memory + 2 * values + wide)};
}
