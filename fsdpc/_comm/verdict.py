"""Reports of stalled ranks on one host: warnings in every rank's log, and one verdict at the
deadline.

The ranks of a group share one book. It lies in the first rank's board, a file in memory that other
processes can open (board.py), behind the board's first page. The first rank that waits longer than
``FSDPC_STALL`` seconds reads the status of all ranks and writes a table into the book; a thread of
each rank logs that table. The first rank that reaches its deadline writes the verdict into the book
while it holds a lock on the board's file. Ranks whose deadline comes later repeat this verdict:
otherwise a rank that has given up would appear to them as the cause. Ranks can use the lock and the
book even while the first rank is stopped.
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
_LINE_S = 1.0  # how long to wait until another process has reported at which Python line it is
_LOCK_S = 15.0  # how long to wait for the book's lock, while another rank reads all ranks' status
_EARLIEST_NEWS_S, _LATEST_NEWS_S, _LAST_POLL_S = 0.1, 5.0, 2.0
_HEAD = struct.Struct("<QQ")  # how often the book was changed, and the bytes of the book's text


def read_stall() -> float:
    """Return ``FSDPC_STALL``, the seconds without progress before a warning, or inf if it is 0.

    Local.
    """
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
    """The ranks of a group on one host. ``name`` is equal on all ranks. ``numbers`` is a note for
    warnings that says how the group numbers its ranks (see ``numbers_of`` in channel.py).

    ``OSError``: the first rank's board cannot be opened, because the rank belongs to another user
    or there is no procfs.
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
        # The file's lock excludes other processes, but not other threads of this process.
        self._mutex = threading.Lock()
        self._changes = 0
        self._logged = 0.0
        self.text = ""  # the text of the last warning

    # --- warnings ---------------------------------------------------------------------------------

    def linger(self, waited: float) -> None:
        """Make a table for a wait of ``waited`` seconds, unless a recent table shows this wait."""
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
        """Log the table that a rank of the group has made since the last call, if any."""
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
        """Return (the ranks that are the cause, the table), the same on all ranks that give up.

        A rank that does not give up gets None if no other rank has given up. Local.
        """
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
        """Lock the book, yield this group's entry, and write the entry back if it was changed.

        If the lock is not free after ``_LOCK_S`` seconds, go on without it, because the process
        that holds it may be stopped.
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
        except ValueError:  # another rank has written during the read, without the lock
            return {}

    def _write(self, everything: dict[str, Any]) -> None:
        text = json.dumps(everything).encode()
        while len(text) > BOOK_BYTES - _HEAD.size and len(everything) > 1:
            everything.pop(next(name for name in everything if name != self.name))
            text = json.dumps(everything).encode()
        head = os.pread(self._book, _HEAD.size, PAGE).ljust(_HEAD.size, b"\0")
        os.pwrite(self._book, _HEAD.pack(_HEAD.unpack(head)[0] + 1, len(text)) + text, PAGE)


def statuses(members: Mapping[int, Process]) -> list[Row]:
    """Return a row of the table for each rank in ``members``. All processes are on this host. The
    status of up to 16 processes is read at a time, so that the waits for them overlap. Local.
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
# Maps the name of a host's shared-memory segment to an object with a method ``verdict``. If a wait
# in this segment fails, the table that ``verdict`` returns is added to the error.
_segments: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_woken = threading.Event()
_thread_pid: int | None = None
_thread: threading.Thread | None = None
_ending = False
_pause = math.inf


def _own() -> list[Group]:
    """Return the groups of this process; a forked child has none of its parent's groups."""
    return [group for group in list(_groups.values()) if group.owner == os.getpid()]


class _Reports:
    """The callbacks by which waits over shared memory report stalls."""

    def linger(self, name: str) -> None:
        for group in _own():
            _linger(group)
            group.news()

    def verdict(self, name: str, gives_up: bool, late: list[int]) -> tuple[list[int], str] | None:
        group = _groups.get(name) or _segments.get(name)
        return None if group is None else group.verdict(gives_up, late)


def follow(group: Group) -> None:
    """Report stalls of a group for as long as ``group`` exists."""
    _groups[group.name] = group
    if group.stall < math.inf or group.name.startswith("fsdpc-"):
        _C.set_stalls(group.stall, _Reports())
    if group.stall < math.inf:
        _start_thread(pause_of(group.stall, _LATEST_NEWS_S))


def pause_of(stall: float, longest: float) -> float:
    """Return the seconds between checks for stalls that are reported after ``stall`` seconds."""
    return min(longest, max(_EARLIEST_NEWS_S, stall / 6))


def follow_remote(poller: Any, pause: float) -> None:
    """Call ``poller.poll()`` every ``pause`` seconds and after each call of ``wake``. The calls end
    when ``poller`` is deleted.
    """
    _pollers.add(poller)
    _start_thread(pause)


def follow_segment(name: str, hosts: Any) -> None:
    """Until ``hosts`` is deleted, ask ``hosts.verdict`` for a table when a wait in shared-memory
    segment ``name`` fails. The wait's error gets this table.
    """
    _segments[name] = hosts
    _C.set_stalls(read_stall(), _Reports())


def wake() -> None:
    """Let the watching thread check for stalls at once. Local."""
    _woken.set()


def waited() -> float:
    """Return how many seconds this process has been waiting for other ranks; 0.0 if it does not."""
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
    """End the watching thread before the interpreter ends. Otherwise the thread could return from
    the store's C++ code later, which would abort the process. If the store does not answer, wait
    for the thread for ``_LAST_POLL_S`` seconds only. Local.
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
