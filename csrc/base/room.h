/* How much memory is available, checked before an allocation.
 *
 * Pages of a memory file are taken from the host until there are none, and then the kernel kills some
 * process. So a request that cannot fit must be refused before, with the numbers.
 */
#ifndef FSDPC_ROOM_H
#define FSDPC_ROOM_H

#include <stddef.h>
#include <stdint.h>

/* The bytes free on the host, or under the limit of this process's control group if those are fewer. */
uint64_t fsdpc_room_free(void);
/* FSDPC_E_NOMEM naming `who`, the bytes wanted and the bytes free, when they do not fit. */
int fsdpc_room_check(size_t bytes, const char *who);

#endif
