// Decoders of all codecs, in every variant that this machine runs: for any bytes, a decoder reads and writes within bounds.
#include "fuzz.h"

#include "kernel/codec.h"
#include "kernel/kernel.h"

enum { COUNT_MAX = 700 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct supply s = {data, data + size};
    bhvd_codec codec = supply_u8(&s) % BHVD_CODEC_COUNT;
    bhvd_dtype dtype = supply_u8(&s) % BHVD_DTYPE_COUNT;
    uint8_t features = supply_u8(&s) & 3, choice = supply_u8(&s);
    size_t count = supply_u16(&s) % COUNT_MAX;
    struct bhvd_codec_options options = {.parameter = choice};
    if (codec == BHVD_CODEC_TOPK || codec == BHVD_CODEC_TOPK_2BIT)
        options.parameter = choice / 255.0;
    if (codec >= BHVD_CODEC_BLOCK8 && codec <= BHVD_CODEC_FLOAT8) {
        options.parameter = 64 << (choice & 3);
        options.stochastic = choice >> 2 & 1;
    }
    if (codec >= BHVD_CODEC_ROTATED1)
        options.parameter = 256 << (choice & 3);
    size_t nbytes = bhvd_encoded_size(codec, dtype, count, &options);
    if (nbytes == 0)
        return 0;
    // Exactly the required size.
    uint8_t *code = calloc(1, nbytes);
    void *elements = malloc(count * bhvd_dtype_size(dtype));
    float *sums = calloc(count, sizeof *sums);
    size_t given = nbytes;
    const uint8_t *bytes = supply_bytes(&s, &given);
    memcpy(code, bytes, given);
    struct kernel_table table;
    kernel_table_init(&table, features & cpu_features());
    const struct kernel_codec *kernels = &table.codecs[codec][dtype];
    if (kernels->encoded_size) {
        kernels->decode(elements, code, count, &options);
        kernels->decode_add(sums, code, count, &options);
    }
    bhvd_decode(codec, dtype, elements, code, count, &options);
    bhvd_decode_add(codec, dtype, sums, code, count, &options);
    // Any decoded elements can be encoded again.
    if (kernels->encoded_size && count)
        kernels->encode(code, elements, count, &options);
    free(code);
    free(elements);
    free(sums);
    return 0;
}
