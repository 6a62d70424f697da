// Who waits for many operations is told of each that ends: a list, into which operation_end puts numbers.
#ifndef BHVD_COMPLETIONS_H
#define BHVD_COMPLETIONS_H

#include "bagua_hvd.h"

struct completion;

// To be called when the operation's state says that it ended: puts it into its list, if it has one. Thread-safe.
void completions_operation_ended(bhvd_handle *operation);

#endif
