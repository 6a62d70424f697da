// The MPI library of this process: found at run time, called through one set of functions for all binary interfaces.
//
// MPI is global to the process, and so is this, unlike the rest of the core. Once initialized it
// stays so until bhvd_mpi_close, however many contexts are created and destroyed.
//
//     MPICH (also Intel MPI, MVAPICH)     libmpi.so.12        handles are ints
//     the standard ABI of MPI 5           libmpi_abi.so.1     handles are pointers with fixed values for constants
//     Open MPI                            libmpi.so.40        handles are pointers to objects of the library
//
// Calls return MPI's code; MPI_DONE is success. Thread: any, one at a time (MPI_THREAD_SERIALIZED at least).
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "bagua_hvd.h"

enum { MPI_DONE = 0 };

union mpi_handle {
    void *pointer;
    int integer;
};

// Large enough for MPI_Status of every interface.
struct mpi_status {
    _Alignas(16) unsigned char bytes[128];
};

// Handles are ints or pointers. Both supported calling conventions of Linux (x86-64, AArch64) pass the union like either: in one
// register, of which a callee that expects an int reads the lower half. So one declaration serves all interfaces.
#define MPI_FUNCTIONS(each)                                                                                                 \
    each(MPI_Comm_rank, union mpi_handle, int *)                                                                            \
    each(MPI_Comm_size, union mpi_handle, int *)                                                                            \
    each(MPI_Comm_idup, union mpi_handle, union mpi_handle *, union mpi_handle *)                                           \
    each(MPI_Comm_free, union mpi_handle *)                                                                                 \
    each(MPI_Comm_set_errhandler, union mpi_handle, union mpi_handle)                                                       \
    each(MPI_Isend, const void *, int, union mpi_handle, int, int, union mpi_handle, union mpi_handle *)                    \
    each(MPI_Irecv, void *, int, union mpi_handle, int, int, union mpi_handle, union mpi_handle *)                          \
    each(MPI_Test, union mpi_handle *, int *, struct mpi_status *)                                                          \
    each(MPI_Get_count, const struct mpi_status *, union mpi_handle, int *)                                                 \
    each(MPI_Cancel, union mpi_handle *)                                                                                    \
    each(MPI_Bcast, void *, int, union mpi_handle, int, union mpi_handle)                                                   \
    each(MPI_Get_library_version, char *, int *)                                                                            \
    each(MPI_Initialized, int *)                                                                                            \
    each(MPI_Finalized, int *)                                                                                              \
    each(MPI_Init_thread, int *, char ***, int, int *)                                                                      \
    each(MPI_Query_thread, int *)                                                                                           \
    each(MPI_Finalize, void)

// The library. Its functions may be called while mpi_is_running.
#define POINTER(function, ...) int (*function)(__VA_ARGS__);
extern struct mpi_library {
    bool open, initialized_here;
    int rank, size;
    int threads;                        // 0 to 3, as bhvd_mpi_threads
    bool is_standard;                   // the ABI of MPI 5
    struct {
        MPI_FUNCTIONS(POINTER)
    } call;
    union mpi_handle world, byte, errors_return;
} mpi;
#undef POINTER

// BHVD_OK if bhvd_mpi_open succeeded as this rank of this size, else an error whose message says what to do.
bhvd_status mpi_check(int rank, int size, struct bhvd_error *error);
// False before bhvd_mpi_open and after MPI was finalized: then no MPI function may be called.
bool mpi_is_running(void);
