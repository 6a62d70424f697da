// Runs the simulator on allreduces and primitives between hosts, optionally with negotiation.
#include "base/status.h"
#include "collective/collectives.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/inline_payload.h"
#include "core/negotiation/relay.h"
#include "primitive/coded.h"
#include "simulation/simulator.h"

enum { AGREEING_NBYTES = 32 };      // approximate size of a control frame with known names

struct operations {
    enum allreduce_path path;
    const struct bhvd_simulated *all;
    struct network_cost network;
    bool agrees;                // execution 0 is the negotiation
};

// Negotiation in a star or, about as in core/negotiation/relay.c, a tree: a rank sends requests to the parent after its children's
// have arrived, and responses to the children.
static void agree(struct schedule *schedule)
{
    const int n = schedule->size, fanout = n > TREE_STAR_RANKS ? TREE_FANOUT : n, rank = schedule->rank;
    const int64_t first = (int64_t)fanout * rank + 1;
    const struct location location = in_buffer(SCRATCH_BUFFER, 0);
    int done = STEP_NONE;
    for (int64_t child = first; child < first + fanout && child < n; child++)
        done = schedule_both(schedule, done, schedule_receive(schedule, (int)child, location, AGREEING_NBYTES, STEP_NONE));
    if (rank) {
        const int parent = (rank - 1) / fanout;
        done = schedule_send(schedule, parent, location, AGREEING_NBYTES, done);
        done = schedule_receive(schedule, parent, location, AGREEING_NBYTES, done);
    }
    for (int64_t child = first; child < first + fanout && child < n; child++)
        schedule_send(schedule, (int)child, location, AGREEING_NBYTES, done);
}

static void write_primitive(const struct bhvd_simulated *what, const struct network_cost *network, struct schedule *schedule)
{
    struct tensor tensor = {.dtype = (bhvd_dtype)what->dtype};
    const struct collective coll = {
        .args = {.kind = what->kind, .codec = what->codec, .codec_options.parameter = what->codec_parameter,
                 .exchange = what->exchange, .topology = what->topology, .round = what->round, .device = -1},
        .tensors = &tensor};
    const struct codes codes = coded_of(&coll, what->nbytes, schedule->size, schedule->rank, network);
    if (codes.pattern != CODES_TO_PEERS || codes.peers.count)
        coded_schedule(schedule, &codes);
}

static void write_down(const void *arg, int execution, struct schedule *schedule)
{
    const struct operations *operations = arg;
    if (operations->agrees && execution-- == 0) {
        agree(schedule);
        return;
    }
    const struct bhvd_simulated *what = &operations->all[execution];
    const struct bhvd_args args = {.kind = what->kind, .op = BHVD_OP_SUM, .tensor_count = 1, .device = -1};
    const bool is_inline = operations->agrees && inline_payload_fits(&args, what->nbytes) &&
                           inline_payload_is_chosen(operations->path, schedule->size <= TREE_STAR_RANKS);
    if (what->kind != BHVD_ALLREDUCE)
        write_primitive(what, &operations->network, schedule);
    else if (!is_inline)        // else the response carries the result
        allreduce_schedule(schedule, operations->path, &operations->network, what->nbytes,
                           bhvd_dtype_size((bhvd_dtype)what->dtype));
}

static int window(const void *arg, int execution)
{
    const struct operations *operations = arg;
    const int newest = execution + 1 - operations->agrees;
    size_t nbytes[LINK_MATCH_QUEUES] = {0};
    for (int number = newest; number > 0 && number > newest - LINK_MATCH_QUEUES; number--)
        nbytes[number % LINK_MATCH_QUEUES] = operations->all[number - 1].nbytes;
    return newest ? window_of(nbytes, (uint64_t)newest) : 1;
}

static bhvd_status check(const struct bhvd_simulated *what, struct bhvd_error *error)
{
    const size_t element = bhvd_dtype_size((bhvd_dtype)what->dtype);
    const bool is_coded = what->kind == BHVD_C_LP_S || what->kind == BHVD_D_LP_S;
    if (what->kind != BHVD_ALLREDUCE && what->kind != BHVD_D_FP_S && !is_coded)
        return error_set(error, BHVD_ERR_ARGUMENT, "allreduces and primitives are simulated, not operations of kind %d",
                         what->kind);
    if (element == 0 || what->nbytes % element)
        return error_set(error, BHVD_ERR_ARGUMENT, "%zu bytes are not a multiple of the element size %zu", what->nbytes, element);
    const struct bhvd_codec_options options = {.parameter = what->codec_parameter};
    if (is_coded && !bhvd_encoded_size((bhvd_codec)what->codec, (bhvd_dtype)what->dtype, 1, &options))
        return error_set(error, BHVD_ERR_ARGUMENT, "codec %d with parameter %g does not encode dtype %d", what->codec,
                         what->codec_parameter, what->dtype);
    if (what->topology < BHVD_TOPOLOGY_SHIFT_ONE || what->topology > BHVD_TOPOLOGY_ROUND_ROBIN || what->round < 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "invalid topology %d or round %d", what->topology, what->round);
    return BHVD_OK;
}

bhvd_status bhvd_simulate(int size, const char *path, const struct bhvd_simulated *operations, size_t count, int agrees,
                          const struct bhvd_network *network, double *seconds, struct bhvd_error *error)
{
    struct operations what = {.all = operations, .agrees = agrees != 0};
    bhvd_status status = allreduce_path_parse(path, &what.path, error);
    if (status)
        return status;
    if (size < 2 || count > (size_t)INT32_MAX - 1 || !(network->latency_s >= 0) || !(network->bytes_per_s > 0) ||
        (network->slow_rank >= 0 && (!(network->slow_latency_s >= 0) || !(network->slow_bytes_per_s > 0))))
        return error_set(error, BHVD_ERR_ARGUMENT, "a simulation takes at least two hosts, latencies of at least 0 and bandwidths "
                         "above 0 bytes/s");
    for (size_t i = 0; i < count && !status; i++)
        status = check(&operations[i], error);
    if (status)
        return status;
    const double alpha_ns = network->latency_s * 1e9, beta_ps = 1e12 / network->bytes_per_s;
    what.network = (struct network_cost){alpha_ns < UINT32_MAX ? (uint32_t)alpha_ns : UINT32_MAX,
                                         beta_ps < UINT32_MAX ? (uint32_t)beta_ps : UINT32_MAX};
    const struct simulated simulated = {size, (int)count + what.agrees, write_down, window, &what};
    status = simulate(&simulated, network, seconds);
    if (status == BHVD_ERR_UNSUPPORTED)
        return error_set(error, status, "%d hosts do more than %d steps on this path: take fewer hosts or another path", size,
                         SIMULATOR_STEPS_MAX);
    return status ? error_set(error, status, status == BHVD_ERR_SYSTEM ? "no memory for the steps of %d hosts"
                                                                       : "deadlock: one of %d hosts waits forever", size) : BHVD_OK;
}
