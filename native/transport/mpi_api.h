// The MPI library of this process: found at run time, called through one set of functions whatever its binary interface.
//
// MPI itself is one for the process, so this is too: the one part of the core that does not hang off a context. Once
// initialized it stays so until bhvd_mpi_close, however many contexts come and go.
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

// BHVD_OK when bhvd_mpi_open succeeded as this rank of this many, else the sentence that says what to do.
bhvd_status mpi_check(int rank, int size, struct bhvd_error *error);
// False before bhvd_mpi_open, and when somebody has finalized MPI: nothing may be called then.
bool mpi_is_running(void);

// A communicator of all ranks of the job, for the caller alone, whose errors are returned. Collective, does not block:
// *request completes by mpi_test, and then mpi_use_communicator is called.
int mpi_duplicate_world(union mpi_handle *communicator, union mpi_handle *request);
int mpi_use_communicator(union mpi_handle communicator);
int mpi_free_communicator(union mpi_handle *communicator);

int mpi_isend(const void *src, int nbytes, int peer, int tag, union mpi_handle communicator,
              union mpi_handle *request);
int mpi_irecv(void *dst, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request);
// received may be NULL; else the bytes of a receive that is complete.
int mpi_test(union mpi_handle *request, int *complete, int *received);
int mpi_cancel(union mpi_handle *request);
