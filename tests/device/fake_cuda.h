/* What fake_nccl.c needs of the fake driver. */
#pragma once

/* Calls fn(arg) in the order of the stream, on its thread. */
void fake_cuda_call(void *stream, void (*fn)(void *), void *arg);
/* Where the host may touch what a device's address means. */
void *fake_cuda_visible(const void *p);
/* Waits for all that the GPU of the current context was given. */
void fake_cuda_wait_for_device(void);
/* Whether this thread has a current context. */
int fake_cuda_is_current(void);
