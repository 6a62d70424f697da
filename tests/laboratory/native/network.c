// A network between emulated hosts, for measurements: a process that carries packets between TUN devices.
//
// Every host is a network namespace whose only link is a TUN device. The process reads a host's packets, holds each for as long
// as two lines would take, the sender's up and the receiver's down, each with its own rate and delay, and writes it to the
// receiver's device. Most kernels have TUN devices; not all have netem. TCP segments arrive in large pieces, as for a network
// card with segmentation offload, and are counted as frames of MTU 1500: so 1 Gbit/s costs a few percent of a core.
//
// Time is virtual: a packet's delivery time depends only on its arrival and on earlier packets. If the process wakes late, a
// packet is late, but the rate stays the same. `report` has the delay and the process's share of a core: measurements are valid
// while that share is far below one.
//
// The engine and this program know nothing of each other. It has one thread, and ends when its control pipe is closed.
#include "line.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"

enum { HOSTS = 256, PACKET_NBYTES = sizeof(struct virtio_net_hdr) + 65536, READS = 16, ETHERNET_NBYTES = 14 };
enum { LINE_FREE, ARRIVAL, DELIVERY };      // kinds of events; of a host's two lines up is hosts[i].up

struct host {
    int tun;
    struct line up, down;
};

struct network {
    struct host hosts[HOSTS];
    int count;
    struct heap events;
    struct packet *unused;
    uint64_t packets, nbytes, dropped, late_ns, latest_ns;
};

static void drop(struct network *self, struct packet *packet)
{
    packet->next = self->unused;
    self->unused = packet;
}

static void lose(struct network *self, struct packet *packet)
{
    self->dropped++;
    drop(self, packet);
}

// Starts the next packet on a line.
static void proceed(struct network *self, struct line *line, int64_t at_ns)
{
    int64_t begin_ns;
    struct packet *packet = line_start(line, at_ns, &begin_ns);
    if (!packet)
        return;
    struct line *down = &self->hosts[packet->to].down;
    int failed;
    if (line == down) {
        int64_t arrived_ns = line->free_ns > packet->leaves_ns ? line->free_ns : packet->leaves_ns;
        failed = heap_push(&self->events, arrived_ns, packet, DELIVERY);
    } else {
        // Cut-through: its first byte can be forwarded immediately, but its last one not before it has arrived.
        packet->leaves_ns = line->free_ns + line->delay_ns + down->delay_ns;
        failed = heap_push(&self->events, begin_ns + line->delay_ns + down->delay_ns, packet, ARRIVAL);
    }
    if (failed)
        lose(self, packet);
    if (heap_push(&self->events, line->free_ns, line, LINE_FREE))
        line->busy = false;
}

static void enqueue(struct network *self, struct line *line, struct packet *packet, int64_t at_ns)
{
    if (!line_enqueue(line, packet))
        lose(self, packet);
    else if (!line->busy)
        proceed(self, line, at_ns);
}

static void deliver(struct network *self, struct packet *packet, int64_t at_ns)
{
    uint64_t late_ns = (uint64_t)(clock_now_ns() - at_ns);
    self->late_ns += late_ns;
    self->latest_ns = late_ns > self->latest_ns ? late_ns : self->latest_ns;
    if (write(self->hosts[packet->to].tun, packet->data, packet->nbytes) < 0) {
        lose(self, packet);
        return;
    }
    self->packets++;
    self->nbytes += packet->wire_nbytes;
    drop(self, packet);
}

// Processes all events until now, in order. Returns the time of the next one, or -1.
static int64_t advance(struct network *self)
{
    while (self->events.count) {
        if (self->events.entries[0].key > clock_now_ns())
            return self->events.entries[0].key;
        struct heap_entry event = heap_pop(&self->events);
        if (event.kind == LINE_FREE)
            proceed(self, event.what, event.key);
        else if (event.kind == DELIVERY)
            deliver(self, event.what, event.key);
        else
            enqueue(self, &self->hosts[((struct packet *)event.what)->to].down, event.what, event.key);
    }
    return -1;
}

// Sets the packet's destination, flow and length. False: it has no destination.
static bool read_headers(const struct network *self, struct packet *packet)
{
    const struct virtio_net_hdr *card = (const void *)packet->data;
    const unsigned char *ip = packet->data + sizeof *card;
    if (packet->nbytes < sizeof *card + 40 || ip[0] >> 4 != 4)
        return false;
    packet->to = ip[19] - 1;            // the last byte of the address
    if (packet->to < 0 || packet->to >= self->count)
        return false;
    unsigned header = (ip[0] & 15) * 4u, length = packet->nbytes - (unsigned)sizeof *card, frames = 1;
    if (header + 20 > length)
        return false;
    packet->flow = (ip[15] * 31u + ip[header] * 7u + ip[header + 1] + ip[header + 2] * 13u + ip[header + 3] * 3u) % LINE_FLOWS;
    header += (ip[header + 12] >> 4) * 4u;          // the TCP header, if the packet is segmented
    if (card->gso_type != VIRTIO_NET_HDR_GSO_NONE && card->gso_size && length > header)
        frames = (length - header + card->gso_size - 1u) / card->gso_size;
    packet->wire_nbytes = length + (frames - 1) * header + frames * ETHERNET_NBYTES;
    return true;
}

static void receive(struct network *self, struct host *host)
{
    for (int i = 0; i < READS; i++) {
        struct packet *packet = self->unused;
        if (packet)
            self->unused = packet->next;
        else if (!(packet = malloc(sizeof *packet + PACKET_NBYTES)))
            return;
        ssize_t got = read(host->tun, packet->data, PACKET_NBYTES);
        if (got <= 0) {
            drop(self, packet);
            return;
        }
        packet->nbytes = (unsigned)got;
        if (read_headers(self, packet))
            enqueue(self, &host->up, packet, clock_now_ns());
        else
            drop(self, packet);
    }
}

static void set(struct line *line, double bytes_per_s, double delay_s)
{
    line->ns_per_byte = bytes_per_s > 0 ? 1e9 / bytes_per_s : 0;
    line->delay_ns = (int64_t)(delay_s * 1e9);
}

// A line "HOST UP-RATE UP-DELAY DOWN-RATE DOWN-DELAY" (bytes per second, 0: unlimited; seconds) changes a host's link; any other
// line changes nothing. The response to each is a report.
static void command(struct network *self, const char *text)
{
    int host;
    double up, up_delay, down, down_delay;
    if (sscanf(text, "%d %lf %lf %lf %lf", &host, &up, &up_delay, &down, &down_delay) == 5 && host >= 0 && host < self->count) {
        set(&self->hosts[host].up, up, up_delay);
        set(&self->hosts[host].down, down, down_delay);
    }
    printf("{\"clock_s\": %.6f, \"cpu_s\": %.6f, \"packets\": %llu, \"bytes\": %llu, \"dropped\": %llu, \"late_s\": %.6f, "
           "\"latest_s\": %.6f}\n", (double)clock_now_ns() / 1e9, (double)clock_thread_ns() / 1e9,
           (unsigned long long)self->packets, (unsigned long long)self->nbytes, (unsigned long long)self->dropped,
           (double)self->late_ns / 1e9, (double)self->latest_ns / 1e9);
    fflush(stdout);
    self->latest_ns = 0;
}

// Opens a TUN device in the namespace (a name or a path), or in this process's own for "": its descriptor, or -1.
static int open_device(const char *namespace, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s%s", *namespace == '/' ? "" : "/run/netns/", namespace);
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), there = -1, tun = -1;
    if (home < 0 || (*namespace && ((there = open(path, O_RDONLY | O_CLOEXEC)) < 0 || setns(there, CLONE_NEWNET))))
        goto out;
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun >= 0 && (ioctl(tun, TUNSETIFF, &request) || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4))) {
        close(tun);
        tun = -1;
    }
    if (setns(home, CLONE_NEWNET))
        abort();
out:
    if (there >= 0)
        close(there);
    if (home >= 0)
        close(home);
    return tun;
}

static void carry(struct network *self)
{
    struct pollfd sources[HOSTS + 1];
    for (int i = 0; i < self->count; i++)
        sources[i] = (struct pollfd){.fd = self->hosts[i].tun, .events = POLLIN};
    sources[self->count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    char text[4096];
    size_t held = 0;
    for (;;) {
        int64_t next_ns = advance(self), wait_ns = next_ns < 0 ? 1000000000 : next_ns - clock_now_ns();
        struct timespec wait = {0};
        if (wait_ns > 0)
            wait = (struct timespec){wait_ns / 1000000000, wait_ns % 1000000000};
        if (ppoll(sources, (nfds_t)self->count + 1, &wait, NULL) < 0 && errno != EINTR)
            return;
        for (int i = 0; i < self->count; i++)
            if (sources[i].revents)
                receive(self, &self->hosts[i]);
        if (!sources[self->count].revents)
            continue;
        ssize_t got = read(STDIN_FILENO, text + held, sizeof text - 1 - held);
        if (got <= 0)
            return;
        text[held += (size_t)got] = 0;
        char *line = text, *end;
        for (; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            command(self, line);
        }
        held -= (size_t)(line - text);
        memmove(text, line, held);
    }
}

// Creates device names[i] in namespace namespaces[i], sends a report, and follows commands from stdin. Returns 0 or errno.
__attribute__((visibility("default"))) int network_run(int count, const char *const *namespaces, const char *const *names)
{
    struct network *self = count <= HOSTS ? calloc(1, sizeof *self) : NULL;
    if (!self)
        return ENOMEM;
    int result = 0;
    for (; self->count < count && !result; self->count++)
        if ((self->hosts[self->count].tun = open_device(namespaces[self->count], names[self->count])) < 0)
            result = errno;
    // A higher priority than the ranks, where real-time scheduling is permitted.
    struct sched_param priority;
    if (sched_getscheduler(0) == SCHED_RR && !sched_getparam(0, &priority)) {
        priority.sched_priority++;
        sched_setscheduler(0, SCHED_RR, &priority);
    }
    prctl(PR_SET_TIMERSLACK, 1);
    if (!result) {
        command(self, "");
        carry(self);
    }
    for (int i = 0; i < self->count; i++) {
        if (self->hosts[i].tun >= 0)
            close(self->hosts[i].tun);
        heap_fini(&self->hosts[i].up.waiting);
        heap_fini(&self->hosts[i].down.waiting);
    }
    // The process ends here, which frees packets in flight.
    heap_fini(&self->events);
    free(self);
    return result;
}
