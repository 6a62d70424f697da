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

// BHVD_OK if bhvd_mpi_open succeeded as this rank of this size, else an error whose message says what to do.
bhvd_status mpi_check(int rank, int size, struct bhvd_error *error);
// False before bhvd_mpi_open and after MPI was finalized: then no MPI function may be called.
bool mpi_is_running(void);

// A communicator of all ranks of the job, for this caller only, whose errors are returned. Collective, does not block:
// when *request completes in mpi_test, call mpi_use_communicator.
int mpi_duplicate_world(union mpi_handle *communicator, union mpi_handle *request);
int mpi_use_communicator(union mpi_handle communicator);
int mpi_free_communicator(union mpi_handle *communicator);

int mpi_isend(const void *src, int nbytes, int peer, int tag, union mpi_handle communicator,
              union mpi_handle *request);
int mpi_irecv(void *dst, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request);
// received: set to the number of bytes of a completed receive; may be NULL.
int mpi_test(union mpi_handle *request, int *complete, int *received);
int mpi_cancel(union mpi_handle *request);
