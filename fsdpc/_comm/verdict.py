"""Ranks of one host that stand still: warnings in every rank's log, one verdict at the
deadline.

The ranks of a group keep one book, behind the first rank's board. The first rank that waits longer
than ``FSDPC_STALL`` seconds reads the status of all ranks and writes a table into the book; each
rank's thread logs that table. The first rank that reaches its deadline writes the verdict, under
the file's lock, and every later one repeats the verdict: a rank that has given up would otherwise
appear as the cause to the next one. The lock and the book need no process but those that use them,
so a stopped first rank is no obstacle.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fsdpc import _C
from fsdpc._comm import board
from fsdpc._comm.board import BOOK_BYTES, PAGE, Process
from fsdpc._comm.table import Row, causes, report

DEFAULT_STALL_S = 30.0
_LINE_S = 1.0  # patience for a Python line
_LOCK_S = 15.0  # for another rank that reads the status of all ranks
_EARLIEST_NEWS_S, _LATEST_NEWS_S, _LAST_POLL_S = 0.1, 5.0, 2.0
_HEAD = struct.Struct("<QQ")  # the number of changes; bytes of the text


def read_stall() -> float:
    """Seconds without progress before a warning: ``FSDPC_STALL``, infinite for 0. Local."""
    text = os.environ.get("FSDPC_STALL") or str(DEFAULT_STALL_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"FSDPC_STALL must be a number of seconds, or 0 for no warnings, but is {text!r}"
        )
    return seconds or math.inf


class Group:
    """The ranks of a group on one host. ``name`` is equal on all of them. ``numbers``: what
    warnings say of the ranks' numbers.

    ``OSError`` if the first rank's board cannot be opened (another user, or no procfs).
    """

    def __init__(
        self, name: str, rank: int, pids: Sequence[int], stall: float, *, numbers: str = ""
    ) -> None:
        self.name, self.rank, self.stall = name, rank, stall
        self._numbers = f" ({numbers})" if numbers else ""
        self.owner = os.getpid()
        self.members = [Process.find(pid) for pid in pids]
        descriptor = board.open_descriptor(pids[0])
        if descriptor is None:
            raise OSError(f"the board of process {pids[0]} cannot be opened")
        self._book = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._mutex = threading.Lock()  # the file's lock is one for all threads of a process
        self._changes = 0
        self._logged = 0.0
        self.text = ""  # of the last warning

    # --- warnings ---------------------------------------------------------------------------------

    def linger(self, waited: float) -> None:
        """This rank has waited so many seconds: make the table, unless this wait has one."""
        now = time.monotonic()
        with self._open() as book:
            warning = book.get("warning")
            count = 0
            if warning is not None and warning["at"] > now - waited:
                count = warning["count"] + 1
                if now < warning["at"] + self.stall * 2 ** warning["count"]:
                    return
            rows = self.rows()
            text = f"no progress for {waited:.0f} s{report(rows, causes(rows))}"
            book["warning"] = {"at": time.monotonic(), "count": count, "text": text}

    def news(self) -> None:
        """Log a table that a rank of the group has made since the last call."""
        changes, _ = _HEAD.unpack(os.pread(self._book, _HEAD.size, PAGE).ljust(_HEAD.size, b"\0"))
        if changes == self._changes:
            return
        self._changes = changes
        warning = self._read().get(self.name, {}).get("warning")
        if warning is not None and warning["at"] != self._logged:
            self._logged, self.text = warning["at"], warning["text"]
            who = f"rank {self.rank}{self._numbers}"
            logging.getLogger("fsdpc").warning("%s: %s", who, warning["text"])

    # --- the deadline -----------------------------------------------------------------------------

    def verdict(self, gives_up: bool, late: Sequence[int]) -> tuple[list[int], str] | None:
        """(the ranks that are the cause, the table), the same on all ranks that ask. Local."""
        if not gives_up:
            found = self._read().get(self.name, {}).get("verdict")
            return (found["causes"], found["text"]) if found else None
        with self._open() as book:
            if "verdict" not in book:
                rows = self.rows()
                guilty = causes(rows, late)
                book["verdict"] = {"causes": guilty, "text": report(rows, guilty)}
            return book["verdict"]["causes"], book["verdict"]["text"]

    def rows(self) -> list[Row]:
        return statuses(dict(enumerate(self.members)))

    # --- the book ---------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        """This group's entry; changes are written back. If the lock is not free after ``_LOCK_S``
        seconds, goes on without it: its holder may have been stopped.
        """
        mine = self._mutex.acquire(timeout=_LOCK_S)
        locked = self._lock()
        try:
            everything = self._read()
            entry = everything.setdefault(self.name, {})
            before = json.dumps(entry)
            yield entry
            if json.dumps(entry) != before:
                self._write(everything)
        finally:
            if locked:
                fcntl.flock(self._book, fcntl.LOCK_UN)
            if mine:
                self._mutex.release()

    def _lock(self) -> bool:
        until = time.monotonic() + _LOCK_S
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(self._book, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.01)
        return False

    def _read(self) -> dict[str, Any]:
        data = os.pread(self._book, BOOK_BYTES, PAGE)
        if len(data) < _HEAD.size:
            return {}
        _, size = _HEAD.unpack_from(data)
        try:
            return json.loads(data[_HEAD.size : _HEAD.size + size]) if size else {}
        except ValueError:  # written by a rank that has not waited for the lock
            return {}

    def _write(self, everything: dict[str, Any]) -> None:
        text = json.dumps(everything).encode()
        while len(text) > BOOK_BYTES - _HEAD.size and len(everything) > 1:
            everything.pop(next(name for name in everything if name != self.name))
            text = json.dumps(everything).encode()
        head = os.pread(self._book, _HEAD.size, PAGE).ljust(_HEAD.size, b"\0")
        os.pwrite(self._book, _HEAD.pack(_HEAD.unpack(head)[0] + 1, len(text)) + text, PAGE)


def statuses(members: Mapping[int, Process]) -> list[Row]:
    """The rows of these ranks, whose processes are all on this host. Up to 16 processes are read at
    a time, so that waits for them overlap. Local.
    """
    rows: dict[int, Row] = {}

    def one(rank: int) -> None:
        process = members[rank]
        here = process.pid == os.getpid()
        found = board.own_status() if here else board.status_of(process, _LINE_S)
        rows[rank] = Row(rank, process.pid, found)

    threads = [threading.Thread(target=one, args=[rank]) for rank in members]
    for at in range(0, len(threads), 16):
        for thread in threads[at : at + 16]:
            thread.start()
        for thread in threads[at : at + 16]:
            thread.join()
    return [rows[rank] for rank in members if rank in rows]


# --- all groups of this process -------------------------------------------------------------------

_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_pollers: weakref.WeakSet[Any] = weakref.WeakSet()
# By the name of a host's segment: the object whose tables of all hosts go into errors of its waits.
_segments: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_woken = threading.Event()
_thread_pid: int | None = None
_thread: threading.Thread | None = None
_ending = False
_pause = math.inf


def _own() -> list[Group]:
    """The groups of this process, without those that a forked child has from its parent."""
    return [group for group in list(_groups.values()) if group.owner == os.getpid()]


class _Reports:
    """What the waits over shared memory call to report stalls."""

    def linger(self, name: str) -> None:
        for group in _own():
            _linger(group)
            group.news()

    def verdict(self, name: str, gives_up: bool, late: list[int]) -> tuple[list[int], str] | None:
        group = _groups.get(name) or _segments.get(name)
        return None if group is None else group.verdict(gives_up, late)


def follow(group: Group) -> None:
    """Report stalls of a group for as long as it lives."""
    _groups[group.name] = group
    if group.stall < math.inf or group.name.startswith("fsdpc-"):
        _C.set_stalls(group.stall, _Reports())
    if group.stall < math.inf:
        _start_thread(pause_of(group.stall, _LATEST_NEWS_S))


def pause_of(stall: float, longest: float) -> float:
    """Seconds between checks for stalls that are reported after so many."""
    return min(longest, max(_EARLIEST_NEWS_S, stall / 6))


def follow_remote(poller: Any, pause: float) -> None:
    """Call ``poller.poll()`` each ``pause`` seconds and after ``wake``, while the poller lives."""
    _pollers.add(poller)
    _start_thread(pause)


def follow_segment(name: str, hosts: Any) -> None:
    """Errors of waits over this host's segment have ``hosts.verdict``, while ``hosts`` lives."""
    _segments[name] = hosts
    _C.set_stalls(read_stall(), _Reports())


def wake() -> None:
    """Have the thread check at once. Local."""
    _woken.set()


def waited() -> float:
    """Seconds for which this process has waited for other ranks, 0.0 if it does not wait."""
    descriptor, _ = _C.board_open()
    waits, since, _ = board.read_board(descriptor)
    return since if waits else 0.0


def _linger(group: Group) -> None:
    seconds = waited()
    if seconds >= group.stall:
        group.linger(seconds)


def _start_thread(pause: float) -> None:
    global _thread_pid, _pause, _thread
    with _lock:
        if _thread_pid != os.getpid() and not _ending:
            _thread_pid, _pause = os.getpid(), pause
            _thread = threading.Thread(target=_watch, name="fsdpc-stall", daemon=True)
            _thread.start()
        _pause = min(_pause, pause)


def end() -> None:
    """Ends the thread, before the interpreter does: a thread that then comes back from the store's
    C++ code would abort the process. A store that does not answer is waited for shortly. Local.
    """
    global _ending
    _ending = True
    wake()
    if _thread is not None and _thread_pid == os.getpid():
        _thread.join(_LAST_POLL_S)


def _watch() -> None:
    while True:
        _woken.wait(_pause)
        _woken.clear()
        if _ending:
            return
        with suppress(OSError):
            for group in _own():
                _linger(group)
                group.news()
        for poller in list(_pollers):
            poller.poll()
