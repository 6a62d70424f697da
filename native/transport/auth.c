#include "transport/auth.h"

#include "base/status.h"

bool auth_matches(const uint8_t proof[BHVD_PROOF_BYTES], const uint8_t expected[BHVD_PROOF_BYTES])
{
    uint8_t difference = 0;
    for (int i = 0; i < BHVD_PROOF_BYTES; i++)          // no early exit: the time must not tell how many bytes were right
        difference |= expected[i] ^ proof[i];
    return !difference;
}

bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error)
{
    if (status == BHVD_ERR_TIMEOUT)
        return error_set(error, status, "the other side did not finish the handshake in the time given");
    if (status == BHVD_ERR_PEER_LOST)
        return error_set(error, status, "the other side hung up during the handshake: it is no rank of this job, or strangers "
                         "flood it");
    if (status == BHVD_ERR_AUTH)
        return error_set(error, status, "the other side is no rank of this job: another program has this port");
    return status;
}
