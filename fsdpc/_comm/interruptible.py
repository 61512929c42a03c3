"""Waits of another library that Ctrl-C ends: the library waits in a thread, and the main thread,
the only one that runs Python's signal handlers, sleeps until that is over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

PATIENCE_S = 5.0  # for the end of a wait that was cut short


class _Waiter:
    """A thread that makes one call at a time. Two locks hand a call over and back, in 20 us."""

    def __init__(self) -> None:
        self._begin, self._end = threading.Lock(), threading.Lock()
        self._begin.acquire()
        self._end.acquire()
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._over = False
        threading.Thread(target=self._loop, name="fsdpc-wait", daemon=True).start()

    def _loop(self) -> None:
        while not self._over:
            self._begin.acquire()
            try:
                assert self._call is not None
                self._call()
            except BaseException as error:
                self._error = error
            self._call = None
            self._end.release()

    def run(self, call: Callable[[], None], cut: Callable[[], None]) -> None:
        try:
            self._error, self._call = None, call
            self._begin.release()
            self._end.acquire()
        except BaseException:  # what a signal handler raised, at any of these lines
            self._over = True
            _forget()  # the locks may be in any state: the next wait gets a thread of its own
            cut()
            if self._call is not None:
                self._end.acquire(timeout=PATIENCE_S)
            raise
        if self._error is not None:
            raise self._error


_waiter: _Waiter | None = None


def _forget() -> None:
    global _waiter
    _waiter = None


os.register_at_fork(after_in_child=_forget)


def run(call: Callable[[], None], cut: Callable[[], None]) -> None:
    """Return or raise as ``call()`` does; what a signal handler raises meanwhile comes at once,
    after ``cut()``, which makes ``call`` end soon. Threads that run no handlers call it directly.
    """
    global _waiter
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    if _waiter is None:
        _waiter = _Waiter()
    _waiter.run(call, cut)
