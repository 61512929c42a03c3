/* Used bits: which parameters got a gradient on some rank. The kinds "wire" and "stream" learn this at the
 * end of backward, from one array of all ranks' bits: unit after unit, one entry per parameter.
 *
 * If a unit's sum was taken before the end (fsdpc_exchange_is_summed; `consumed` of its use), the unit's own
 * bits may be cleared by then. So the array says that all trainable parameters of the unit are used, and
 * reading the array leaves the unit's own bits as they are. */
#ifndef FSDPC_EXCHANGE_USED_H
#define FSDPC_EXCHANGE_USED_H

#include "exchange/exchange_impl.h"

size_t fsdpc_used_count(const fsdpc_exchange *x);
/* True if this rank has used all of the unit's trainable parameters. */
bool fsdpc_used_all(const fsdpc_unit *unit);
void fsdpc_used_write(const fsdpc_exchange *x, uint8_t *bits);
void fsdpc_used_read(fsdpc_exchange *x, const uint8_t *bits);

#endif
