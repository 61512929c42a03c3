/* Checks before an allocation how much memory is available.
 *
 * A memory file takes pages from the host when they are first used; when no page is left, the kernel kills
 * some process. So a request that cannot fit must be refused in advance, with an error that names the sizes.
 */
#ifndef FSDPC_ROOM_H
#define FSDPC_ROOM_H

#include <stddef.h>
#include <stdint.h>

/* Returns the free bytes of the host or of this process's control group, whichever are fewer. */
uint64_t fsdpc_room_free(void);
/* Fails with FSDPC_E_NOMEM if less than `bytes` bytes are free; the error names `who` and both sizes. */
int fsdpc_room_check(size_t bytes, const char *who);

#endif
