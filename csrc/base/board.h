/* The board: a page that shows other processes what this process waits for, and what it did last in fsdpc.
 *
 * The page is the beginning of a memfd named "fsdpc-board"; another process of the same user finds the
 * descriptor in /proc/PID/fd. So a table of all ranks can be made even if a rank does not release the
 * interpreter's lock or is stopped. Until fsdpc_board_open is called, all functions are no-ops. A forked
 * child has no board until it opens its own board. Writing takes about 50 ns and no system call.
 */
#ifndef FSDPC_BOARD_H
#define FSDPC_BOARD_H

#include <stdint.h>

enum { FSDPC_BOARD_TEXT_BYTES = 192, FSDPC_BOARD_PAGE_BYTES = 4096 };
#define FSDPC_BOARD_MAGIC UINT64_C(0x3164726163736466)

/* Opens this process's board on the first call. *fd belongs to the board and stays open. *signal_number is
 * the real-time signal by which another process asks for this process's Python stacks, or 0 if all signals
 * are in use. No other code uses this signal, and it is ignored from now on, so that it can never end the
 * process. Fails with FSDPC_E_IO or FSDPC_E_NOMEM. */
int fsdpc_board_open(int *fd, int *signal_number);

/* Call these around a wait for other ranks that is longer than a short spin. Waits may nest or run on several
 * threads: the board shows the first wait until all waits have ended. Texts may be NULL or "". */
void fsdpc_board_begin(const char *op, const char *unit, const char *phase);
void fsdpc_board_end(void);
/* Shows `op` on `unit` as this process's last operation, at the time `now_ns` (CLOCK_MONOTONIC). */
void fsdpc_board_operation(const char *op, const char *unit, const char *phase, int64_t now_ns);
/* Shows that this process's GPU has waited for `what` since `since_ns`; NULL: the GPU waits for nothing. */
void fsdpc_board_device(const char *what, int64_t since_ns);
/* Returns when the wait that the board shows began (CLOCK_MONOTONIC), or 0 if it shows no wait. */
int64_t fsdpc_board_since_ns(void);

#endif
