/* Used bits: which parameters got a gradient on some rank. Exchanges that learn this at the end of backward share
 * one array, a bit per parameter and unit in order.
 *
 * A unit whose sum was taken before the end (fsdpc_exchange_is_summed, `consumed` of its use) counts as used
 * whole there, because its own bits may have been cleared since, and keeps its bits.
 */
#ifndef FSDPC_EXCHANGE_USED_H
#define FSDPC_EXCHANGE_USED_H

#include "exchange/exchange_impl.h"

size_t fsdpc_used_count(const fsdpc_exchange *x);
/* This rank has used all of the unit's trainable parameters. */
bool fsdpc_used_all(const fsdpc_unit *unit);
void fsdpc_used_write(const fsdpc_exchange *x, uint8_t *bits);
void fsdpc_used_read(fsdpc_exchange *x, const uint8_t *bits);

#endif
