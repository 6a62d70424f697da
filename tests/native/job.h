// A job of a few ranks, each a thread of the test program with its own context, on any transport.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bagua_hvd.h"
#include "check.h"
#include "gather.h"
#include "post.h"

#ifndef RANKS
#define RANKS 3
#endif

struct job {
    const char *transport, *path;
    const char *hosts;              // one letter for each rank; NULL: all on this one
    void *world;
    struct gathering gathering;
    void (*body)(struct job *job, int rank, bhvd_context *ctx);
    void (*adjust)(int rank, struct bhvd_context_options *options);     // changes the options; may be NULL
    int subject;                    // a rank with a special role in body
    bhvd_kind kind;                 // of the operations, for bodies that post any kind
    _Atomic int ready;              // counted by body
};

struct rank_thread {
    struct job *job;
    int rank;
    pthread_t thread;
};

static void *run_rank(void *arg)
{
    struct rank_thread *r = arg;
    char host[64];
    snprintf(host, sizeof host, "%d.%c", getpid(), r->job->hosts ? r->job->hosts[r->rank] : 'A');
    struct bhvd_context_options options = {
        .rank = r->rank, .size = RANKS, .transport = r->job->transport, .gather = gather,
        .user = &(struct gatherer){&r->job->gathering, r->rank, RANKS}, .listen_host = "127.0.0.1", .host_id = host,
        .inproc_world = r->job->world, .fusion_threshold = 1 << 20, .cache_capacity = 16, .start_timeout_ms = 60000,
        .timeout_ms = 60000, .stall_warning_ms = 60000, .allreduce_path = r->job->path,
    };
    if (r->job->adjust)
        r->job->adjust(r->rank, &options);
    struct bhvd_error error;
    bhvd_context *ctx;
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    r->job->body(r->job, r->rank, ctx);
    bhvd_context_destroy(ctx);
    return NULL;
}

// Runs a job; transport and body must be set, other fields may be 0.
static void run_this_job(struct job *job)
{
    if (strcmp(job->transport, "inproc") == 0)
        job->world = bhvd_inproc_world_create(RANKS);
    struct rank_thread ranks[RANKS];
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (struct rank_thread){.job = job, .rank = i};
        pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
    if (job->world)
        bhvd_inproc_world_destroy(job->world);
}

__attribute__((unused))
static void run_job(const char *transport, const char *path, const char *hosts,
                    void (*body)(struct job *, int, bhvd_context *))
{
    struct job job = {.transport = transport, .path = path, .hosts = hosts, .body = body};
    run_this_job(&job);
}

static const struct {
    const char *transport, *path, *hosts;
} PATHS[] = {
    {"inproc", "", NULL}, {"inproc", "ring", NULL}, {"shm", "", NULL}, {"tcp", "", NULL}, {"auto", "", "AAB"},
    {"auto", "ring", "ABA"},
};

// Runs `body` on every rank, on every path: over links of each transport, through shared memory if available, and through both
// on several hosts.
__attribute__((unused))
static void on_every_path(void (*body)(struct job *, int, bhvd_context *))
{
    for (size_t i = 0; i < sizeof PATHS / sizeof PATHS[0]; i++)
        run_job(PATHS[i].transport, PATHS[i].path, PATHS[i].hosts, body);
}
