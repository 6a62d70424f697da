// Codecs sign and sign_rms for AVX2.
#include "kernel/sign.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

#include "kernel/sign_vectors.h"
