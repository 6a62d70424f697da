#include "device/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"

enum { PATH_SIZE = 4096, REASON_SIZE = 400 };

// reason: dlopen's message for the last of the paths, or, without paths, for the soname.
static void *open_first(const char *soname, const char *paths, char *reason)
{
    void *library = NULL;
    reason[0] = 0;
    for (const char *at = paths ? paths : ""; !library && *at;) {
        char path[PATH_SIZE];
        const size_t length = strcspn(at, ":");
        if (length > 0 && length < sizeof path) {
            memcpy(path, at, length);
            path[length] = 0;
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (!library)
                snprintf(reason, REASON_SIZE, "%s", dlerror());
        }
        at += length + (at[length] == ':');
    }
    if (!library) {
        library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);    // the process's own copy if it has loaded one already
        if (!library && !reason[0])
            snprintf(reason, REASON_SIZE, "%s", dlerror());
    }
    return library;
}

bhvd_status library_open(const char *soname, const char *paths, const char *remedy,
                         const struct library_symbol *symbols, size_t count, struct bhvd_error *error)
{
    char reason[REASON_SIZE];
    void *library = open_first(soname, paths, reason);
    if (!library)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "%s cannot be loaded: %s; %s", soname, reason, remedy);
    for (size_t i = 0; i < count; i++) {
        *symbols[i].address = dlsym(library, symbols[i].name);
        if (!*symbols[i].address)
            return error_set(error, BHVD_ERR_UNSUPPORTED, "%s has no function %s: it is too old; %s", soname,
                             symbols[i].name, remedy);
    }
    return BHVD_OK;
}
