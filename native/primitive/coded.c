#include "primitive/coded.h"

struct codes coded_of(const struct collective *coll, size_t nbytes, size_t chunks)
{
    const bhvd_dtype dtype = coll->tensors[0].dtype;
    const size_t element = bhvd_dtype_size(dtype);
    return (struct codes){.cut = {nbytes / element, chunks, ENCODER_SEGMENT}, .element = element, .codec = coll->codec,
                          .dtype = dtype, .options = coll->codec_options};
}

void coded_plan(struct plan *plan, struct codes *codes, size_t own, size_t received, const struct network_cost *network,
                const struct gpu_codes *gpu)
{
    codes_in_scratch(codes, own, received, network);
    if (!gpu)
        return;
    codes->encodes = codes->decodes = false;
    codes->own = (struct code_lay){INPUT_BUFFER, 0, gpu->each, gpu->segment, false};
    codes->results = (struct code_lay){OUTPUT_BUFFER, 0, gpu->each, gpu->segment, false};
    plan->operands.input = gpu->own;
    plan->operands.output = gpu->results;
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
