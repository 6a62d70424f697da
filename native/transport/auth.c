#include "transport/auth.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>

#include "base/status.h"
#include "transport/socket.h"

enum { MAGIC_SIZE = 4, RANK_AT = 8, NONCE_AT = AUTH_HELLO_SIZE - AUTH_NONCE_SIZE };

// The last four bytes are the version, little-endian.
static const uint8_t magic_and_version[RANK_AT] = {'B', 'H', 'V', 'D', 2, 0, 0, 0};

static uint8_t *put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> 8 * i);
    return at + 4;
}

static int32_t take_rank(const uint8_t *at)
{
    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

bhvd_status auth_begin(struct auth *auth, enum auth_role role, const struct auth_binding *binding, struct bhvd_error *error)
{
    *auth = (struct auth){.role = role, .binding = *binding};
    memcpy(auth->hello, magic_and_version, RANK_AT);
    put_u32(auth->hello + RANK_AT, (uint32_t)(role == AUTH_CONNECTED ? binding->caller : binding->callee));
    ssize_t n;
    do
        n = getrandom(auth->hello + NONCE_AT, AUTH_NONCE_SIZE, 0);
    while (n < 0 && errno == EINTR);
    if (n != AUTH_NONCE_SIZE)       // up to 256 bytes come completely or not at all
        return error_set(error, BHVD_ERR_SYSTEM, "the machine gave no random bytes for the handshake: %m");
    return BHVD_OK;
}

static void make_proof(const struct auth *auth, uint8_t proof[AUTH_PROOF_SIZE], enum auth_role role, const uint8_t *own_hello,
                       const uint8_t *other_hello, const void *secret, size_t secret_size)
{
    uint8_t message[2 + 3 * 4 + 2 * AUTH_NONCE_SIZE] = {(uint8_t)role, (uint8_t)auth->binding.purpose};
    uint8_t *at = put_u32(message + 2, (uint32_t)auth->binding.caller);
    at = put_u32(at, (uint32_t)auth->binding.callee);
    at = put_u32(at, (uint32_t)auth->binding.port);
    memcpy(at, own_hello + NONCE_AT, AUTH_NONCE_SIZE);
    memcpy(at + AUTH_NONCE_SIZE, other_hello + NONCE_AT, AUTH_NONCE_SIZE);
    hmac_sha256(proof, secret, secret_size, message, sizeof message);
}

bhvd_status auth_receive_hello(struct auth *auth, const uint8_t peer_hello[AUTH_HELLO_SIZE], const void *secret,
                               size_t secret_size, struct bhvd_error *error)
{
    if (memcmp(peer_hello, magic_and_version, MAGIC_SIZE) != 0)
        return error_set(error, BHVD_ERR_PEER_LOST, "the other side does not speak bagua_hvd's protocol: another "
                         "program has this port");
    if (memcmp(peer_hello, magic_and_version, RANK_AT) != 0)
        return error_set(error, BHVD_ERR_PEER_LOST, "the other side speaks version %d of the handshake and this one "
                         "version %d: install the same bagua_hvd on every host", peer_hello[MAGIC_SIZE],
                         magic_and_version[MAGIC_SIZE]);
    enum auth_role peer_role = auth->role == AUTH_CONNECTED ? AUTH_ACCEPTED : AUTH_CONNECTED;
    if (auth->role == AUTH_ACCEPTED)
        auth->binding.caller = take_rank(peer_hello + RANK_AT);
    make_proof(auth, auth->proof, auth->role, auth->hello, peer_hello, secret, secret_size);
    make_proof(auth, auth->expected, peer_role, peer_hello, auth->hello, secret, secret_size);
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
        return error_set(error, BHVD_ERR_AUTH, "the job's secret differs between the two sides, or a proxy forwards the port: check "
                         "that _HOROVOD_SECRET_KEY is the same for every rank and the launcher, and not from an older job");
    return BHVD_OK;
}

bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error)
{
    if (status == BHVD_ERR_TIMEOUT)
        return error_set(error, status, "the other side did not finish the handshake in the time given");
    if (status == BHVD_ERR_PEER_LOST)
        return error_set(error, status, "the other side hung up during the handshake");
    return status;
}

bhvd_status auth_call(struct auth *auth, int fd, const struct auth_binding *binding, struct bhvd_error *error)
{
    bhvd_status status = auth_begin(auth, AUTH_CONNECTED, binding, error);
    return status ? status : auth_explain(socket_write_at_once(fd, auth->hello, sizeof auth->hello), error);
}

bhvd_status auth_advance(struct auth *auth, int fd, const void *secret, size_t secret_size, struct bhvd_error *error)
{
    for (;;) {
        bhvd_status status = socket_read_part(fd, auth->message, auth->has_hello ? AUTH_PROOF_SIZE : AUTH_HELLO_SIZE, &auth->moved);
        if (status)
            return auth_explain(status, error);
        if (auth->has_hello)
            return auth_receive_proof(auth, auth->message, error);
        status = auth_receive_hello(auth, auth->message, secret, secret_size, error);
        if (status)
            return status;
        if (auth->role == AUTH_ACCEPTED)
            status = socket_write_at_once(fd, auth->hello, sizeof auth->hello);
        if (!status)
            status = socket_write_at_once(fd, auth->proof, sizeof auth->proof);
        if (status)
            return auth_explain(status, error);
        auth->has_hello = true;
        auth->moved = 0;
    }
}

bhvd_status auth_handshake(int fd, enum auth_role role, const struct auth_binding *binding, const void *secret, size_t secret_size,
                           int64_t deadline_ns, struct bhvd_error *error)
{
    struct auth auth;
    bhvd_status status = role == AUTH_CONNECTED ? auth_call(&auth, fd, binding, error) : auth_begin(&auth, role, binding, error);
    if (status)
        return status;
    while ((status = auth_advance(&auth, fd, secret, secret_size, error)) == BHVD_IN_PROGRESS) {
        status = socket_await(fd, POLLIN, deadline_ns);
        if (status)
            return auth_explain(status, error);
    }
    return status;
}
