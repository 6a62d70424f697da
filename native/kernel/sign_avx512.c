// Codecs sign and sign_rms for AVX-512.
#include "kernel/sign.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

#include "kernel/sign_vectors.h"
