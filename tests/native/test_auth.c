// The comparison of proofs. tests/native/test_listener.c shakes hands, tests/common/test_native.py checks the proofs themselves.
#include "check.h"

#include "transport/auth.h"

TEST(every_bit_of_a_proof_counts)
{
    uint8_t expected[BHVD_PROOF_BYTES], proof[BHVD_PROOF_BYTES];
    for (int i = 0; i < BHVD_PROOF_BYTES; i++)
        expected[i] = proof[i] = (uint8_t)(7 * i);
    CHECK(auth_matches(proof, expected));
    for (int bit = 0; bit < 8 * BHVD_PROOF_BYTES; bit++) {
        proof[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(!auth_matches(proof, expected));
        proof[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}
