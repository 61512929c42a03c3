"""Folders of checkpoints, which are written under a temporary name, made durable, then renamed.

A save locks its temporary folder until the save ends. The locks tell a later save which leftover
folders no process uses any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsdpc import _C
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.held import Held

NEW, _OLD = ".new-", ".old-"
_LENGTH_BYTES = 8
_COPY_BYTES = 8 << 20
_SYNCS_AT_ONCE = 8
# A folder's name that has more bytes is cut before it becomes a part of a temporary name.
_LONGEST_NAME = 200
_HALF = "".join(map(chr, range(0xDC80, 0xDD00)))  # os.fsdecode of a cut character
OF_ONE_FILE = (errno.ENOENT, errno.EMLINK)  # errors after which other files may still be linked
_FULL = (errno.ENOSPC, errno.EDQUOT)
_removing: dict[Path, threading.Thread] = {}


class Draft:
    """A checkpoint folder that is being written; only one rank has this object. ``path`` is the
    temporary folder. A folder at ``target`` that is not empty is overwritten only if it has one of
    the files ``replaces``.
    """

    def __init__(
        self, target: Path, overwrite: bool, replaces: Sequence[str] = (_manifest.NAME,)
    ) -> None:
        self.target = target
        self.overwrite = overwrite
        if not overwrite and os.path.lexists(target):
            raise FileExistsError(
                f"{target} exists: choose another name, or overwrite=True, which replaces it once "
                "the new checkpoint is complete"
            )
        if overwrite and os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
            raise NotADirectoryError(f"{target} is not a folder, so it is not replaced")
        if overwrite and target.is_dir() and any(target.iterdir()):
            if not any((target / name).is_file() for name in replaces):
                raise FileExistsError(f"{target} is no checkpoint, so it is not replaced")
        target.parent.mkdir(parents=True, exist_ok=True)
        clean(target)
        self.path = target.parent / f"{NEW}{_short(target.name)}-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self._named = False
        self._lock = lock(self.path)

    def create(self, name: str, nbytes: int, header: bytes) -> None:
        """Create a file of ``nbytes`` bytes, allocate its space, and write the header except its
        first eight bytes. These bytes are the header's length; no reader accepts a length of zero.
        If the disk is full, wait until the folders that are being removed are gone. Raises
        ``OSError`` (ENOSPC) if there is not enough space.
        """
        fd = self._new(name)
        try:
            _allocate(fd, nbytes, self.path / name)
            _write(fd, header[_LENGTH_BYTES:], _LENGTH_BYTES)
        finally:
            os.close(fd)

    def link(self, name: str, source: Path) -> None:
        """Add the file ``source`` to the draft as a hard link. The file must not change later.
        Raises ``OSError`` if the file cannot be linked.
        """
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source, self.path / name, follow_symlinks=False)

    def copy(self, name: str, held: Held) -> None:
        """Copy a file into the draft; the copy is not durable yet. Raises ``OSError`` if the copy
        fails.
        """
        fd = self._new(name)
        try:
            _allocate(fd, held.size, self.path / name)
            for at in range(0, held.size, _COPY_BYTES):
                part = held.read(min(_COPY_BYTES, held.size - at), at, self.path / name)
                _write(fd, part, at)
        finally:
            os.close(fd)

    def write_length(self, name: str, header: bytes) -> None:
        """Write the first eight bytes of a file of which all other bytes are durable. The eight
        bytes are not durable yet.
        """
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write(fd, header[:_LENGTH_BYTES], 0)
        finally:
            os.close(fd)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file, which is not durable yet."""
        fd = self._new(name)
        try:
            _write(fd, content, 0)
        finally:
            os.close(fd)

    def _new(self, name: str) -> int:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def publish(self, written: Sequence[Path] = ()) -> None:
        """Make the files ``written`` and the folder durable, rename the folder to ``target``, and
        make the new name durable. A folder that was at ``target`` before is then removed by a
        thread, because freeing its space takes long. If this function raises ``OSError``, the
        folders have their old names. If the old names cannot be restored, both folders stay, and
        the text of the error says where they are.
        """
        sync([*written, *(Path(folder) for folder, _, _ in os.walk(self.path))])
        exchange = self.overwrite and os.path.lexists(self.target)
        _C.ckpt_rename(str(self.path), str(self.target), exchange=exchange)
        self._named = True
        try:
            sync([self.target.parent])
        except BaseException as error:
            self._give_back(exchange, error)
            raise
        if exchange:
            with suppress(OSError, RuntimeError):  # a later save removes what is left
                remove(self.path, self.target)
        self._unlock()

    def _give_back(self, exchange: bool, error: BaseException) -> None:
        source, target = (self.path, self.target) if exchange else (self.target, self.path)
        try:
            _C.ckpt_rename(str(source), str(target), exchange=exchange)
            self._named = False
        except OSError as second:
            before = f", what it was to replace is {self.path}" if exchange else ""
            raise OSError(
                f"{error}; {second}: the new checkpoint is {self.target}, perhaps not durable"
                f"{before}"
            ) from error

    def discard(self) -> None:
        """Remove the draft, unless it was published. Errors are ignored, because a later save
        removes what is left.
        """
        if not self._named:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            held, self._lock = self._lock, None
            with suppress(OSError):
                os.close(held)


def _short(name: str) -> str:
    """Return the name, cut if it is long, because a temporary folder's name adds characters."""
    raw = os.fsencode(name)
    if len(raw) <= _LONGEST_NAME:
        return name
    return f"{os.fsdecode(raw[:_LONGEST_NAME]).rstrip(_HALF)}~{_C.ckpt_crc32c(raw):08x}"


def write_durably(path: Path, content: bytes) -> None:
    """Create or replace a small file and make its bytes durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a small file atomically, so that readers see either the old or the new file. After an
    ``OSError`` the file is still either the old or the new one, and no temporary file is left.
    """
    clean(path)
    draft = path.with_name(f"{NEW}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_durably(draft, content)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync([path.parent])


def sync(paths: Sequence[Path]) -> None:
    """Make files, and the names in folders, durable. They are synced at the same time, so that a
    file system with a journal writes its journal once for all of them.
    """
    if len(paths) == 1:
        _sync_one(paths[0])
    elif paths:
        with ThreadPoolExecutor(min(_SYNCS_AT_ONCE, len(paths))) as pool:
            list(pool.map(_sync_one, paths))


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: making {path} durable") from error
    finally:
        os.close(fd)


def remove(path: Path, target: Path | None = None) -> None:
    """Remove a folder. The folder is renamed first, so that a partly removed folder is not taken
    for a checkpoint. A thread then deletes the folder. A later save removes what is left. If
    ``path`` is a temporary folder, ``target`` is the path of its checkpoint; a temporary folder is
    removed even if it cannot be renamed.
    """
    name = _short((target or path).name)
    trash = path.parent / f"{_OLD}{name}-{uuid.uuid4().hex[:8]}"
    try:
        os.rename(path, trash)
    except OSError:
        if target is None:
            raise
        trash = path
    # The thread is not a daemon, so the interpreter waits for the thread at exit.
    thread = threading.Thread(target=shutil.rmtree, args=(trash, True), name=f"removing {path}")
    for gone in [path for path, thread in _removing.items() if not thread.is_alive()]:
        del _removing[gone]
    _removing[trash] = thread
    thread.start()


def finish_removing() -> bool:
    """Wait until the folders that are being removed are gone and their space is free. Returns False
    if no folder was being removed. Local.
    """
    threads = list(_removing.values())
    _removing.clear()
    for thread in threads:
        thread.join()
    return bool(threads)


def leftovers(target: Path) -> Iterator[Path]:
    """Yield the temporary folders and files of saves of ``target`` that no process uses now."""
    name = _short(target.name)
    names = (f"{NEW}{name}-", f"{_OLD}{name}-", f"{_OLD}{NEW}{name}-")
    for path in sorted(target.parent.iterdir()):
        removed = path in _removing and _removing[path].is_alive()
        if path.name.startswith(names) and not path.is_symlink() and not removed:
            free = lock(path)
            if free is not None:
                os.close(free)
                yield path


def clean(target: Path) -> None:
    """Remove the temporary folders and files that ``leftovers(target)`` yields."""
    for path in leftovers(target):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def has_links(path: Path, target: Path) -> bool:
    """Return whether hard links work beside ``target``. The link that tests this has a name that
    ``clean`` removes.
    """
    trial = target.parent / f"{NEW}{_short(target.name)}-{uuid.uuid4().hex[:8]}"
    try:
        os.link(path, trial, follow_symlinks=False)
        trial.unlink()
    except OSError as error:
        return error.errno in OF_ONE_FILE
    return True


def lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of ``path``, or ``None`` if another process has the
    lock, if locks do not work, or if ``path`` does not exist.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _allocate(fd: int, nbytes: int, path: Path) -> None:
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in _FULL and finish_removing():
            return _allocate(fd, nbytes, path)
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise OSError(error.errno, f"{error.strerror}: {nbytes} bytes for {path}") from error
        os.ftruncate(fd, nbytes)


def _write(fd: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        try:
            put = os.pwrite(fd, view, offset)
        except OSError as error:
            if error.errno in _FULL and finish_removing():
                continue
            raise
        view, offset = view[put:], offset + put
