// MPI connection setup when not all ranks come: MPI may still write into memory later, so this rank must not reuse it.
#include <stdlib.h>

#include "check.h"
#include "transport/channel_mpi.c"

static union mpi_handle *written_later;
static int connects;

// Replaces mpi_api.c by an MPI that never completes any request.
bhvd_status mpi_check(int rank, int size, struct bhvd_error *error) { return (void)rank, (void)size, (void)error, BHVD_OK; }
bool mpi_is_running(void) { return true; }
int mpi_duplicate_world(union mpi_handle *communicator, union mpi_handle *request)
{
    written_later = communicator;
    request->integer = 1;
    connects++;
    return MPI_DONE;
}
int mpi_use_communicator(union mpi_handle communicator) { return (void)communicator, MPI_DONE; }
int mpi_free_communicator(union mpi_handle *communicator) { return (void)communicator, MPI_DONE; }
int mpi_isend(const void *src, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request)
{
    return (void)src, (void)nbytes, (void)peer, (void)tag, (void)communicator, (void)request, 1;
}
int mpi_irecv(void *dst, int nbytes, int peer, int tag, union mpi_handle communicator, union mpi_handle *request)
{
    return (void)dst, (void)nbytes, (void)peer, (void)tag, (void)communicator, (void)request, 1;
}
int mpi_test(union mpi_handle *request, int *complete, int *received)
{
    (void)request, (void)received;
    *complete = 0;
    return MPI_DONE;
}
int mpi_cancel(union mpi_handle *request) { return (void)request, MPI_DONE; }

TEST(a_communicator_that_comes_too_late_is_written_to_memory_that_is_still_there)
{
    struct connections *c = calloc(1, sizeof *c);
    struct bhvd_error error;
    c->size = 1;
    c->links = calloc(1, sizeof *c->links);
    link_init(&c->links[0], 0, &c->started);
    CHECK_STATUS(mpi_connect(c, clock_now_ns(), &error), BHVD_ERR_TIMEOUT);
    CHECK_EQ(connects, 1);
    CHECK(!c->has_communicator);
    mpi_disconnect(c);
    free(c->links);
    free(c);
    written_later->integer = 7;         // the last rank has come; AddressSanitizer checks this write
    CHECK_EQ(written_later->integer, 7);
}
