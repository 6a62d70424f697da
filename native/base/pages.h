// Pages of large memory.
#pragma once

#include <stddef.h>

enum { HUGE_PAGE = 2 << 20 };

// Asks for huge pages where this memory has no pages yet: 512 times fewer faults when it is written the first time. Where
// not one of them fits, or the system has none, nothing happens.
void pages_prefer_huge(void *data, size_t nbytes);
