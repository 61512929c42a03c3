"""Open files of a checkpoint. Each file is opened once, through one descriptor of the folder. So
all files belong to the same checkpoint, even if another process replaces the folder meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fsdpc.checkpoint.errors import CheckpointError

_ATTEMPTS = 20
_T = TypeVar("_T")
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Held:
    """A file or folder that is open as long as this object lives."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.stamp = _stamp(os.fstat(fd))

    @property
    def is_written(self) -> bool:
        """Return True if the file may have changed since it was opened."""
        return _stamp(os.fstat(self.fd)) != self.stamp

    @property
    def proc_path(self) -> str:
        """Return a path of the open file, for libraries that do not take descriptors."""
        return f"/proc/self/fd/{self.fd}"

    def read(self, nbytes: int, offset: int, path: Path) -> bytes:
        """Return ``nbytes`` bytes from ``offset`` on. Raises ``CheckpointError``, with ``path`` as
        the name of the file, if the file ends before that.
        """
        parts, at = [], offset
        while at < offset + nbytes:
            part = os.pread(self.fd, offset + nbytes - at, at)
            if not part:
                raise CheckpointError(
                    f"{path} ends at byte {at} of {offset + nbytes}: the file was cut"
                )
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def read_into(self, target: memoryview, offset: int, path: Path) -> None:
        """Fill ``target`` with bytes from ``offset`` on; raises as ``read`` does."""
        done = 0
        while done < len(target):
            got = os.preadv(self.fd, [target[done:]], offset + done)
            if not got:
                raise CheckpointError(f"{path} ends at byte {offset + done}: the file was cut")
            done += got

    def __del__(self) -> None:
        os.close(self.fd)


class Root:
    """An open folder and its open files by name. While this object exists, its files stay the same,
    even if the path then names another folder. ``links`` allows files that are symbolic links (as
    in a cache of the Hub). Local. Raises ``CheckpointError`` if the folder does not exist.
    """

    def __init__(self, path: Path, *, links: bool = False) -> None:
        self.path, self._links = path, links
        try:
            self.folder = Held(os.open(path, _FOLDER))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} is missing") from error
        self._files: dict[str, Held] = {}
        self._closed: dict[str, tuple[int, int, int]] = {}  # stamps of closed files

    def exists(self, name: str) -> bool:
        """Return True if the folder has ``name``, also if it is a broken symbolic link."""
        try:
            os.stat(name, dir_fd=self.folder.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_link(self, name: str) -> bool:
        try:
            info = os.stat(name, dir_fd=self.folder.fd, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISLNK(info.st_mode)

    def open(self, name: str) -> Held:
        """Return a regular file, opened at the first call. Follows a symbolic link only with
        ``links``. Raises ``CheckpointError`` if the file cannot be opened.
        """
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = self._open(name)
        return found

    def close(self, name: str) -> None:
        """Close a file that was read or is mapped. The file still counts as opened in
        ``unopened``, ``stamp`` and ``check_unwritten``.
        """
        self._closed[name] = self._files.pop(name).stamp

    def _open(self, name: str) -> Held:
        path = self.path / name
        try:
            flags = _FILE & ~os.O_NOFOLLOW if self._links else _FILE
            held = Held(os.open(name, flags, dir_fd=self.folder.fd))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            hint = ""
            if self.is_link(name):
                hint = ": it is a symbolic link, and links are not followed"
            elif error.errno == errno.EMFILE:
                hint = ": a load has all files of a checkpoint open at once; raise `ulimit -n`"
            raise CheckpointError(f"{path} cannot be opened ({error.strerror}){hint}") from error
        if not stat.S_ISREG(os.fstat(held.fd).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return held

    def unopened(self) -> list[str]:
        """Return the names in the folder of which nothing was opened."""
        tops = {name.partition("/")[0] for name in (*self._files, *self._closed)}
        return sorted(set(os.listdir(self.folder.fd)) - tops)

    def replaced(self) -> bool:
        """Return True if the path now names another folder, or no folder."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.folder.fd))
        except OSError:
            return True

    @property
    def stamp(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Return the stamps (inode, time of the last change, size) of the opened files. The stamps
        are equal for all processes of a host that see the same bytes.
        """
        held = {name: held.stamp for name, held in self._files.items()}
        return sorted((self._closed | held).items())

    def check_unwritten(self) -> None:
        """Raise ``CheckpointError`` if a file was written in place after it was opened."""
        written = [name for name, held in self._files.items() if held.is_written]
        for name, stamp in self._closed.items():
            with suppress(FileNotFoundError):  # a removed file keeps its mapped bytes
                info = os.stat(name, dir_fd=self.folder.fd)
                if _stamp(info) != stamp and info.st_ino == stamp[0]:
                    written.append(name)
        if written:
            raise CheckpointError(f"{self.path / written[0]} was written while it was read")


def _stamp(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_mtime_ns, info.st_size


def opened_whole(path: Path, open_: Callable[[], _T]) -> _T:
    """Return what ``open_`` returns. If ``open_`` fails and ``path`` names another folder by then,
    call ``open_`` again.
    """
    for _ in range(_ATTEMPTS):
        before = _inode(path)
        try:
            return open_()
        except CheckpointError:
            if _inode(path) in (before, None):
                raise
    raise CheckpointError(f"{path} is replaced again and again while it is opened")


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
