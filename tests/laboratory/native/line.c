#include "line.h"

bool line_enqueue(struct line *line, struct packet *packet)
{
    if (line->waiting_nbytes + packet->nbytes > LINE_QUEUE_BYTES)
        return false;
    int64_t *flow = &line->flow_time[packet->flow];
    int64_t start = *flow > line->virtual_time ? *flow : line->virtual_time;
    if (heap_push(&line->waiting, start, packet, 0))
        return false;
    *flow = start + packet->wire_nbytes;
    line->waiting_nbytes += packet->nbytes;
    return true;
}

struct packet *line_start(struct line *line, int64_t at_ns, int64_t *begin_ns)
{
    line->busy = line->waiting.count > 0;
    if (!line->busy)
        return NULL;
    struct heap_entry first = heap_pop(&line->waiting);
    struct packet *packet = first.what;
    line->virtual_time = first.key;
    line->waiting_nbytes -= packet->nbytes;
    *begin_ns = at_ns > line->free_ns ? at_ns : line->free_ns;
    line->free_ns = *begin_ns + (int64_t)(packet->wire_nbytes * line->ns_per_byte);
    return packet;
}
