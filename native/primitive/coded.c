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

unsigned char *coded_scratch(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t nbytes)
{
    const size_t longest = segments_part(&codes->cut, 0, 0).count;
    unsigned char *scratch = executor_acquire(exec, nbytes + encoder_scratch_size(encoder, longest));
    if (scratch)
        encoder_set_scratch(encoder, scratch + nbytes, longest);
    else
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for codes of %zu elements", longest);
    return scratch;
}
