#include "transport/auth.h"

#include <string.h>

#include "base/status.h"

void auth_prove(const struct auth_keys *keys, enum auth_role role, const struct hello *hello, int callee,
                uint8_t proof[AUTH_PROOF_SIZE])
{
    const struct address *addresses = keys->addresses;
    struct {
        struct hello hello;
        int32_t role, callee, port;
        uint8_t caller_nonce[AUTH_NONCE_SIZE], callee_nonce[AUTH_NONCE_SIZE];
    } message = {.hello = *hello, .role = role, .callee = callee, .port = addresses[callee].port};
    memcpy(message.caller_nonce, addresses[hello->caller].nonce, AUTH_NONCE_SIZE);
    memcpy(message.callee_nonce, addresses[callee].nonce, AUTH_NONCE_SIZE);
    hmac_sha256(proof, keys->secret, keys->secret_size, &message, sizeof message);
}

bhvd_status auth_check(const struct auth_keys *keys, enum auth_role role, const struct hello *hello, int callee,
                       const uint8_t proof[AUTH_PROOF_SIZE], struct bhvd_error *error)
{
    uint8_t expected[AUTH_PROOF_SIZE], difference = 0;
    auth_prove(keys, role, hello, callee, expected);
    for (int i = 0; i < AUTH_PROOF_SIZE; i++)           // no early exit: the time must not tell how many bytes were right
        difference |= expected[i] ^ proof[i];
    return difference ? error_set(error, BHVD_ERR_AUTH, "the other side does not know the job's secret: another program has this "
                                  "port, or a proxy forwards it") : BHVD_OK;
}

bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error)
{
    if (status == BHVD_ERR_TIMEOUT)
        return error_set(error, status, "the other side did not finish the handshake in the time given");
    if (status == BHVD_ERR_PEER_LOST)
        return error_set(error, status, "the other side hung up during the handshake");
    return status;
}
