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
    NAME_SHOWN = 40                     // bytes of it that a sentence quotes
};

// MPI_Status of every interface fits.
struct mpi_status {
    _Alignas(16) unsigned char bytes[128];
};

// The functions that take handles, with handles of one type.
#define FUNCTIONS(HANDLE)                                                               \
    int (*MPI_Comm_rank)(HANDLE, int *);                                                \
    int (*MPI_Comm_size)(HANDLE, int *);                                                \
    int (*MPI_Comm_idup)(HANDLE, HANDLE *, HANDLE *);                                   \
    int (*MPI_Comm_free)(HANDLE *);                                                     \
    int (*MPI_Comm_set_errhandler)(HANDLE, HANDLE);                                     \
    int (*MPI_Isend)(const void *, int, HANDLE, int, int, HANDLE, HANDLE *);            \
    int (*MPI_Irecv)(void *, int, HANDLE, int, int, HANDLE, HANDLE *);                  \
    int (*MPI_Test)(HANDLE *, int *, struct mpi_status *);                              \
    int (*MPI_Get_count)(const struct mpi_status *, HANDLE, int *);                     \
    int (*MPI_Cancel)(HANDLE *);                                                        \
    int (*MPI_Bcast)(void *, int, HANDLE, int, HANDLE);

// In the order of FUNCTIONS.
static const char *const names[] = {
    "MPI_Comm_rank", "MPI_Comm_size", "MPI_Comm_idup", "MPI_Comm_free", "MPI_Comm_set_errhandler", "MPI_Isend",
    "MPI_Irecv", "MPI_Test", "MPI_Get_count", "MPI_Cancel", "MPI_Bcast"};
enum { NAME_COUNT = sizeof names / sizeof names[0] };

struct integer_functions {
    FUNCTIONS(int)
};
struct pointer_functions {
    FUNCTIONS(void *)
};
_Static_assert(sizeof(struct integer_functions) == NAME_COUNT * sizeof(void *), "one name for each function");

enum interface { MPICH, STANDARD, OPEN_MPI };

static struct {
    pthread_mutex_t lock;               // of bhvd_mpi_open and _close
    bool open, initialized_here;
    int rank, size;
    int threads;                        // 0 to 3, as bhvd_mpi_threads
    void *handle;                       // of dlopen()
    enum interface interface;
    union {
        struct integer_functions integer;
        struct pointer_functions pointer;
        void *symbols[NAME_COUNT];
    } call;
    int (*initialized)(int *), (*finalized)(int *), (*init_thread)(int *, char ***, int, int *), (*query_thread)(int *),
        (*finalize)(void);
    union mpi_handle world, byte, errors_return;
} mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const int standard_threads[] = {0, 1024, 2048, 4096}, usual_threads[] = {0, 1, 2, 3};

// ---------------------------------------------------------------------------------------------------------- the calls

#define HAS_INTEGERS (mpi.interface == MPICH)

int mpi_duplicate_world(union mpi_handle *communicator, union mpi_handle *request)
{
    return HAS_INTEGERS
               ? mpi.call.integer.MPI_Comm_idup(mpi.world.integer, &communicator->integer, &request->integer)
               : mpi.call.pointer.MPI_Comm_idup(mpi.world.pointer, &communicator->pointer, &request->pointer);
}

int mpi_use_communicator(union mpi_handle communicator)
{
    return HAS_INTEGERS
               ? mpi.call.integer.MPI_Comm_set_errhandler(communicator.integer, mpi.errors_return.integer)
               : mpi.call.pointer.MPI_Comm_set_errhandler(communicator.pointer, mpi.errors_return.pointer);
}

int mpi_free_communicator(union mpi_handle *communicator)
{
    return HAS_INTEGERS ? mpi.call.integer.MPI_Comm_free(&communicator->integer)
                        : mpi.call.pointer.MPI_Comm_free(&communicator->pointer);
}

int mpi_isend(const void *src, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request)
{
    return HAS_INTEGERS ? mpi.call.integer.MPI_Isend(src, nbytes, mpi.byte.integer, peer, tag, communicator.integer,
                                                     &request->integer)
                        : mpi.call.pointer.MPI_Isend(src, nbytes, mpi.byte.pointer, peer, tag, communicator.pointer,
                                                     &request->pointer);
}

int mpi_irecv(void *dst, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request)
{
    return HAS_INTEGERS ? mpi.call.integer.MPI_Irecv(dst, nbytes, mpi.byte.integer, peer, tag, communicator.integer,
                                                     &request->integer)
                        : mpi.call.pointer.MPI_Irecv(dst, nbytes, mpi.byte.pointer, peer, tag, communicator.pointer,
                                                     &request->pointer);
}

int mpi_test(union mpi_handle *request, int *complete, int *received)
{
    struct mpi_status status = {{0}};
    int code = HAS_INTEGERS ? mpi.call.integer.MPI_Test(&request->integer, complete, &status)
                            : mpi.call.pointer.MPI_Test(&request->pointer, complete, &status);
    if (code != MPI_DONE || !*complete || !received)
        return code;
    return HAS_INTEGERS ? mpi.call.integer.MPI_Get_count(&status, mpi.byte.integer, received)
                        : mpi.call.pointer.MPI_Get_count(&status, mpi.byte.pointer, received);
}

int mpi_cancel(union mpi_handle *request)
{
    return HAS_INTEGERS ? mpi.call.integer.MPI_Cancel(&request->integer)
                        : mpi.call.pointer.MPI_Cancel(&request->pointer);
}

bhvd_status bhvd_mpi_broadcast(void *buffer, int nbytes, struct bhvd_error *error)
{
    if (!mpi_is_running())
        return error_set(error, BHVD_ERR_SYSTEM, "MPI does not run in this process");
    int code = HAS_INTEGERS
                   ? mpi.call.integer.MPI_Bcast(buffer, nbytes, mpi.byte.integer, 0, mpi.world.integer)
                   : mpi.call.pointer.MPI_Bcast(buffer, nbytes, mpi.byte.pointer, 0, mpi.world.pointer);
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

// Fills mpi.call and what else is needed of the library. False, with the reason: it is no MPI that can be used here.
static bool resolve(const char *vendor, char *reason, size_t reason_size)
{
    static char version[VERSION_MAX];   // under mpi.lock
    int ignored;
    Dl_info where;
    int (*get_version)(char *, int *) = (int (*)(char *, int *))dlsym(mpi.handle, "MPI_Get_library_version");
    if (!get_version || get_version(version, &ignored) != MPI_DONE) {
        snprintf(reason, reason_size, "it does not tell its version");
        return false;
    }
    bool open_mpi = strstr(version, "Open MPI") != NULL;
    if (vendor && open_mpi != (strcmp(vendor, "openmpi") == 0)) {
        snprintf(reason, reason_size, "it is %.*s, not the MPI that started this process",
                 (int)strcspn(version, ",\n") < NAME_SHOWN ? (int)strcspn(version, ",\n") : NAME_SHOWN, version);
        return false;
    }
    for (int i = 0; i < NAME_COUNT; i++)
        mpi.call.symbols[i] = dlsym(mpi.handle, names[i]);
    mpi.initialized = (int (*)(int *))dlsym(mpi.handle, "MPI_Initialized");
    mpi.finalized = (int (*)(int *))dlsym(mpi.handle, "MPI_Finalized");
    mpi.init_thread = (int (*)(int *, char ***, int, int *))dlsym(mpi.handle, "MPI_Init_thread");
    mpi.query_thread = (int (*)(int *))dlsym(mpi.handle, "MPI_Query_thread");
    mpi.finalize = (int (*)(void))dlsym(mpi.handle, "MPI_Finalize");
    bool complete = mpi.initialized && mpi.finalized && mpi.init_thread && mpi.query_thread && mpi.finalize;
    for (int i = 0; i < NAME_COUNT; i++)
        complete = complete && mpi.call.symbols[i];
    if (!complete) {
        snprintf(reason, reason_size, "it lacks functions of MPI 3");
        return false;
    }
    void *world = dlsym(mpi.handle, "ompi_mpi_comm_world");
    if (dladdr((void *)get_version, &where) && strncmp(base_name(where.dli_fname), "libmpi_abi.", 11) == 0) {
        mpi.interface = STANDARD;
        mpi.world.pointer = (void *)0x101;
        mpi.byte.pointer = (void *)0x247;
        mpi.errors_return.pointer = (void *)0x143;
    } else if (world) {
        mpi.interface = OPEN_MPI;
        mpi.world.pointer = world;
        mpi.byte.pointer = dlsym(mpi.handle, "ompi_mpi_byte");
        mpi.errors_return.pointer = dlsym(mpi.handle, "ompi_mpi_errors_return");
    } else {
        mpi.interface = MPICH;
        mpi.world.integer = 0x44000000;
        mpi.byte.integer = 0x4c00010d;
        mpi.errors_return.integer = 0x54000001;
    }
    return true;
}

// Appends to the reasons of a sentence.
static void add_reason(char *reasons, size_t size, const char *path, const char *reason)
{
    size_t used = strlen(reasons);
    snprintf(reasons + used, size - used, "%s%s: %s", used ? "; " : "", path, reason);
}

static bool load(const char *path, const char *vendor, char *reasons, size_t reasons_size)
{
    char reason[256];
    // Global, as Open MPI's own plugins expect.
    mpi.handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (mpi.handle && resolve(vendor, reason, sizeof reason))
        return true;
    if (!mpi.handle)
        snprintf(reason, sizeof reason, "it cannot be loaded (%s)", dlerror());
    else
        dlclose(mpi.handle);
    add_reason(reasons, reasons_size, path, reason);
    return false;
}

static bool find(const struct bhvd_mpi_options *options, char *reasons, size_t reasons_size)
{
    // The standard ABI's last: what the script uses later beside it, mpi4py for instance, is mostly linked to another one,
    // and would bring a second MPI into the process.
    static const char *const usual[] = {"libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"};
    static char path[VERSION_MAX];      // under mpi.lock
    // What mpi4py or another library brought must not get a second one beside it.
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

// --------------------------------------------------------------------------------------------------- its beginning, end

// Initializes MPI unless somebody has. Threads, because each thread that waits runs the engine, and the script may use
// MPI by itself meanwhile.
static bhvd_status start(struct bhvd_error *error)
{
    const int *levels = mpi.interface == STANDARD ? standard_threads : usual_threads;
    int flag = 0, provided = 0;
    if (mpi.finalized(&flag) != MPI_DONE || flag)
        return error_set(error, BHVD_ERR_SYSTEM, "MPI was finalized before init(): finalize it at the script's end");
    if (mpi.initialized(&flag) != MPI_DONE || !flag) {
        if (mpi.init_thread(NULL, NULL, levels[3], &provided) != MPI_DONE)
            return error_set(error, BHVD_ERR_SYSTEM, "MPI_Init_thread failed; was this process started by mpirun?");
        mpi.initialized_here = true;
    } else if (mpi.query_thread(&provided) != MPI_DONE) {
        return error_set(error, BHVD_ERR_SYSTEM, "MPI_Query_thread failed");
    }
    for (int i = 0; i < 4; i++)
        mpi.threads = provided >= levels[i] ? i : mpi.threads;
    return BHVD_OK;
}

static bhvd_status ask_rank(struct bhvd_error *error)
{
    int code = HAS_INTEGERS ? mpi.call.integer.MPI_Comm_rank(mpi.world.integer, &mpi.rank)
                            : mpi.call.pointer.MPI_Comm_rank(mpi.world.pointer, &mpi.rank);
    if (code == MPI_DONE)
        code = HAS_INTEGERS ? mpi.call.integer.MPI_Comm_size(mpi.world.integer, &mpi.size)
                            : mpi.call.pointer.MPI_Comm_size(mpi.world.pointer, &mpi.size);
    return code == MPI_DONE ? BHVD_OK : error_set(error, BHVD_ERR_SYSTEM, "MPI_Comm_rank failed with code %d", code);
}

bhvd_status bhvd_mpi_open(const struct bhvd_mpi_options *options, struct bhvd_error *error)
{
    char reasons[768] = "";
    bhvd_status status = BHVD_OK;
    pthread_mutex_lock(&mpi.lock);
    if (!mpi.open) {
        if (!find(options, reasons, sizeof reasons))
            status = error_set(error, BHVD_ERR_UNSUPPORTED,
                               "no library of the MPI that started this process was found (%s)", reasons);
        if (!status)
            status = start(error);
        if (!status)
            status = ask_rank(error);
        mpi.open = !status;
    }
    pthread_mutex_unlock(&mpi.lock);
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
    // Funneled would do only if one and the same thread waited for every operation.
    if (mpi.threads < 2)
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "MPI was initialized without threads: ask for MPI_THREAD_MULTIPLE, or call init() first");
    return BHVD_OK;
}

bool mpi_is_running(void)
{
    int finalized = 0;
    return mpi.open && mpi.finalized(&finalized) == MPI_DONE && !finalized;
}

int bhvd_mpi_threads(void) { return mpi_is_running() ? mpi.threads : -1; }

void bhvd_mpi_close(void)
{
    pthread_mutex_lock(&mpi.lock);
    if (mpi.initialized_here && mpi_is_running())
        mpi.finalize();
    mpi.open = mpi.initialized_here = false;
    pthread_mutex_unlock(&mpi.lock);
}
