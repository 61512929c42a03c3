"""The folders of checkpoints: written under a temporary name, made durable, renamed as a whole.

A save holds a lock on its temporary folder as long as the save lives, so that a later save knows
which leftovers belong to nobody.
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
_LONGEST_NAME = 200  # bytes of a folder's name; a temporary name is longer
_HALF = "".join(map(chr, range(0xDC80, 0xDD00)))  # how os.fsdecode shows bytes of a cut character
OF_ONE_FILE = (errno.ENOENT, errno.EMLINK)  # other files may still be linked
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
        self.path = target.parent / f"{NEW}{_short(target.name)}-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self._named = False
        self._lock = lock(self.path)

    def create(self, name: str, nbytes: int, header: bytes) -> None:
        """Make a file of ``nbytes``, its space taken now, with its header but for the first eight
        bytes, which no reader takes for a length while they are zero. If the disk is full, wait
        until removed folders are gone. ``OSError`` (ENOSPC): too little space.
        """
        fd = self._new(name)
        try:
            _allocate(fd, nbytes, self.path / name)
            _write(fd, header[_LENGTH_BYTES:], _LENGTH_BYTES)
        finally:
            os.close(fd)

    def link(self, name: str, source: Path) -> None:
        """Link a file, which will not change, into the draft. ``OSError``: it cannot be linked."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source, self.path / name, follow_symlinks=False)

    def copy(self, name: str, held: Held) -> None:
        """Copy a file into the draft, not durably yet. ``OSError``: the copy failed."""
        fd = self._new(name)
        try:
            _allocate(fd, held.size, self.path / name)
            for at in range(0, held.size, _COPY_BYTES):
                part = held.read(min(_COPY_BYTES, held.size - at), at, self.path / name)
                _write(fd, part, at)
        finally:
            os.close(fd)

    def write_length(self, name: str, header: bytes) -> None:
        """Write the first eight bytes of a file whose others are durable; these are not yet."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write(fd, header[:_LENGTH_BYTES], 0)
        finally:
            os.close(fd)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file, not durably yet."""
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
        """Make files and the folder durable, then give the folder its name, durably. What had the
        name before is removed afterwards, by a thread: to free its space takes as long as to write
        a part of it. ``OSError``: the names are as before; if the folders cannot be renamed back
        either, both stay, and the text says where.
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
            with suppress(OSError, RuntimeError):  # a later save cleans it
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
        """Remove what was written, unless it has got its name. Errors are ignored: a later save
        cleans what is left.
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
    """The name, cut if it is long: names of temporary folders have it, and more."""
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
    """Replace a small file as a whole: readers see the old or the new one. ``OSError``: the file is
    the old or the new one, and no draft is left.
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
    """Make files, and the names in folders, durable: together, so that a file system with a journal
    writes its journal once.
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
    """Remove a folder: renamed first, so that a half-removed one is not taken for a checkpoint,
    then freed by a thread. A later save cleans what that leaves. ``target``: the checkpoint's path,
    if ``path`` is a temporary folder; such a folder is removed even if it cannot be renamed.
    """
    name = _short((target or path).name)
    trash = path.parent / f"{_OLD}{name}-{uuid.uuid4().hex[:8]}"
    try:
        os.rename(path, trash)
    except OSError:
        if target is None:
            raise
        trash = path
    # Not a daemon: the interpreter waits for this thread at exit.
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
    """Remove the leftovers of ``target``."""
    for path in leftovers(target):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def has_links(path: Path, target: Path) -> bool:
    """Whether a file can be linked beside ``target``: tried with a name that ``clean`` removes."""
    trial = target.parent / f"{NEW}{_short(target.name)}-{uuid.uuid4().hex[:8]}"
    try:
        os.link(path, trial, follow_symlinks=False)
        trial.unlink()
    except OSError as error:
        return error.errno in OF_ONE_FILE
    return True


def lock(path: Path) -> int | None:
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
