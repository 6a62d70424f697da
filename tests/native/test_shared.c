// Pipelines in shared memory (executor/shared.h); one thread plays all members.

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "executor/executor.h"
#include "executor/shared.h"

enum { MEMBERS = 2 };

struct member {
    struct executor exec;
    struct group group;
    struct link links[MEMBERS];
    int32_t indices[MEMBERS], ranks[MEMBERS];
};

static void member_init(struct member *m, int rank, const struct shm_segment *memory, const int *fds)
{
    *m = (struct member){.group = {.size = MEMBERS, .rank = rank, .shared = true}};
    m->exec.connections = (struct connections){.shm = *memory, .links = m->links, .rank = rank, .size = MEMBERS};
    m->group.local_indices = m->indices;
    m->group.ranks = m->ranks;
    for (int i = 0; i < MEMBERS; i++) {
        m->indices[i] = m->ranks[i] = i;
        m->links[i].doorbell = (struct doorbell){shm_segment_doorbell(memory, i), fds[i]};
    }
}

static void do_nothing(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    (void)exec, (void)pipeline, (void)block;
}

static void advance(struct member *m, struct pipeline *pipeline)
{
    while (pipeline_advance(&m->exec, pipeline))
        ;
}

// The root stores its last count of a broadcast at the end: the next rank that copies in may already be asleep.
TEST(the_end_of_a_broadcast_wakes_who_waits_for_it)
{
    struct shm_segment memory = {.size = shm_segment_size(MEMBERS), .ranks = MEMBERS};
    const int fds[MEMBERS] = {eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK)};
    struct member *members = calloc(MEMBERS, sizeof *members), *root = &members[0], *next = &members[1];
    struct pipeline first[MEMBERS], second;
    memory.base = mmap(NULL, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory.base != MAP_FAILED);
    for (int i = 0; i < MEMBERS; i++)
        member_init(&members[i], i, &memory, fds);
    const struct shared_steps from_0 = {do_nothing, NULL, do_nothing, true, 0}, from_1 = {do_nothing, NULL, do_nothing, true, 1};
    for (int i = 0; i < MEMBERS; i++)
        pipeline_begin(&first[i], &members[i].group, 0, SHM_BUFFERS, &from_0);
    advance(root, &first[0]);
    advance(next, &first[1]);
    CHECK(pipeline_is_complete(&first[0]) && pipeline_is_complete(&first[1]));
    pipeline_end(&next->exec, &first[1]);
    pipeline_begin(&second, &next->group, 0, SHM_BUFFERS + 1, &from_1);
    advance(next, &second);
    CHECK(!pipeline_can_advance(&next->exec, &second));
    atomic_store(&shm_segment_doorbell(&memory, 1)->state, DOORBELL_ASLEEP);
    pipeline_end(&root->exec, &first[0]);
    CHECK(doorbell_is_rung(&root->links[1].doorbell));
    CHECK(pipeline_can_advance(&next->exec, &second));
    munmap(memory.base, memory.size);
    for (int i = 0; i < MEMBERS; i++)
        close(fds[i]);
    free(members);
}
