// A request as the coordinator reads it: the parser, its result, and the comparison with another request.
#include "fuzz.h"

#include "core/message/request.h"

// Reads the parsed request completely.
static void look_at(const struct request *request)
{
    const size_t tensors = request->args.tensor_count;
    REQUIRE(tensors == 0 || request_nbytes(request) / 8 <= tensors * (size_t)OPERATION_COUNT_MAX);
    for (size_t t = 0; t < tensors; t++) {
        char shape[64];
        request_format_shape(shape, sizeof shape, &request->tensors[t]);
        REQUIRE(strlen(shape) < sizeof shape && shape[0] == '[');
        for (int d = 0; d < request->tensors[t].ndim; d++)
            REQUIRE(request_dim(&request->tensors[t], d) >= 0);
    }
    int64_t sum = 0;
    for (uint32_t i = 0; i < request->args.split_count; i++)
        sum ^= request_split(request, i);
    struct operation_key key;
    REQUIRE(request_read_key(request->bytes, request->size, &key));
    REQUIRE(key.name_size == request->key.name_size && operation_hash(&key) == operation_hash(&request->key));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct supply s = {data, data + size};
    size_t first_size = supply_u16(&s);
    const uint8_t *first = supply_bytes(&s, &first_size);
    struct request *one, *other;
    request_parse(first, first_size, &one);
    request_parse(s.at, (size_t)(s.end - s.at), &other);
    struct bhvd_error error;
    if (one)
        look_at(one);
    if (other)
        look_at(other);
    if (one && other && !request_compare(one, 0, other, 1, &error))
        REQUIRE(!request_compare(other, 1, one, 0, &error));
    if (one)
        REQUIRE(!request_compare(one, 0, one, 1, &error));
    request_release(one);
    request_release(other);
    return 0;
}
