#include "tensorflow/staging.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/size.h"

/* Blocks that are not in use may hold this much; more is given back to the system. */
#define MAX_KEPT_NBYTES ((size_t)1 << 30)
#define ALIGNMENT 64

/* Before every block. */
struct header {
    _Alignas(ALIGNMENT) size_t nbytes;
    struct header *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct header *kept;
static size_t kept_nbytes;

void *staging_acquire(size_t nbytes)
{
    pthread_mutex_lock(&lock);
    struct header **link = &kept;
    while (*link && (*link)->nbytes != nbytes)
        link = &(*link)->next;
    struct header *header = *link;
    if (header) {
        *link = header->next;
        kept_nbytes -= nbytes;
    }
    pthread_mutex_unlock(&lock);
    if (!header) {
        /* aligned_alloc takes whole multiples of the alignment. */
        size_t size = size_round_up(sizeof *header + nbytes, ALIGNMENT);
        header = aligned_alloc(ALIGNMENT, size);
        if (!header)
            return NULL;
        header->nbytes = nbytes;
    }
    return header + 1;
}

void staging_release(void *block)
{
    if (!block)
        return;
    struct header *header = (struct header *)block - 1;
    pthread_mutex_lock(&lock);
    if (kept_nbytes + header->nbytes <= MAX_KEPT_NBYTES) {
        header->next = kept;
        kept = header;
        kept_nbytes += header->nbytes;
        header = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(header);
}
