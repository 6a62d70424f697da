#include "primitive/coded.h"

struct codes coded_of(const struct collective *coll, size_t nbytes, int size, const struct peers *peers,
                      const struct network_cost *network)
{
    const bhvd_dtype dtype = coll->tensors[0].dtype;
    const size_t element = bhvd_dtype_size(dtype), chunks = coded_scatters(coll) ? (size_t)size : 1;
    struct codes codes = {.cut = {nbytes / element, chunks, ENCODER_SEGMENT}, .element = element, .codec = coll->codec,
                          .dtype = dtype, .options = coll->codec_options};
    if (coll->kind == BHVD_D_FP_S) {
        codes.cut.segment = PLAIN_SEGMENT_NBYTES / element;
        codes.codec = BHVD_CODEC_NONE;
    }
    codes_in_scratch(&codes, (size_t)(peers ? peers->count : size), network);
    return codes;
}

void coded_schedule(struct schedule *schedule, const struct collective *coll, const struct codes *codes, const struct peers *peers)
{
    if (coded_scatters(coll))
        schedule_scatter_gather(schedule, codes);
    else
        schedule_exchange(schedule, codes, peers ? peers->index : NULL, peers ? peers->count : schedule->size);
}

void coded_on_gpu(struct codes *codes, const struct gpu_codes *gpu, struct operands *operands)
{
    codes->encodes = codes->decodes = false;
    codes->own = (struct code_lay){INPUT_BUFFER, 0, gpu->each, gpu->segment, false};
    codes->results = (struct code_lay){OUTPUT_BUFFER, 0, gpu->each, gpu->segment, false};
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
