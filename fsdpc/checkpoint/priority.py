"""The priority of a thread that saves in the background."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_NICE = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # the number of the system call
_WHO_PROCESS = 1  # with a thread's id: that thread
_LOWEST = 2 << 13 | 7  # best effort: not the idle class, which may never get its turn


def lower() -> None:
    """Lower the calling thread's priority for processors and disks; threads that it starts have it,
    too. Where the system refuses, the priority stays: priorities change no result. Local.
    """
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError:
        pass
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, _WHO_PROCESS, thread, _LOWEST)
