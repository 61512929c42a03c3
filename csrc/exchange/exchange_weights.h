/* What a rank knows of its own weights, and may read of another rank's. All in host memory; local. */
#ifndef FSDPC_EXCHANGE_WEIGHTS_H
#define FSDPC_EXCHANGE_WEIGHTS_H

#include <stdatomic.h>

#include "exchange/exchange_impl.h"

enum { FSDPC_KNOWN_WEIGHTS = 16 };
enum fsdpc_found { FSDPC_SAME, FSDPC_SOME, FSDPC_MOST };

/* Bytes of one rank's samples of all units. */
size_t fsdpc_weights_bytes(const fsdpc_exchange *x);
/* Compares a rank's values with its samples. `keep`: the values become the samples. */
enum fsdpc_found fsdpc_weights_compare(const fsdpc_exchange *x, int rank, _Atomic uint64_t *samples,
                                       bool keep);
/* A hash of samples of the rank's weights as they are now; never 0. */
uint64_t fsdpc_weights_hash(const fsdpc_exchange *x, int rank);
/* True if in most units rank `other` holds a part of a parameter of which rank `rank` has samples. */
bool fsdpc_weights_share(const fsdpc_exchange *x, int rank, int other);

/* [Note: numbers of weights] The last FSDPC_PASS_BITS bits of `last`: the number of a rank's weights. */
typedef struct fsdpc_numbers {
    uint64_t last, newest;
} fsdpc_numbers;
typedef struct fsdpc_pass {
    uint64_t tag;
    bool grad, touched; /* see fsdpc_exchange_compare */
} fsdpc_pass;
/* Before each pass that takes samples: updates this rank's number by what a comparison `found`. `known`:
 * hashes of the last FSDPC_KNOWN_WEIGHTS weights, each at its number modulo FSDPC_KNOWN_WEIGHTS; 0: none. */
void fsdpc_weights_number(const fsdpc_exchange *x, fsdpc_numbers *own, _Atomic uint64_t *known,
                          const fsdpc_pass *pass, enum fsdpc_found found);
/* True if `own`, of this rank, and `other`, of rank r, number the same changes since the same meeting. */
bool fsdpc_weights_alike(const fsdpc_exchange *x, int r, uint64_t own, uint64_t other);

#endif
