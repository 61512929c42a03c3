/* Used bits: which parameters got a gradient on some rank. Kinds "wire" and "stream" learn this at the end of
 * backward, from one array of all ranks' bits: unit after unit, one entry per parameter.
 *
 * A unit whose sum was taken before the end (fsdpc_exchange_is_summed, `consumed` of its use) counts as all
 * used in that array, because its own bits may have been cleared since. Reading leaves its bits alone.
 */
#ifndef FSDPC_EXCHANGE_USED_H
#define FSDPC_EXCHANGE_USED_H

#include "exchange/exchange_impl.h"

size_t fsdpc_used_count(const fsdpc_exchange *x);
/* True if this rank has used all of the unit's trainable parameters. */
bool fsdpc_used_all(const fsdpc_unit *unit);
void fsdpc_used_write(const fsdpc_exchange *x, uint8_t *bits);
void fsdpc_used_read(fsdpc_exchange *x, const uint8_t *bits);

#endif
