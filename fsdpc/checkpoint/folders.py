"""The folders of checkpoints: written under a temporary name, made durable, renamed as a whole.

A save holds a lock on its temporary folder as long as it lives, so that a later one knows which
leftovers belong to nobody.
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
from pathlib import Path

from fsdpc import _C
from fsdpc.checkpoint import manifest as _manifest

_NEW, _OLD = ".new-", ".old-"
_LENGTH_BYTES = 8
_SYNCS_AT_ONCE = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)
_removing: dict[Path, threading.Thread] = {}


class Draft:
    """A checkpoint that is being written; one rank has it. ``path``: its temporary folder.
    ``replaces``: files, one of which a folder must hold to be overwritten.
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
        self.path = target.parent / f"{_NEW}{target.name}-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self._lock = _lock(self.path)

    def create(self, name: str, nbytes: int, header: bytes) -> None:
        """A file of a size, its space taken now, with its header but for the first eight bytes,
        which no reader takes for a length while they are zero. A full disk waits until what was
        removed is gone. ``OSError`` (ENOSPC): too little space.
        """
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _allocate(fd, nbytes, path)
            _write(fd, header[_LENGTH_BYTES:], _LENGTH_BYTES)
        finally:
            os.close(fd)

    def write_length(self, name: str, header: bytes) -> None:
        """The first eight bytes of a file, whose other bytes are durable. Not durable itself."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write(fd, header[:_LENGTH_BYTES], 0)
        finally:
            os.close(fd)

    def write_file(self, name: str, content: bytes) -> None:
        """A small file, not durable yet."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(fd, content, 0)
        finally:
            os.close(fd)

    def publish(self, written: Sequence[Path] = ()) -> None:
        """Make files and the folder durable, then give the folder its name, durably. What had the
        name before is removed afterwards, by a thread: to free its space takes as long as to write
        a part of it.
        """
        sync([*written, *(Path(folder) for folder, _, _ in os.walk(self.path))])
        exchange = self.overwrite and os.path.lexists(self.target)
        _C.ckpt_rename(str(self.path), str(self.target), exchange=exchange)
        sync([self.target.parent])
        if exchange:
            remove(self.path)
        self._unlock()

    def discard(self) -> None:
        """Remove what was written. Errors are ignored: a later save cleans what is left."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_durably(path: Path, content: bytes) -> None:
    """Create or replace a small file and make its bytes durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a small file as a whole: readers see the old or the new one."""
    draft = path.with_name(f"{_NEW}{path.name}-{uuid.uuid4().hex[:8]}")
    write_durably(draft, content)
    os.replace(draft, path)
    sync([path.parent])


def sync(paths: Sequence[Path]) -> None:
    """Make files, and the names in folders, durable: together, so that a file system with a journal
    writes it once.
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


def remove(path: Path) -> None:
    """Remove a folder: renamed first, so that a half-removed one is not taken for a checkpoint,
    then freed by a thread. What that leaves is cleaned by a later save.
    """
    trash = path.parent / f"{_OLD}{path.name}-{uuid.uuid4().hex[:8]}"
    os.rename(path, trash)
    # Not a daemon: the interpreter waits for it at exit.
    thread = threading.Thread(target=shutil.rmtree, args=(trash, True), name=f"removing {path}")
    for gone in [path for path, thread in _removing.items() if not thread.is_alive()]:
        del _removing[gone]
    _removing[trash] = thread
    thread.start()


def finish_removing() -> bool:
    """Wait until removed folders are gone and their space is free; False: there are none. Local."""
    threads = list(_removing.values())
    _removing.clear()
    for thread in threads:
        thread.join()
    return bool(threads)


def leftovers(target: Path) -> Iterator[Path]:
    """Temporary folders and files of saves of ``target`` that no process works on any more."""
    names = (f"{_NEW}{target.name}-", f"{_OLD}{target.name}-", f"{_OLD}{_NEW}{target.name}-")
    for path in sorted(target.parent.iterdir()):
        removed = path in _removing and _removing[path].is_alive()
        if path.name.startswith(names) and not path.is_symlink() and not removed:
            lock = _lock(path)
            if lock is not None:
                os.close(lock)
                yield path


def clean(target: Path) -> None:
    """Remove the leftovers of ``target``."""
    for path in leftovers(target):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, ``None`` if another process has it or locks do not work."""
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
