// A library of the GPU's vendor, opened at run time: nothing of it is needed to build or to import.
#pragma once

#include "bagua_hvd.h"

// One function: its exported name, and where to put its address.
struct library_symbol {
    const char *name;
    void **address;
};

// Opens the first of the files of `paths` that loads (separated by ':'; NULL: none), else `soname`: the one that the
// process has loaded already, or where the system finds it; then resolves the symbols. The library stays loaded: GPU libraries do not
// survive being unloaded. BHVD_ERR_UNSUPPORTED: the sentence names what is missing, and `remedy`.
bhvd_status library_open(const char *soname, const char *paths, const char *remedy,
                         const struct library_symbol *symbols, size_t count, struct bhvd_error *error);
