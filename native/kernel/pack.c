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
        const size_t n = tensor_elements(&tensors[t], 0), nbytes = n * bhvd_dtype_size(flat);
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
        const size_t n = tensor_elements(&tensors[t], 0), nbytes = n * bhvd_dtype_size(flat);
        if (n && tensors[t].dtype == (int32_t)flat)
            memcpy(tensors[t].dst, from, nbytes);
        else if (n)
            kernel_table_best()->from_float[tensors[t].dtype](tensors[t].dst, (const float *)from, n);
        from += nbytes;
    }
    return BHVD_OK;
}

bhvd_status bhvd_unpack_add(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src)
{
    float scratch[FLAT_BLOCK];
    if (!flat_is_possible(tensors, count, flat) || !dtype_is_floating((int32_t)flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_FLAT_BLOCK (tensors, count) {
        const void *x = flat_load(flat, &tensors[t], i, n, scratch);
        void *sum = flat_target(flat, &tensors[t], i, scratch);
        kernel_table_best()->reduce[KERNEL_SUM][flat](sum, x, (const char *)src + (at + i) * bhvd_dtype_size(flat), n);
        flat_store(&tensors[t], i, n, sum);
    }
    return BHVD_OK;
}
