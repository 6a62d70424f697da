// NVIDIA's collectives, libnccl.so.2, opened at run time; prototypes of our own.
#include "base/status.h"
#include "device/library.h"

enum { NCCL_OLDEST = 21400 };           // communicators that can be made without blocking, and asked for errors

// NCCL writes versions as 10000 major + 100 minor + patch since 2.9.
bhvd_status bhvd_nccl_probe(const char *libraries, int *version, struct bhvd_error *error)
{
    int (*get_version)(int *);
    const struct library_symbol symbols[] = {{"ncclGetVersion", (void **)&get_version}};
    *version = 0;
    bhvd_status status = library_open(
        "libnccl.so.2", libraries,
        "install the package nvidia-nccl-cu12 (or -cu13), or name the file in BAGUA_HVD_LIBNCCL", symbols, 1, error);
    if (status)
        return status;
    if (get_version(version) || *version < NCCL_OLDEST)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "libnccl.so.2 has version %d; bagua_hvd needs %d at least: install "
                         "a newer nvidia-nccl-cu12 (or -cu13)", *version, NCCL_OLDEST);
    error_clear(error);
    return BHVD_OK;
}
