// Meetings: averaging with neighbours without the coordinator.
//
// What each member of a set has asked for twice in the same way (D_FP_S, D_LP_S between ranks), the coordinator answers as
// *standing*: from now on this name, asked for in this way, needs nobody's answer. Who is to be met follows from the request
// (primitive/peers.h), and each pair matches by the numbers of its own meetings:
//
//     member    posts -> MEET(id, number) to each neighbour; starts when each of them has said the same number
//
// A late rank delays its neighbours, and nobody else. MEET goes before the first message, so data comes only to who has posted.
//
// Who asks for the name in another way, or joins, PARTs from its neighbours first. Who waits for one that has parted parts, too,
// and asks the coordinator, which compares what those ask that have parted as soon as it comes: others may never ask.
// Of meetings beyond the last that it takes part in, who parts says so; to be in one already is an error of the program.
// Thread: the engine's.
#ifndef BHVD_MEETING_H
#define BHVD_MEETING_H

#include "base/bytes.h"
#include "core/negotiation/response_cache.h"
#include "run/schedule.h"

struct link;
struct process_set;
struct standing;

struct meetings {
    struct cached_list all;
    struct standing *waiting;           // whose operation has not started
    bool changed;                       // one of them may start now
    int agreed;                         // coordinator: how many stand
    int64_t next_look_ns;
};

struct meetings *meetings_create(void);        // NULL: no memory
void meetings_destroy(struct meetings *meetings);

// Coordinator: may what all members ask for stand from now on?
bool meetings_may_stand(bhvd_context *ctx, struct process_set *set, const struct request *request);
// Coordinator: `count` of them are asked for again, or their set is removed.
void meetings_release(bhvd_context *ctx, struct process_set *set, int count);
// Member: it stands; the operation that it was answered for is executed as ever.
bhvd_status meetings_agree(bhvd_context *ctx, const struct bhvd_handle *op, uint32_t id, const struct wire *wire);

enum meeting_way {
    MEETING_NONE,       // to be asked for as ever
    MEETING_TAKEN,      // it waits for its neighbours
    MEETING_PARTED      // to be asked for in full, as by one that has parted
};
enum meeting_way meetings_take(bhvd_context *ctx, struct bhvd_handle *op);
// Parts from all neighbours: this rank joins.
void meetings_part(bhvd_context *ctx);

// A neighbour's frames.
bhvd_status meetings_take_meet(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
bhvd_status meetings_take_part(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
// A rank has left: ends what waits for it.
void meetings_take_goodbye(bhvd_context *ctx, int rank);
// Of a process set that is being removed.
void meetings_forget_set(bhvd_context *ctx, uint32_t process_set);

// The next operation that may start, or has ended: its reference is the caller's. NULL: none.
struct bhvd_handle *meetings_next(bhvd_context *ctx, uint32_t *id, struct wire *wire);
// At the clock: who is waited for too long?
void meetings_look(bhvd_context *ctx);

#endif
