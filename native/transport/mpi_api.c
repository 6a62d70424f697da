#include "transport/mpi_api.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"

enum {
    VERSION_MAX = 16384,                // bytes; no library says more
    NAME_SHOWN = 40                     // bytes of it that a message quotes
};

#define NAME(function, ...) #function,
static const char *const names[] = {MPI_FUNCTIONS(NAME)};

struct mpi_library mpi;
static void *library;                  // of dlopen()
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;     // of bhvd_mpi_open and _close

static const int standard_threads[] = {0, 1024, 2048, 4096}, usual_threads[] = {0, 1, 2, 3};

bhvd_status bhvd_mpi_broadcast(void *buffer, int nbytes, struct bhvd_error *error)
{
    if (!mpi_is_running())
        return error_set(error, BHVD_ERR_SYSTEM, "MPI is not running in this process");
    const int code = mpi.call.MPI_Bcast(buffer, nbytes, mpi.byte, 0, mpi.world);
    return code == MPI_DONE ? BHVD_OK : error_set(error, BHVD_ERR_SYSTEM, "MPI_Bcast failed with code %d", code);
}

// ------------------------------------------------------------------------------------------------ finding the library

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int is_mpi(struct dl_phdr_info *info, size_t size, void *path)
{
    static const char *const prefixes[] = {"libmpi.so", "libmpich.so", "libmpi_abi.so"};
    (void)size;
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        if (strncmp(base_name(info->dlpi_name), prefixes[i], strlen(prefixes[i])) == 0) {
            snprintf(path, VERSION_MAX, "%s", info->dlpi_name);
            return 1;
        }
    }
    return 0;
}

// Fills mpi.call and the other data about the library. False, with the reason: not an MPI that can be used here.
static bool resolve(const char *vendor, char *reason, size_t reason_size)
{
    static char version[VERSION_MAX];   // under the lock
    int ignored;
    Dl_info where;
    bool complete = true;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const void *symbol = dlsym(library, names[i]);
        memcpy((char *)&mpi.call + i * sizeof symbol, &symbol, sizeof symbol);
        complete &= symbol != NULL;
    }
    if (!mpi.call.MPI_Get_library_version || mpi.call.MPI_Get_library_version(version, &ignored) != MPI_DONE) {
        snprintf(reason, reason_size, "it does not report its version");
        return false;
    }
    bool open_mpi = strstr(version, "Open MPI") != NULL;
    if (vendor && open_mpi != (strcmp(vendor, "openmpi") == 0)) {
        snprintf(reason, reason_size, "it is %.*s, not the MPI that started this process",
                 (int)strcspn(version, ",\n") < NAME_SHOWN ? (int)strcspn(version, ",\n") : NAME_SHOWN, version);
        return false;
    }
    if (!complete) {
        snprintf(reason, reason_size, "it lacks functions of MPI 3");
        return false;
    }
    void *world = dlsym(library, "ompi_mpi_comm_world");
    mpi.is_standard = dladdr((void *)mpi.call.MPI_Get_library_version, &where) &&
                      strncmp(base_name(where.dli_fname), "libmpi_abi.", 11) == 0;
    if (mpi.is_standard) {
        mpi.world.pointer = (void *)0x101;
        mpi.byte.pointer = (void *)0x247;
        mpi.errors_return.pointer = (void *)0x143;
    } else if (world) {
        mpi.world.pointer = world;
        mpi.byte.pointer = dlsym(library, "ompi_mpi_byte");
        mpi.errors_return.pointer = dlsym(library, "ompi_mpi_errors_return");
    } else {
        mpi.world.integer = 0x44000000;
        mpi.byte.integer = 0x4c00010d;
        mpi.errors_return.integer = 0x54000001;
    }
    return true;
}

// False: appends the reason to the list for the error message.
static bool load(const char *path, const char *vendor, char *reasons, size_t reasons_size)
{
    char reason[256];
    // Global, as Open MPI's own plugins expect.
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library && resolve(vendor, reason, sizeof reason))
        return true;
    if (!library)
        snprintf(reason, sizeof reason, "it cannot be loaded (%s)", dlerror());
    else
        dlclose(library);
    const size_t used = strlen(reasons);
    snprintf(reasons + used, reasons_size - used, "%s%s: %s", used ? "; " : "", path, reason);
    return false;
}

static bool find(const struct bhvd_mpi_options *options, char *reasons, size_t reasons_size)
{
    // The standard ABI's library comes last: libraries that the script loads later, for instance mpi4py, are mostly linked to
    // another one, which would bring a second MPI into the process.
    static const char *const usual[] = {"libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"};
    static char path[VERSION_MAX];      // under the lock
    // If mpi4py or another library has already loaded an MPI, use that one.
    if (dl_iterate_phdr(is_mpi, path))
        return load(path, options->vendor, reasons, reasons_size);
    for (const char *at = options->libraries ? options->libraries : ""; *at;) {
        size_t length = strcspn(at, ":");
        snprintf(path, sizeof path, "%.*s", (int)length, at);
        if (load(path, options->vendor, reasons, reasons_size))
            return true;
        at += length + (at[length] == ':');
    }
    for (size_t i = 0; !options->only_these && i < sizeof usual / sizeof usual[0]; i++) {
        if (load(usual[i], options->vendor, reasons, reasons_size))
            return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------ initialization, end

// Initializes MPI unless it is already initialized. With threads, because any waiting thread runs the engine, and the script may
// use MPI itself at the same time.
static bhvd_status start(struct bhvd_error *error)
{
    const int *levels = mpi.is_standard ? standard_threads : usual_threads;
    int flag = 0, provided = 0;
    if (mpi.call.MPI_Finalized(&flag) != MPI_DONE || flag)
        return error_set(error, BHVD_ERR_SYSTEM, "MPI was finalized before init(): finalize it at the script's end");
    if (mpi.call.MPI_Initialized(&flag) != MPI_DONE || !flag) {
        if (mpi.call.MPI_Init_thread(NULL, NULL, levels[3], &provided) != MPI_DONE)
            return error_set(error, BHVD_ERR_SYSTEM, "MPI_Init_thread failed; was this process started by mpirun?");
        mpi.initialized_here = true;
    } else if (mpi.call.MPI_Query_thread(&provided) != MPI_DONE) {
        return error_set(error, BHVD_ERR_SYSTEM, "MPI_Query_thread failed");
    }
    for (int i = 0; i < 4; i++)
        mpi.threads = provided >= levels[i] ? i : mpi.threads;
    int code = mpi.call.MPI_Comm_rank(mpi.world, &mpi.rank);
    if (code == MPI_DONE)
        code = mpi.call.MPI_Comm_size(mpi.world, &mpi.size);
    return code == MPI_DONE ? BHVD_OK : error_set(error, BHVD_ERR_SYSTEM, "MPI_Comm_rank failed with code %d", code);
}

bhvd_status bhvd_mpi_open(const struct bhvd_mpi_options *options, struct bhvd_error *error)
{
    char reasons[768] = "";
    bhvd_status status = BHVD_OK;
    pthread_mutex_lock(&lock);
    if (!mpi.open) {
        if (!find(options, reasons, sizeof reasons))
            status = error_set(error, BHVD_ERR_UNSUPPORTED,
                               "no library of the MPI that started this process was found (%s)", reasons);
        if (!status)
            status = start(error);
        mpi.open = !status;
    }
    pthread_mutex_unlock(&lock);
    return status ? status : mpi_check(options->rank, options->size, error);
}

bhvd_status mpi_check(int rank, int size, struct bhvd_error *error)
{
    if (!mpi_is_running())
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "transport \"mpi\" needs an MPI that runs in this process: start the job by mpirun, srun or "
                         "`baguarun --mpi`, or use \"auto\"");
    if (mpi.rank != rank || mpi.size != size)
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "rank %d of %d is rank %d of %d for MPI: its library did not start this process; start the "
                         "job by the mpirun that belongs to it", rank, size, mpi.rank, mpi.size);
    // MPI_THREAD_FUNNELED would need the same thread to wait for every operation.
    if (mpi.threads < 2)
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "MPI was initialized without threads: ask for MPI_THREAD_MULTIPLE, or call init() first");
    return BHVD_OK;
}

bool mpi_is_running(void)
{
    int finalized = 0;
    return mpi.open && mpi.call.MPI_Finalized(&finalized) == MPI_DONE && !finalized;
}

int bhvd_mpi_threads(void) { return mpi_is_running() ? mpi.threads : -1; }

void bhvd_mpi_close(void)
{
    pthread_mutex_lock(&lock);
    if (mpi.initialized_here && mpi_is_running())
        mpi.call.MPI_Finalize();
    mpi.open = mpi.initialized_here = false;
    pthread_mutex_unlock(&lock);
}
