// Codec minmax_uint8. Part of kernels.cu.

template <class real> struct range {
    real mn, mx;
    int is_finite;
};

template <class real> __device__ void merge(struct range<real> *into, const struct range<real> *other)
{
    into->is_finite &= other->is_finite;
    into->mn = other->mn < into->mn ? other->mn : into->mn;
    into->mx = other->mx > into->mx ? other->mx : into->mx;
}

// Leaves in all[0] the range of all threads' own ones.
template <class real> __device__ void merge_block(struct range<real> *all, struct range<real> own)
{
    all[threadIdx.x] = own;
    __syncthreads();
    for (unsigned half = BLOCK_MAX / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && threadIdx.x + half < blockDim.x)
            merge(&all[threadIdx.x], &all[threadIdx.x + half]);
        __syncthreads();
    }
}

template <class real> __device__ struct range<real> range_of(real x, real largest)
{
    struct range<real> range = {x, x, x >= -largest && x <= largest};
    return range;
}

__device__ static float largest_of(float) { return 3.402823466e+38f; }
__device__ static double largest_of(double) { return 1.7976931348623157e+308; }

// The arithmetic of minmax_uint8.h by the type of its numbers.
template <class real> struct minmax;
#define MINMAX(real)                                                                                       \
    template <> struct minmax<real> {                                                                      \
        struct minmax_uint8_##real##_grid grid;                                                            \
        __device__ void set(real mn, real mx) { grid = minmax_uint8_##real##_grid(mn, mx); }               \
        __device__ uint8_t code(real x) const { return (uint8_t)(int)minmax_uint8_##real##_quantize(&grid, x); } \
        __device__ real value(uint8_t q) const { return minmax_uint8_##real##_dequantize(&grid, q); }      \
    };
MINMAX(float)
MINMAX(double)

// First pass: every block writes the range of its part of the segment.
template <class T> __device__ void minmax_ranges(const struct coded &coded, const void *src, void *ranges)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    __shared__ struct range<real> all[BLOCK_MAX];
    const stored *from = (const stored *)src + coded.part.begin;
    const real largest = largest_of((real)0);
    if (!coded.part.count)
        return;
    struct range<real> own = range_of(T::load(from), largest);
    auto take = [&](real x) {
        const struct range<real> one = range_of(x, largest);
        merge(&own, &one);
    };
    for_elements(
        coded.part.count, is_aligned<stored>(from), [&](uint64_t i) { take(T::load(from + i)); },
        [&](uint64_t i) {
            const vector<stored> in = load_vector(from + i);
            for (int k = 0; k < VECTOR; k++)
                take(T::load(&in.at[k]));
        },
        coded.first, coded.step);
    merge_block(all, own);
    if (threadIdx.x == 0)
        ((struct range<real> *)ranges)[blockIdx.x] = all[0];
}

// After the first pass, with the same grid: of a whole segment. All threads of a block call it.
template <class real>
__device__ struct range<real> range_of_segment(const struct coded &coded, const void *ranges, uint64_t per_segment)
{
    __shared__ struct range<real> all[BLOCK_MAX];
    const struct range<real> *mine = (const struct range<real> *)ranges + coded.index * per_segment;
    struct range<real> own = mine[0];
    for (uint64_t i = threadIdx.x; i < per_segment; i += blockDim.x)
        merge(&own, &mine[i]);
    merge_block(all, own);
    return all[0];
}

// Second pass.
template <class T>
__device__ void minmax_encode(const struct coded &coded, const void *src, const void *ranges, uint64_t per_segment)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    const stored *from = (const stored *)src + coded.part.begin;
    uint8_t *header = coded.code, *codes = header + CODEC_HEADER;
    if (!coded.part.count)
        return;
    const struct range<real> range = range_of_segment<real>(coded, ranges, per_segment);
    const real mn = range.is_finite ? range.mn + 0 : (real)NAN, mx = range.is_finite ? range.mx + 0 : (real)NAN;
    const bool constant = !(mx > mn);
    struct minmax<real> grid;
    if (!constant)
        grid.set(mn, mx);
    auto code = [&](real x) { return constant ? (uint8_t)0 : grid.code(x); };
    for_elements(
        coded.part.count, is_aligned<stored>(from) && is_aligned<uint8_t>(codes),
        [&](uint64_t i) { codes[i] = code(T::load(from + i)); },
        [&](uint64_t i) {
            const vector<stored> in = load_vector(from + i);
            vector<uint8_t> out;
            for (int j = 0; j < VECTOR; j++)
                out.at[j] = code(T::load(&in.at[j]));
            store_vector(codes + i, out);
        },
        coded.first, coded.step);
    if (coded.first == 0) {
        codec_header_init(header, MINMAX_UINT8_VERSION, range.is_finite);
        T::store((stored *)header, mn);
        T::store((stored *)header + 1, mx);
        for (uint64_t i = coded.part.count; i < codec_padded(coded.part.count); i++)
            codes[i] = 0;
    }
}

template <class T> struct minmax_uint8_decoder {
    typedef typename T::real real;
    const uint8_t *codes;
    real mn;
    bool constant;
    struct minmax<real> grid;

    __device__ minmax_uint8_decoder(const uint8_t *code, uint64_t) : codes(code + CODEC_HEADER), mn(T::load((const typename T::stored *)code))
    {
        const real mx = T::load((const typename T::stored *)code + 1);
        constant = !(mx > mn);
        if (!constant)
            grid.set(mn, mx);
    }
    __device__ real value(uint8_t q) const { return constant ? mn : grid.value(q); }
    __device__ real element(uint64_t i) const { return value(codes[i]); }
    __device__ void four(uint64_t i, real *out) const
    {
        const vector<uint8_t> in = load_vector(codes + i);
        for (int j = 0; j < VECTOR; j++)
            out[j] = value(in.at[j]);
    }
};

#define MINMAX_ENCODE(type)                                                                             \
    KERNEL(minmax_uint8_ranges_##type)(ENCODE_PARAMETERS) { minmax_ranges<type>(ENCODED, src, ranges); } \
    KERNEL(minmax_uint8_encode_##type)(ENCODE_PARAMETERS) { minmax_encode<type>(ENCODED, src, ranges, per_segment); }
MINMAX_ENCODE(f32)
MINMAX_ENCODE(f64)
MINMAX_ENCODE(f16)
MINMAX_ENCODE(bf16)
