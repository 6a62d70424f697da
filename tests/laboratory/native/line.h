// One direction of a host's link: packets wait for it and cross it one after the other, each for its length / rate.
//
// Flows (TCP connections) share it fairly, packet by packet, as through a queue of their own each (start-time fair
// queueing): so a small message passes the megabytes of other connections, as it does on a host whose kernel keeps those
// back in their sockets. What waits is not lost unless the queue is longer than any window should make it.
#ifndef NETWORK_LINE_H
#define NETWORK_LINE_H

#include "heap.h"

#include <stdbool.h>

#define LINE_FLOWS 1024
#define LINE_QUEUE_BYTES (256 << 20)

struct packet {
    struct packet *next;        // of those not in use
    int64_t leaves_ns;          // when its last byte has come out of the sender's line, delays included
    int to;                     // a host
    unsigned flow;              // of LINE_FLOWS
    unsigned wire_nbytes;       // with what Ethernet adds to each frame
    unsigned nbytes;            // of data
    unsigned char data[];       // PACKET_NBYTES
};

struct line {
    double ns_per_byte;         // 0: no limit
    int64_t delay_ns;
    int64_t free_ns;            // until then it is crossed by a packet
    bool busy;
    struct heap waiting;        // by virtual time
    int64_t virtual_time, flow_time[LINE_FLOWS];
    size_t waiting_nbytes;
};

// False: the packet does not fit into the queue, or there is no memory, and it stays the caller's.
bool line_enqueue(struct line *line, struct packet *packet);

// The next packet, which is on the line from *begin_ns to line->free_ns; NULL: none waits. at_ns: now, by the clock of
// the network, not before what is on the line has left.
struct packet *line_start(struct line *line, int64_t at_ns, int64_t *begin_ns);

#endif
