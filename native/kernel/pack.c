// Converts tensors to one flat vector and back, for algorithms that compute on flat arrays.
#include "base/dtype.h"
#include "kernel/flat.h"

#include <string.h>

bool flat_is_possible(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat)
{
    for (size_t t = 0; t < count; t++) {
        if (!dtype_is_valid(tensors[t].dtype) || (tensors[t].dtype != (int32_t)flat &&
                                                  (flat != BHVD_FLOAT32 || !dtype_is_floating(tensors[t].dtype))))
            return false;
    }
    return true;
}

bhvd_status bhvd_pack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, void *dst)
{
    unsigned char *to = dst;
    if (!flat_is_possible(tensors, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    for (size_t t = 0; t < count; t++) {
        const size_t n = flat_count(&tensors[t]), nbytes = n * bhvd_dtype_size(flat);
        if (n && tensors[t].dtype == (int32_t)flat)
            memcpy(to, tensors[t].src, nbytes);
        else if (n)
            kernel_table_best()->to_float[tensors[t].dtype]((float *)to, tensors[t].src, n);
        to += nbytes;
    }
    return BHVD_OK;
}

bhvd_status bhvd_unpack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src)
{
    const unsigned char *from = src;
    if (!flat_is_possible(tensors, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    for (size_t t = 0; t < count; t++) {
        const size_t n = flat_count(&tensors[t]), nbytes = n * bhvd_dtype_size(flat);
        if (n && tensors[t].dtype == (int32_t)flat)
            memcpy(tensors[t].dst, from, nbytes);
        else if (n)
            kernel_table_best()->from_float[tensors[t].dtype](tensors[t].dst, (const float *)from, n);
        from += nbytes;
    }
    return BHVD_OK;
}

// x += delta in float32, rounded to the dtype once; in blocks that stay in the cache.
static void add_wide(const struct bhvd_tensor *tensor, const float *delta, size_t count)
{
    const struct kernel_table *table = kernel_table_best();
    float block[1024];
    const size_t element = bhvd_dtype_size((bhvd_dtype)tensor->dtype), most = sizeof block / sizeof *block;
    for (size_t i = 0; i < count; i += most) {
        const size_t n = count - i < most ? count - i : most;
        table->to_float[tensor->dtype](block, (const unsigned char *)tensor->src + i * element, n);
        table->reduce[KERNEL_SUM][BHVD_FLOAT32](block, block, delta + i, n);
        table->from_float[tensor->dtype]((unsigned char *)tensor->dst + i * element, block, n);
    }
}

bhvd_status bhvd_unpack_add(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src)
{
    const unsigned char *from = src;
    if (!flat_is_possible(tensors, count, flat) || !dtype_is_floating((int32_t)flat))
        return BHVD_ERR_UNSUPPORTED;
    for (size_t t = 0; t < count; t++) {
        const size_t n = flat_count(&tensors[t]);
        if (n && tensors[t].dtype == (int32_t)flat)
            kernel_table_best()->reduce[KERNEL_SUM][flat](tensors[t].dst, tensors[t].src, from, n);
        else if (n)
            add_wide(&tensors[t], (const float *)from, n);
        from += n * bhvd_dtype_size(flat);
    }
    return BHVD_OK;
}
