"""Blocking calls of another library, made so that Ctrl-C can interrupt the wait. The call runs in a
separate thread. The main thread, which alone runs Python's signal handlers, sleeps until the call
has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

PATIENCE_S = 5.0  # how long to wait for the end of a call that was told to end


class _Waiter:
    """A thread that makes one call at a time. Two locks signal a call's begin and end, in 20 us."""

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
        except BaseException:  # a signal handler may raise at any of these lines
            self._over = True
            _forget()  # the locks may be in any state, so the next call gets a new thread
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
    """Run ``call()``, and raise its exception if it raises one. If a signal handler raises
    meanwhile, run ``cut()`` and raise the handler's exception. ``cut`` must make ``call`` end soon.
    Other threads than the main thread run ``call`` directly, because they run no signal handlers.
    """
    global _waiter
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    if _waiter is None:
        _waiter = _Waiter()
    _waiter.run(call, cut)
