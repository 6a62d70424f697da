// A library of the GPU's vendor, opened at run time: not needed to build or to import.
#pragma once

#include "bagua_hvd.h"

// One function: its exported name, and the variable for its address.
struct library_symbol {
    const char *name;
    void **address;
};

// Opens the first file of `paths` that loads (separated by ':'; NULL: none), else `soname`: the copy that the process has already
// loaded, or one that the system finds. Then resolves the symbols. The library stays loaded, because GPU libraries cannot be
// unloaded safely. BHVD_ERR_UNSUPPORTED: the message names the missing library or function, and `remedy`.
bhvd_status library_open(const char *soname, const char *paths, const char *remedy,
                         const struct library_symbol *symbols, size_t count, struct bhvd_error *error);
