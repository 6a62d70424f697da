#include "transport/auth.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "base/status.h"
#include "transport/socket.h"

enum { MAGIC_SIZE = 4, NONCE_AT = AUTH_HELLO_SIZE - AUTH_NONCE_SIZE };

// The last four bytes are the version, little-endian.
static const uint8_t magic_and_version[NONCE_AT] = {'B', 'H', 'V', 'D', 1, 0, 0, 0};

bhvd_status auth_begin(struct auth *auth, enum auth_role role, struct bhvd_error *error)
{
    auth->role = role;
    memcpy(auth->hello, magic_and_version, NONCE_AT);
    ssize_t n;
    do
        n = getrandom(auth->hello + NONCE_AT, AUTH_NONCE_SIZE, 0);
    while (n < 0 && errno == EINTR);
    if (n != AUTH_NONCE_SIZE)       // up to 256 bytes come whole or not at all
        return error_set(error, BHVD_ERR_SYSTEM, "the machine gave no random bytes for the handshake: %m");
    return BHVD_OK;
}

static void make_proof(uint8_t proof[AUTH_PROOF_SIZE], enum auth_role role, const uint8_t *own_hello,
                       const uint8_t *other_hello, const void *secret, size_t secret_size)
{
    uint8_t message[1 + 2 * AUTH_NONCE_SIZE] = {(uint8_t)role};
    memcpy(message + 1, own_hello + NONCE_AT, AUTH_NONCE_SIZE);
    memcpy(message + 1 + AUTH_NONCE_SIZE, other_hello + NONCE_AT, AUTH_NONCE_SIZE);
    hmac_sha256(proof, secret, secret_size, message, sizeof message);
}

bhvd_status auth_receive_hello(struct auth *auth, const uint8_t peer_hello[AUTH_HELLO_SIZE], const void *secret,
                               size_t secret_size, struct bhvd_error *error)
{
    if (memcmp(peer_hello, magic_and_version, MAGIC_SIZE) != 0)
        return error_set(error, BHVD_ERR_PEER_LOST, "the other side does not speak bagua_hvd's protocol: another "
                         "program has this port");
    if (memcmp(peer_hello, magic_and_version, NONCE_AT) != 0)
        return error_set(error, BHVD_ERR_PEER_LOST, "the other side speaks version %d of the handshake and this one "
                         "version %d: install the same bagua_hvd on every host", peer_hello[MAGIC_SIZE],
                         magic_and_version[MAGIC_SIZE]);
    enum auth_role peer_role = auth->role == AUTH_CONNECTED ? AUTH_ACCEPTED : AUTH_CONNECTED;
    make_proof(auth->proof, auth->role, auth->hello, peer_hello, secret, secret_size);
    make_proof(auth->expected, peer_role, peer_hello, auth->hello, secret, secret_size);
    return BHVD_OK;
}

bhvd_status auth_receive_proof(const struct auth *auth, const uint8_t peer_proof[AUTH_PROOF_SIZE],
                               struct bhvd_error *error)
{
    // No early exit: the time taken must not tell how many bytes were right.
    uint8_t difference = 0;
    for (int i = 0; i < AUTH_PROOF_SIZE; i++)
        difference |= auth->expected[i] ^ peer_proof[i];
    if (difference)
        return error_set(error, BHVD_ERR_AUTH, "the job's secret differs between the two sides: check that "
                         "_HOROVOD_SECRET_KEY is the same for every rank and the launcher, and not from an older job");
    return BHVD_OK;
}

static bhvd_status explain(bhvd_status status, struct bhvd_error *error)
{
    if (status == BHVD_ERR_TIMEOUT)
        return error_set(error, status, "the other side did not finish the handshake in the time given");
    if (status == BHVD_ERR_PEER_LOST)
        return error_set(error, status, "the other side hung up during the handshake");
    return status;
}

bhvd_status auth_handshake(int fd, enum auth_role role, const void *secret, size_t secret_size, int64_t deadline_ns,
                           struct bhvd_error *error)
{
    struct auth auth;
    uint8_t peer_hello[AUTH_HELLO_SIZE], peer_proof[AUTH_PROOF_SIZE];
    bhvd_status status = auth_begin(&auth, role, error);
    if (status)
        return status;
    status = socket_write_full(fd, auth.hello, sizeof auth.hello, deadline_ns);
    if (!status)
        status = socket_read_full(fd, peer_hello, sizeof peer_hello, deadline_ns);
    if (status)
        return explain(status, error);
    status = auth_receive_hello(&auth, peer_hello, secret, secret_size, error);
    if (status)
        return status;
    status = socket_write_full(fd, auth.proof, sizeof auth.proof, deadline_ns);
    if (!status)
        status = socket_read_full(fd, peer_proof, sizeof peer_proof, deadline_ns);
    if (status)
        return explain(status, error);
    return auth_receive_proof(&auth, peer_proof, error);
}
