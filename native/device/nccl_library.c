#include "device/nccl_library.h"

#include "base/status.h"
#include "device/device.h"

enum { NCCL_OLDEST = 21400 };           // nonblocking communicators, which can be queried for errors

#define REMEDY "install the package nvidia-nccl-cu12 (or -cu13), or name the file in BAGUA_HVD_LIBNCCL"

bhvd_status nccl_open(const char *libraries, struct nccl *out, struct bhvd_error *error)
{
#define SYMBOL(symbol, member, result, prototype) {symbol, (void **)&out->member},
    const struct library_symbol symbols[] = {NCCL_FUNCTIONS(SYMBOL)};
    out->version = 0;
    // The version is checked first: a library that is too old also lacks functions, but the version makes a clearer message.
    bhvd_status status = library_open("libnccl.so.2", libraries, REMEDY, symbols, 1, error);
    if (status)
        return status;
    if (out->get_version(&out->version) || out->version < NCCL_OLDEST)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "libnccl.so.2 has version %d; bagua_hvd needs %d at least: install "
                         "a newer nvidia-nccl-cu12 (or -cu13)", out->version, NCCL_OLDEST);
    return library_open("libnccl.so.2", libraries, REMEDY, symbols, sizeof symbols / sizeof symbols[0], error);
}

// Since 2.9, NCCL encodes versions as 10000 major + 100 minor + patch.
bhvd_status bhvd_nccl_probe(const char *libraries, int *version, struct bhvd_error *error)
{
    struct nccl nccl;
    bhvd_status status = nccl_open(libraries, &nccl, error);
    *version = nccl.version;
    if (!status)
        error_clear(error);
    return status;
}
