// MPI connection setup when not all ranks come: MPI may still write into memory later, so this rank must not reuse it.
#include <stdlib.h>

#include "check.h"
#include "transport/channel_mpi.c"

static union mpi_handle *written_later;
static int connects;

// Replaces mpi_api.c by an MPI that never completes any request.
bhvd_status mpi_check(int rank, int size, struct bhvd_error *error) { return (void)rank, (void)size, (void)error, BHVD_OK; }
bool mpi_is_running(void) { return true; }
static int idup(union mpi_handle world, union mpi_handle *communicator, union mpi_handle *request)
{
    (void)world;
    written_later = communicator;
    request->integer = 1;
    connects++;
    return MPI_DONE;
}
static int test_never(union mpi_handle *request, int *complete, struct mpi_status *status)
{
    (void)request, (void)status;
    *complete = 0;
    return MPI_DONE;
}
struct mpi_library mpi = {.call = {.MPI_Comm_idup = idup, .MPI_Test = test_never}};

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
