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

// Reduces all threads' own ranges to all[0].
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

template <class T> __device__ struct range<typename T::real> range_of(typename T::real x)
{
    const typename T::real largest = T::largest;
    struct range<typename T::real> range = {x, x, x >= -largest && x <= largest};
    return range;
}

// The grid of a chunk between mn and mx, unless it is constant.
template <class real> struct minmax_grid {
    decltype(ARITHMETIC(minmax_uint8, grid)(0, 0)) grid;
    bool constant;

    __device__ minmax_grid(real mn, real mx) : constant(!(mx > mn))
    {
        if (!constant)
            grid = ARITHMETIC(minmax_uint8, grid)(mn, mx);
    }
};

// First pass: every block writes the range of its part of the segment.
template <class T> __device__ void minmax_ranges(const struct coded &coded, const void *src, void *ranges)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    __shared__ struct range<real> all[BLOCK_MAX];
    const stored *from = (const stored *)src + coded.part.begin;
    if (!coded.part.count)
        return;
    struct range<real> own = range_of<T>(T::load(from));
    auto take = [&](real x) {
        const struct range<real> one = range_of<T>(x);
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

// After the first pass, with the same grid: the range of a whole segment. All threads of a block must call it.
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
    uint8_t *header = coded.code, *codes = header + CODEC_HEADER;
    if (!coded.part.count)
        return;
    const struct range<real> range = range_of_segment<real>(coded, ranges, per_segment);
    const real mn = range.is_finite ? range.mn + 0 : (real)NAN, mx = range.is_finite ? range.mx + 0 : (real)NAN;
    const struct minmax_grid<real> by(mn, mx);
    map<u8, T>(
        codes, (const stored *)src + coded.part.begin, coded.part.count,
        [&](real x) { return by.constant ? (uint8_t)0 : (uint8_t)(int)ARITHMETIC(minmax_uint8, quantize)(&by.grid, x); },
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
    struct minmax_grid<real> by;

    __device__ minmax_uint8_decoder(const uint8_t *code, uint64_t)
        : codes(code + CODEC_HEADER), mn(T::load((const typename T::stored *)code)),
          by(mn, T::load((const typename T::stored *)code + 1))
    {
    }
    __device__ real value(uint8_t q) const { return by.constant ? mn : ARITHMETIC(minmax_uint8, dequantize)(&by.grid, q); }
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
EACH_TYPE(MINMAX_ENCODE)
