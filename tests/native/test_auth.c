// The proofs of a handshake. tests/native/test_listener.c shakes hands over sockets.
#include "check.h"

#include <string.h>

#include "transport/auth.h"

enum { RANKS = 3, CALLEE = 1 };

static struct address addresses[RANKS] = {
    {.port = 4240, .nonce = "nonce of rank 0"}, {.port = 4241, .nonce = "nonce of rank 1"}, {.port = 4242, .nonce = "nonce of rank 2"}};
static const struct auth_keys KEYS = {"job 7", 5, addresses};
static const struct hello HELLO = {2, CHANNEL_DATA, 4};

TEST(the_proof_is_the_documented_one)
{
    uint8_t proof[AUTH_PROOF_SIZE], expected[AUTH_PROOF_SIZE];
    const int32_t numbers[] = {2, CHANNEL_DATA, 4, 'c', CALLEE, 4241};
    uint8_t message[sizeof numbers + 2 * AUTH_NONCE_SIZE];
    memcpy(message, numbers, sizeof numbers);
    memcpy(message + sizeof numbers, addresses[2].nonce, AUTH_NONCE_SIZE);
    memcpy(message + sizeof numbers + AUTH_NONCE_SIZE, addresses[CALLEE].nonce, AUTH_NONCE_SIZE);
    hmac_sha256(expected, "job 7", 5, message, sizeof message);
    auth_prove(&KEYS, AUTH_CALLER, &HELLO, CALLEE, proof);
    CHECK_MEM_EQ(proof, expected, sizeof proof);
    CHECK_STATUS(auth_check(&KEYS, AUTH_CALLER, &HELLO, CALLEE, proof, NULL), BHVD_OK);
}

// A proof made with one other value convinces nobody: of another job, init(), role, rank, channel or port.
TEST(every_part_of_a_proof_counts)
{
    uint8_t proof[AUTH_PROOF_SIZE];
    struct bhvd_error error;
    struct address others[3][RANKS];
    for (int i = 0; i < 3; i++)
        memcpy(others[i], addresses, sizeof addresses);
    others[0][2].nonce[31] = others[1][CALLEE].nonce[31] = 1;
    others[2][CALLEE].port = 4243;
    const struct {
        struct auth_keys keys;
        enum auth_role role;
        struct hello hello;
        int callee;
    } wrong[] = {
        {{"job 8", 5, addresses}, AUTH_CALLER, HELLO, CALLEE}, {{"job 7", 4, addresses}, AUTH_CALLER, HELLO, CALLEE},
        {{"job 7", 5, others[0]}, AUTH_CALLER, HELLO, CALLEE}, {{"job 7", 5, others[1]}, AUTH_CALLER, HELLO, CALLEE},
        {{"job 7", 5, others[2]}, AUTH_CALLER, HELLO, CALLEE}, {KEYS, AUTH_CALLEE, HELLO, CALLEE},
        {KEYS, AUTH_CALLER, {0, CHANNEL_DATA, 4}, CALLEE}, {KEYS, AUTH_CALLER, {2, CHANNEL_DATA + 1, 4}, CALLEE},
        {KEYS, AUTH_CALLER, {2, CHANNEL_DATA, 3}, CALLEE}, {KEYS, AUTH_CALLER, HELLO, 0},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        auth_prove(&wrong[i].keys, wrong[i].role, &wrong[i].hello, wrong[i].callee, proof);
        CHECK_STATUS(auth_check(&KEYS, AUTH_CALLER, &HELLO, CALLEE, proof, &error), BHVD_ERR_AUTH);
    }
    CHECK_STR_EQ(error.message, "the other side does not know the job's secret: another program has this port, or a proxy forwards it");
    auth_prove(&KEYS, AUTH_CALLER, &HELLO, CALLEE, proof);
    for (int i = 0; i < AUTH_PROOF_SIZE; i++) {
        proof[i] ^= 1;
        CHECK_STATUS(auth_check(&KEYS, AUTH_CALLER, &HELLO, CALLEE, proof, NULL), BHVD_ERR_AUTH);
        proof[i] ^= 1;
    }
}
