/* The board: what this process waits for and did last in fsdpc, in a page that other processes read.
 *
 * The page is the beginning of a memfd named "fsdpc-board"; another process of the same user finds
 * that descriptor in /proc/PID/fd, so that a table of all ranks can be made even when a rank holds
 * the interpreter's lock or is stopped. Until fsdpc_board_open all functions are no-ops. A forked
 * child has no board until it opens its own. Writing takes some 50 ns and no system call.
 */
#ifndef FSDPC_BOARD_H
#define FSDPC_BOARD_H

#include <stdint.h>

enum { FSDPC_BOARD_TEXT_BYTES = 192, FSDPC_BOARD_PAGE_BYTES = 4096 };
#define FSDPC_BOARD_MAGIC UINT64_C(0x3164726163736466)

/* Opens this process's board, once. *fd belongs to the board and stays open. *signal_number is the
 * real-time signal chosen for asking this process where its Python is: one that nobody uses, from
 * now on ignored, so that a signal can never end the process; 0 if all are in use. Errors:
 * FSDPC_E_IO, FSDPC_E_NOMEM. */
int fsdpc_board_open(int *fd, int *signal_number);

/* Call these around a wait for other ranks that is more than a short spin. Waits nest and may be on several
 * threads: the first to begin is shown, until the last has ended. Texts may be NULL or "". */
void fsdpc_board_begin(const char *op, const char *unit, const char *phase);
void fsdpc_board_end(void);
/* Shows `op` on `unit` as this process's last operation, at `now_ns` (CLOCK_MONOTONIC). */
void fsdpc_board_operation(const char *op, const char *unit, const char *phase, int64_t now_ns);
/* Shows that this process's GPU has waited for `what` since `since_ns`; `what` NULL: it waits for nothing. */
void fsdpc_board_device(const char *what, int64_t since_ns);
/* When the wait that is shown began (CLOCK_MONOTONIC); 0 if there is none. */
int64_t fsdpc_board_since_ns(void);

#endif
