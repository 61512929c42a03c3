/* What a rank knows of its own weights, and may read of another rank's. Memory of the processor; local. */
#ifndef FSDPC_EXCHANGE_WEIGHTS_H
#define FSDPC_EXCHANGE_WEIGHTS_H

#include <stdatomic.h>

#include "exchange/exchange_impl.h"

enum { FSDPC_KNOWN_WEIGHTS = 16 };
enum fsdpc_found { FSDPC_SAME, FSDPC_SOME, FSDPC_MOST };

/* Of one rank's samples of all units. */
size_t fsdpc_weights_bytes(const fsdpc_exchange *x);
/* A rank's values with its samples: what has changed, in most units or in some. `keep`: the values become the samples. */
enum fsdpc_found fsdpc_weights_compare(const fsdpc_exchange *x, int rank, _Atomic uint64_t *samples,
                                       bool keep);
/* Of the samples of what the rank's weights are now; never 0. */
uint64_t fsdpc_weights_hash(const fsdpc_exchange *x, int rank);
/* In most units the rank `other` holds a part of a parameter that is sampled of `rank`. */
bool fsdpc_weights_share(const fsdpc_exchange *x, int rank, int other);

/* [Note: numbers of weights] `last`: a tag whose last FSDPC_PASS_BITS bits are the number of this rank's weights. */
typedef struct fsdpc_numbers {
    uint64_t last, newest;
} fsdpc_numbers;
typedef struct fsdpc_pass {
    uint64_t tag;
    bool grad, touched; /* as fsdpc_exchange_compare */
} fsdpc_pass;
/* Called before each pass that takes samples, with what their comparison has found: updates this rank's number. `known`: the
 * hashes of the last FSDPC_KNOWN_WEIGHTS weights, each at its number modulo that; 0: none. */
void fsdpc_weights_number(const fsdpc_exchange *x, fsdpc_numbers *own, _Atomic uint64_t *known,
                          const fsdpc_pass *pass, enum fsdpc_found found);
/* This rank's numbers and those of rank r count the same changes since the same meeting. */
bool fsdpc_weights_alike(const fsdpc_exchange *x, int r, uint64_t own, uint64_t other);

#endif
