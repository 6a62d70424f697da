/* The functions of the fake driver that fake_nccl.c uses. */
#pragma once

/* Calls fn(arg) in the order of the stream, on its thread. */
void fake_cuda_call(void *stream, void (*fn)(void *), void *arg);
/* The host address of device memory. */
void *fake_cuda_visible(const void *p);
/* Waits for all work of the current context's GPU. */
void fake_cuda_wait_for_device(void);
/* Whether this thread has a current context. */
int fake_cuda_is_current(void);
