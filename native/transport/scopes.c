#include "transport/scopes.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

// The ranks that wait under one name; lives as long as there are any.
struct scope {
    struct scopes *all;
    struct scope *next;
    char name[RENDEZVOUS_SCOPE_MAX + 1];
    uint32_t size, arrived;
    struct guest *ranks[];             // NULL: not here
};

struct ended_rank {
    struct ended_rank *next;
    uint32_t rank;
    int exit_code;
    char scope[RENDEZVOUS_SCOPE_MAX + 1];       // "": any
};

static struct reply *reply_create(bhvd_status status, struct bytes *body)
{
    struct reply *reply = calloc(1, sizeof *reply);
    if (reply) {
        bytes_put_u32(&reply->bytes, REPLY_MAGIC);
        bytes_put_u32(&reply->bytes, (uint32_t)status);
        bytes_put_u32(&reply->bytes, (uint32_t)body->size);
        bytes_put(&reply->bytes, body->data, body->size);
        reply->bytes.failed |= body->failed;
        reply->holders = 1;
    }
    bytes_fini(body);
    return reply;
}

static struct reply *reply_sentence(const struct bhvd_error *error)
{
    struct bytes body = {0};
    bytes_put(&body, error->message, strlen(error->message));
    return reply_create(error->status, &body);
}

void reply_drop(struct reply *reply)
{
    if (reply && --reply->holders == 0) {
        bytes_fini(&reply->bytes);
        free(reply);
    }
}

static void scope_destroy(struct scope *scope)
{
    struct scope **link = &scope->all->first;
    while (*link != scope)
        link = &(*link)->next;
    *link = scope->next;
    free(scope);
}

static void scope_answer(struct scope *scope, struct reply *reply)
{
    for (uint32_t i = 0; i < scope->size; i++) {
        if (scope->ranks[i]) {
            scope->ranks[i]->scope = NULL;
            scope->all->answer(scope->ranks[i], reply);
        }
    }
    scope_destroy(scope);
    reply_drop(reply);
}

static struct reply *scope_all_blobs(const struct scope *scope)
{
    struct bytes body = {0};
    for (uint32_t i = 0; i < scope->size; i++) {
        const struct guest *guest = scope->ranks[i];
        bytes_put_u32(&body, guest->request.blob_size);
        bytes_put(&body, guest->body + guest->request.scope_size, guest->request.blob_size);
    }
    return reply_create(BHVD_OK, &body);
}

static bhvd_status scope_missing_ranks(const struct scope *scope, uint32_t limit_ms, struct bhvd_error *error)
{
    enum { NAMED_MAX = 8 };
    char names[NAMED_MAX * 16] = "";
    uint32_t missing = scope->size - scope->arrived, named = 0;
    size_t length = 0;
    for (uint32_t i = 0; i < scope->size && named < NAMED_MAX; i++)
        if (!scope->ranks[i])
            length += (size_t)snprintf(names + length, sizeof names - length, "%s%u", named++ ? ", " : "", i);
    if (missing > named)
        snprintf(names + length, sizeof names - length, " and %u more", missing - named);
    return error_set(error, BHVD_ERR_TIMEOUT, "rank%s %s of %u did not arrive within %s (HOROVOD_START_TIMEOUT; scope %s)",
                     missing == 1 ? "" : "s", names, scope->size, rendezvous_duration(limit_ms).text, scope->name);
}

static struct scope *scope_find_or_create(struct scopes *all, const char *name, uint32_t size)
{
    for (struct scope *s = all->first; s; s = s->next)
        if (strcmp(s->name, name) == 0)
            return s;
    struct scope *s = calloc(1, sizeof *s + size * sizeof s->ranks[0]);
    if (s) {
        snprintf(s->name, sizeof s->name, "%s", name);
        s->all = all;
        s->size = size;
        s->next = all->first;
        all->first = s;
    }
    return s;
}

static bhvd_status scope_check(const struct scope *scope, const struct rendezvous_request *r, struct bhvd_error *error)
{
    if (r->size != scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "rank %u counts %u ranks in the job, others count %u (scope %s)",
                         r->rank, r->size, scope->size, scope->name);
    if (r->rank >= scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "a process says it is rank %u of %u; ranks are 0 to %u (scope %s)",
                         r->rank, r->size, r->size - 1, scope->name);
    if (scope->ranks[r->rank])
        return error_set(error, BHVD_ERR_MISMATCH, "two processes say they are rank %u of %u (scope %s): one that a rank starts "
                         "and that calls init() itself must not inherit HOROVOD_RANK and HOROVOD_SIZE", r->rank, r->size, scope->name);
    return BHVD_OK;
}

void scopes_join(struct scopes *all, struct guest *guest, const unsigned char *body)
{
    const struct rendezvous_request *r = &guest->request;
    char name[RENDEZVOUS_SCOPE_MAX + 1] = {0};
    memcpy(name, body, r->scope_size);
    guest->body = body;
    struct scope *scope = scope_find_or_create(all, name, r->size);
    struct bhvd_error error;
    if (!scope) {
        all->answer(guest, NULL);
    } else if (scope_check(scope, r, &error)) {
        struct reply *reply = reply_sentence(&error);
        all->answer(guest, reply);
        scope_answer(scope, reply);
    } else {
        guest->scope = scope;
        scope->ranks[r->rank] = guest;
        if (++scope->arrived == scope->size)
            scope_answer(scope, scope_all_blobs(scope));
    }
}

void scopes_leave(struct guest *guest)
{
    struct scope *scope = guest->scope;
    if (!scope)
        return;
    guest->scope = NULL;
    scope->ranks[guest->request.rank] = NULL;
    if (--scope->arrived == 0)
        scope_destroy(scope);
}

void scopes_give_up(struct guest *guest)
{
    struct bhvd_error error;
    scope_missing_ranks(guest->scope, guest->request.limit_ms, &error);
    scope_answer(guest->scope, reply_sentence(&error));
}

// Of the ranks that have ended and never came to the scope, the one that ended first: the others may have ended because of it.
static const struct ended_rank *first_missing(const struct scope *scope)
{
    const struct ended_rank *first = NULL;
    for (const struct ended_rank *ended = atomic_load(&scope->all->ended); ended; ended = ended->next)
        if (ended->rank < scope->size && !scope->ranks[ended->rank] && (!*ended->scope || strcmp(ended->scope, scope->name) == 0))
            first = ended;
    return first;
}

void scopes_answer_hopeless(struct scopes *all)
{
    for (struct scope *scope = all->first, *next; scope; scope = next) {
        next = scope->next;
        const struct ended_rank *missing = first_missing(scope);
        if (!missing)
            continue;
        struct bhvd_error error;
        error_set(&error, BHVD_ERR_PEER_LOST, "rank %u of %u has ended, with exit code %d, and did not come to init() "
                  "(scope %s)", missing->rank, scope->size, missing->exit_code, scope->name);
        scope_answer(scope, reply_sentence(&error));
    }
}

void scopes_rank_ended(struct scopes *all, const char *scope, int rank, int exit_code)
{
    struct ended_rank *ended = malloc(sizeof *ended);
    if (!ended)
        return;                     // they wait until their time is over, as without this
    ended->next = atomic_load(&all->ended);
    ended->rank = (uint32_t)rank;
    ended->exit_code = exit_code;
    snprintf(ended->scope, sizeof ended->scope, "%s", scope);
    while (!atomic_compare_exchange_weak(&all->ended, &ended->next, ended)) {
    }
}

void scopes_fini(struct scopes *all)
{
    for (struct ended_rank *ended = all->ended, *next; ended; ended = next) {
        next = ended->next;
        free(ended);
    }
}
