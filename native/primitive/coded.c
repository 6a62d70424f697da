#include "primitive/coded.h"

size_t coded_size(const void *encoder, size_t count) { return encoder_size(encoder, count); }

void coded_use_ready(struct codes *codes, struct plan *plan, const struct ready_codes *ready)
{
    codes->encodes = codes->decodes = false;
    codes->own = (struct code_lay){IN_INPUT, 0, ready->each, ready->segment, false};
    codes->results = (struct code_lay){IN_OUTPUT, 0, ready->each, ready->segment, false};
    plan->operands.input = ready->own;
    plan->operands.output = ready->results;
}
