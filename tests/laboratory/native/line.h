// One direction of a host's link: packets queue for it, and each occupies it for its length / rate.
//
// Flows (TCP connections) share it fairly, packet by packet, as if each had its own queue (start-time fair queueing): so a small
// message passes megabytes of other connections, as on a host whose kernel holds those back in their sockets. Packets are only
// dropped when the queue is longer than any TCP window should make it.
#ifndef NETWORK_LINE_H
#define NETWORK_LINE_H

#include "heap.h"

#include <stdbool.h>

#define LINE_FLOWS 1024
#define LINE_QUEUE_BYTES (256 << 20)

struct packet {
    struct packet *next;        // in the list of free packets
    int64_t leaves_ns;          // when its last byte has left the sender's line, delays included
    int to;                     // a host
    unsigned flow;              // of LINE_FLOWS
    unsigned wire_nbytes;       // with Ethernet's overhead for each frame
    unsigned nbytes;            // of data
    unsigned char data[];       // PACKET_NBYTES
};

struct line {
    double ns_per_byte;         // 0: unlimited
    int64_t delay_ns;
    int64_t free_ns;            // occupied by a packet until then
    bool busy;
    struct heap waiting;        // ordered by virtual time
    int64_t virtual_time, flow_time[LINE_FLOWS];
    size_t waiting_nbytes;
};

// False: the packet does not fit into the queue, or there is no memory; the caller still owns it.
bool line_enqueue(struct line *line, struct packet *packet);

// The next packet, which occupies the line from *begin_ns to line->free_ns; NULL: none waits. at_ns: the network's current time,
// not before the previous packet has left.
struct packet *line_start(struct line *line, int64_t at_ns, int64_t *begin_ns);

#endif
