#include "primitive/coded.h"

size_t coded_size(const void *encoder, size_t count) { return encoder_size(encoder, count); }

void coded_plan(struct plan *plan, struct codes *codes, const struct encoder *encoder, size_t own, size_t received,
                const struct network_cost *network, const struct ready_codes *ready)
{
    codes->arg = encoder;
    codes_in_scratch(codes, own, received, encoder_size(encoder, segments_part(&codes->cut, 0, 0).count), network);
    if (!ready)
        return;
    codes->encodes = codes->decodes = false;
    codes->own = (struct code_lay){INPUT_BUFFER, 0, ready->each, ready->segment, false};
    codes->results = (struct code_lay){OUTPUT_BUFFER, 0, ready->each, ready->segment, false};
    plan->operands.input = ready->own;
    plan->operands.output = ready->results;
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
