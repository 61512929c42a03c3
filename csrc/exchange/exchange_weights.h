/* Functions that compare the weights of this or another rank, in host memory, with samples. Local. */
#ifndef FSDPC_EXCHANGE_WEIGHTS_H
#define FSDPC_EXCHANGE_WEIGHTS_H

#include <stdatomic.h>

#include "exchange/exchange_impl.h"

enum { FSDPC_KNOWN_WEIGHTS = 16 };
enum fsdpc_found { FSDPC_SAME, FSDPC_SOME, FSDPC_MOST };

/* Returns the size in bytes of one rank's samples of all units. */
size_t fsdpc_weights_bytes(const fsdpc_exchange *x);
/* Compares a rank's values with its samples. `keep`: the values become the new samples. */
enum fsdpc_found fsdpc_weights_compare(const fsdpc_exchange *x, int rank, _Atomic uint64_t *samples,
                                       bool keep);
/* Returns a hash of samples of the rank's present weights. The hash is never 0. */
uint64_t fsdpc_weights_hash(const fsdpc_exchange *x, int rank);
/* True if, in most units, rank `other` holds elements of a parameter that rank `rank` takes samples of. */
bool fsdpc_weights_share(const fsdpc_exchange *x, int rank, int other);

/* [Note: numbers of weights] The low FSDPC_PASS_BITS bits of `last` hold the number of the version of a
 * rank's weights. The other bits come from the tag of a pass, and tell when all ranks last met. `newest`: the
 * highest number given since then. */
typedef struct fsdpc_numbers {
    uint64_t last, newest;
} fsdpc_numbers;
typedef struct fsdpc_pass {
    uint64_t tag;
    bool grad, touched; /* see fsdpc_exchange_compare */
} fsdpc_pass;
/* Updates the number of this rank's weights from `found`, the result of fsdpc_weights_compare. Call it before
 * each pass that takes samples. `known`: hashes of the last FSDPC_KNOWN_WEIGHTS weights, each at its number
 * modulo FSDPC_KNOWN_WEIGHTS; 0: none. */
void fsdpc_weights_number(const fsdpc_exchange *x, fsdpc_numbers *own, _Atomic uint64_t *known,
                          const fsdpc_pass *pass, enum fsdpc_found found);
/* True if the numbers `own` (of this rank's weights) and `other` (of rank r's) are both known, were given
 * since the same meeting of all ranks, and are comparable. */
bool fsdpc_weights_alike(const fsdpc_exchange *x, int r, uint64_t own, uint64_t other);

#endif
