"""The folders of checkpoints: written under a temporary name, made durable, renamed as a whole.

A save holds a lock on its temporary folder as long as it lives, so that a later one knows which
leftovers belong to nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdpc import _C
from fsdpc.checkpoint import manifest as _manifest

_NEW, _OLD = ".new-", ".old-"


class Draft:
    """A checkpoint that is being written; one rank has it. ``path``: its temporary folder."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target = target
        self.overwrite = overwrite
        if not overwrite and os.path.lexists(target):
            raise FileExistsError(
                f"{target} exists: choose another name, or overwrite=True, which replaces it once "
                "the new checkpoint is complete"
            )
        if overwrite and os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
            raise NotADirectoryError(f"{target} is not a folder, so it is not replaced")
        if overwrite and target.is_dir() and not (target / _manifest.NAME).is_file():
            if any(target.iterdir()):
                raise FileExistsError(f"{target} is no checkpoint, so it is not replaced")
        target.parent.mkdir(parents=True, exist_ok=True)
        clean(target)
        self.path = target.parent / f"{_NEW}{target.name}-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self._lock = _lock(self.path)

    def create(self, name: str, nbytes: int) -> None:
        """An empty file of a size, its space taken now. ``OSError`` (ENOSPC): too little space."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _allocate(fd, nbytes, path)
        finally:
            os.close(fd)

    def write_header(self, name: str, header: bytes) -> None:
        """Write a header so that the file is worthless until all of it is durable: its first eight
        bytes, which no reader takes for a length while they are zero, come last.
        """
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write(fd, header[8:], 8)
            os.fsync(fd)
            _write(fd, header[:8], 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, name: str, content: bytes) -> None:
        """A small file, durable."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        write_durably(path, content)

    def publish(self) -> None:
        """Give the folder its name, durably. What had the name before is removed afterwards."""
        for folder, _, _ in os.walk(self.path):
            sync_folder(Path(folder))
        exchange = self.overwrite and os.path.lexists(self.target)
        _C.ckpt_rename(str(self.path), str(self.target), exchange=exchange)
        sync_folder(self.target.parent)
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
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a folder: renamed first, so that a half-removed one is not taken for a checkpoint."""
    trash = path.parent / f"{_OLD}{path.name}-{uuid.uuid4().hex[:8]}"
    os.rename(path, trash)
    shutil.rmtree(trash)


def leftovers(target: Path) -> Iterator[Path]:
    """Temporary folders and files of saves of ``target`` that no process works on any more."""
    names = (f"{_NEW}{target.name}-", f"{_OLD}{target.name}-", f"{_OLD}{_NEW}{target.name}-")
    for path in sorted(target.parent.iterdir()):
        if path.name.startswith(names) and not path.is_symlink():
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
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise OSError(error.errno, f"{error.strerror}: {nbytes} bytes for {path}") from error
        os.ftruncate(fd, nbytes)


def _write(fd: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        put = os.pwrite(fd, view, offset)
        view, offset = view[put:], offset + put
