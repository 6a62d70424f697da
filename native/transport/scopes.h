// What the rendezvous server keeps (rendezvous.h): scopes, in each of which ranks wait until all are there, and which ranks have
// ended. Who they are, and how they are told, is the server's. One thread; scopes_rank_ended is for any.
#pragma once

#include <stdatomic.h>

#include "transport/rendezvous_wire.h"

// One for all ranks of a scope, which may be many megabytes in all.
struct reply {
    int holders;
    struct bytes bytes;
};

void reply_drop(struct reply *reply);

// One that asks, embedded in what asks for it.
struct guest {
    struct rendezvous_request request;
    const unsigned char *body;          // the scope's name, and the blob; kept until it is answered
    struct scope *scope;                // NULL: waits in none
};

struct scopes {
    struct scope *first;
    struct ended_rank *_Atomic ended;   // only grows; the last to end comes first
    // The guest waits no longer. NULL: no memory for an answer.
    void (*answer)(struct guest *guest, struct reply *reply);
};

// Its request is complete. The last of a scope's ranks, or one that does not belong there, answers all.
void scopes_join(struct scopes *all, struct guest *guest, const unsigned char *body);
void scopes_leave(struct guest *guest);
// A rank that gave up ends its scope: the others could only wait in vain, and would then name that rank as missing.
void scopes_give_up(struct guest *guest);
// scope: in which it had this rank; "": in any.
void scopes_rank_ended(struct scopes *all, const char *scope, int rank, int exit_code);
// Where somebody waits for a rank whose process has ended; looked for after all that may have made one so.
void scopes_answer_hopeless(struct scopes *all);
// No guest is left.
void scopes_fini(struct scopes *all);
