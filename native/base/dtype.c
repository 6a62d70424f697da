// Properties of element types. An invalid number has size 0 and the name "unknown".
#include "base/dtype.h"

size_t bhvd_dtype_size(bhvd_dtype dtype)
{
#define SIZE(dtype, name, type) [dtype] = sizeof(type),
    static const unsigned char sizes[BHVD_DTYPE_COUNT] = {DTYPES(SIZE)};
#undef SIZE
    return dtype_is_valid((int)dtype) ? sizes[dtype] : 0;
}

const char *bhvd_dtype_name(bhvd_dtype dtype)
{
#define NAME(dtype, name, type) [dtype] = name,
    static const char *const names[BHVD_DTYPE_COUNT] = {DTYPES(NAME)};
#undef NAME
    return dtype_is_valid((int)dtype) ? names[dtype] : "unknown";
}
