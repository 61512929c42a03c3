"""The state of each process of this host: what it does in fsdpc, and at which line of Python.

Each process has a board: a memfd whose first page says what the process waits for
(csrc/base/board.h). Another process of the same user can read the board through ``/proc/PID/fd``,
even while the board's owner is stopped or holds the interpreter's lock in C code. To get the Python
line, the reader sends the owner a real-time signal. faulthandler, which handles the signal in the
owner, writes the main thread's frames to the end of the board without taking a lock.

The signal is the first one from SIGRTMIN+11 on that has no handler. The signal never ends a
process: the owner ignores it until faulthandler's handler is installed, and a sender first reads
in ``/proc`` whether there is a handler. System calls that the signal interrupts are restarted, but
a sleep in C code may end early.
"""

from __future__ import annotations

import faulthandler
import os
import re
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from fsdpc import _C

# The sizes of the board's first page and of the book, which is the memory behind that page in which
# the ranks of a group note what they found out about a stall (verdict.py).
PAGE, BOOK_BYTES = 4096, 65536
FRAMES_AT = PAGE + BOOK_BYTES
TEXT = 192
_MAGIC = 0x3164726163736466
_LINE = struct.Struct(f"<q{TEXT}s")
_HEAD = struct.Struct("<Qi4x")
_FRAME = re.compile(r'^  File "(?P<file>[^\n]*)", line (?P<line>\d+) in (?P<name>[^\n]*)\n', re.M)
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), torch.__file__)
)
_STANDARD = (os.path.dirname(os.path.abspath(os.__file__)) + os.sep, "<frozen")
SAMPLE_S = 0.25  # seconds over which a process's CPU time is measured

_opened_by: int | None = None


def open_board() -> None:
    """Open this process's board and install the signal's handler; later calls do nothing. Local."""
    global _opened_by
    if _opened_by == os.getpid():
        return
    descriptor, number = _C.board_open()
    os.lseek(descriptor, FRAMES_AT, os.SEEK_SET)
    if number:
        faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
    _opened_by = os.getpid()


@dataclass(frozen=True)
class Process:
    """A process. The start time distinguishes it from later processes with the same number."""

    pid: int
    started: int  # in clock ticks after boot; 0: the process is not on this host or has ended

    @staticmethod
    def find(pid: int) -> Process:
        stat = _stat(pid)
        return Process(pid, int(stat[19]) if stat else 0)


@dataclass(frozen=True)
class Status:
    """What a process is doing. ``state``: "runs", "sleeps", "stopped", "dead", "in the kernel"."""

    state: str
    waits: str = ""  # what the process waits for in fsdpc, "" if it does not wait there
    since: float = 0.0  # seconds since the wait began; without a wait, since the last operation
    last_operation: str = ""  # what the process did last in fsdpc
    line: str = ""  # the line that the user's Python code is at: "train.py:41 in step"

    @property
    def gone(self) -> bool:
        return self.state in ("stopped", "dead")


def status_of(process: Process, patience: float) -> Status:
    """Return what another process of this host is doing. Local.

    The call waits for the Python line for at most ``patience`` seconds.
    """
    before = _stat(process.pid)
    if before is None or int(before[19]) != process.started or before[0] in "ZX":
        return Status("dead")
    board = open_descriptor(process.pid)
    if board is None:
        return Status(_state(before, before, 0.0))
    try:
        words = read_board(board)
        if before[0] in "Tt":
            return Status("stopped", *words)
        begun = time.monotonic()
        line = _request_line(process.pid, board, patience)
        time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - begun)))
        after = _stat(process.pid)
        if after is None:
            return Status("dead", *words)
        return Status(_state(before, after, time.monotonic() - begun), *words, line)
    finally:
        os.close(board)


def own_status() -> Status:
    """Return what this process is doing; ``line`` is the line that its main thread is at."""
    descriptor, _ = _C.board_open()
    words = read_board(descriptor)
    return Status("runs", *words, own_line())


def own_line() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return users_line(frames)


# --- reading --------------------------------------------------------------------------------------


def read_board(descriptor: int) -> tuple[str, float, str]:
    """Return the fields ``waits``, ``since`` and ``last_operation`` of a board's ``Status``."""
    page = os.pread(descriptor, PAGE, 0)
    if len(page) < PAGE or _HEAD.unpack_from(page)[0] != _MAGIC:
        return "", 0.0, ""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    lines = [_LINE.unpack_from(page, _HEAD.size + i * _LINE.size) for i in range(3)]
    (waited, wait), (acted, last), (synced, device) = (
        (at, text.partition(b"\0")[0].decode(errors="replace")) for at, text in lines
    )
    if waited or synced:
        return wait if waited else device, (now - (waited or synced)) / 1e9, last
    return "", (now - acted) / 1e9 if acted else 0.0, last


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the process's state on; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _state(before: list[str], after: list[str], seconds: float) -> str:
    if after[0] in "ZX":
        return "dead"
    if after[0] in "Tt":
        return "stopped"
    if after[0] == "D":
        return "in the kernel"
    used = sum(int(n) for n in after[11:13]) - sum(int(n) for n in before[11:13])
    busy = used / os.sysconf("SC_CLK_TCK") > 0.1 * seconds > 0
    return "runs" if busy or after[0] == "R" else "sleeps"


def open_descriptor(pid: int) -> int | None:
    """Open the board of another process for reading and writing; the caller closes the descriptor.

    None if the process has ended, has no board, or belongs to another user.
    """
    with suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith("/memfd:fsdpc-board"):
                    return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
    return None


# --- the Python line ------------------------------------------------------------------------------


def _request_line(pid: int, board: int, patience: float) -> str:
    number = _HEAD.unpack(os.pread(board, _HEAD.size, 0))[1]
    begin = max(FRAMES_AT, os.fstat(board).st_size)
    if not number or not _handles(pid, number):
        return ""
    try:
        os.kill(pid, number)
    except OSError:
        return ""
    until, text = time.monotonic() + patience, ""
    while time.monotonic() < until:
        time.sleep(0.01)
        more = os.pread(board, 1 << 16, begin).decode(errors="replace")
        if more and more == text:  # nothing was added since the last read
            break
        text = more
    found = _FRAME.findall(text)
    return users_line([(file, int(line), name) for file, line, name in found])


def _handles(pid: int, number: int) -> bool:
    """Whether the process handles the signal and does not block it.

    A process without a handler might be ended by the signal.
    """
    masks = {}
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        masks = dict(line.split(":", 1) for line in file)
    caught = int(masks.get("SigCgt", "0"), 16) >> (number - 1) & 1
    return bool(caught) and not int(masks.get("SigBlk", "0"), 16) >> (number - 1) & 1


def users_line(frames: list[tuple[str, int, str]]) -> str:
    """Return the innermost frame outside fsdpc, torch and Python's library: "train.py:41 in step".

    If there is no such frame, return the innermost one outside fsdpc and torch, else "".
    """
    for skipped in (_is_library, _is_ours_or_torch):
        for file, line, name in frames:
            if not skipped(file):
                return f"{os.path.basename(file)}:{line} in {name}"
    return ""


def _is_ours_or_torch(file: str) -> bool:
    return file.startswith(_LIBRARIES)


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python's library, torch or fsdpc.

    Other installed packages are not counted as libraries, because one may be the user's trainer.
    """
    standard = file.startswith(_STANDARD) and f"{os.sep}site-packages{os.sep}" not in file
    return standard or _is_ours_or_torch(file)
