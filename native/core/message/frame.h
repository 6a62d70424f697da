// Frames that ranks send each other on their control channels, and the items in those of the negotiation.
#ifndef BHVD_FRAME_H
#define BHVD_FRAME_H

#define JOIN_NAME "join"        // every rank's join has this name

enum { COORDINATOR = 0 };        // its rank

enum frame_type {
    FRAME_RESPONSE = 2, FRAME_STALE = 3,         // inside FRAME_DOWN
    FRAME_GOODBYE = 4, FRAME_HEARTBEAT = 5, FRAME_LATE = 6,
    FRAME_UP = 7, FRAME_DOWN = 8, FRAME_LEAVING = 9, FRAME_MOVED = 10, FRAME_CLOSING = 11,      // relay.h
    FRAME_MEET = 12, FRAME_PART = 13            // meeting.h
};
// How a request or an answer says which operation it is about; ITEM_DETACHED: relay.h; ITEM_CARRIED: by its id, with values (carried.h).
// ITEM_PARTED: in full, by one that has parted; ITEM_STANDING: by its id, and it stands from now on (meeting.h).
enum item_tag { ITEM_CACHED = 0, ITEM_FULL = 1, ITEM_DETACHED = 2, ITEM_CARRIED = 3, ITEM_PARTED = 4, ITEM_STANDING = 5 };

enum { REQUEST_FRAME_BYTES = 1 << 20 };         // far below LINK_FRAME_MAX, however many operations are posted at once

#endif
