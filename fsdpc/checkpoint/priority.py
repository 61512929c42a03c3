"""The priority of a thread that saves in the background."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_NICE = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # the number of the system call ioprio_set
_WHO_PROCESS = 1  # the id that follows is the id of a thread
_LOWEST = 2 << 13 | 7  # lowest priority of the best-effort class; the idle class may never run


def lower() -> None:
    """Lower the calling thread's priority for processors and disks. Threads that it starts inherit
    the priority. If the system refuses, the priority stays as it is, which does no harm. Local.
    """
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError:
        pass
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, _WHO_PROCESS, thread, _LOWEST)
