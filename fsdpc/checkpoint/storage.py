"""The places of checkpoints: local folders, and folders in object storage (``s3://bucket/run``),
which are accessed through fsspec and its drivers.

Object storage has no renames, so a folder in object storage is a checkpoint as long as it has a
manifest. The manifest is written last and removed first. Functions that look for checkpoints ignore
folders without a manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PosixPath
from typing import Any

import numpy as np

from fsdpc.checkpoint import folders as _folders
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.held import Root
from fsdpc.checkpoint.layout import NBYTES, OFFSET

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # `Path` replaces "//" by "/"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs",
             "az": "adlfs", "hf": "huggingface_hub", "oci": "ocifs", "oss": "ossfs"}  # fmt: skip
MOST_AT_ONCE = 64 << 20  # about how many bytes of one file are fetched at a time
_PART = 8 << 20
_GAP = 1 << 16  # ranges with at most this many bytes between them share a request


class LocalPath(PosixPath):
    """A local folder or file. No method is collective."""

    appears_whole = True  # a checkpoint's folder gets its name only when it is complete

    def held(self, *, links: bool = False) -> Root:
        """Return the opened folder, to read from it; for ``links`` see ``Root``. Raises
        ``CheckpointError`` if the folder is missing.
        """
        return Root(self, links=links)

    def holds_checkpoint(self) -> bool:
        """Return whether the folder has a checkpoint, which may be damaged. Returns False after the
        checkpoint was removed.
        """
        try:
            return any(self.iterdir())
        except OSError:
            return False

    def put(self, content: bytes) -> None:
        """Create or replace a small file. Readers see either the old or the new file."""
        _folders.replace_durably(self, content)

    def remove(self) -> None:
        """Remove a checkpoint's folder. The folder is renamed first, so that a partly removed
        folder does not count as a checkpoint.
        """
        _folders.remove(self)


class Url:
    """A folder or file in object storage, with the methods of ``pathlib.Path`` that this package
    uses, and with methods for the folder of a checkpoint, as in ``LocalPath``. Local.

    The methods raise ``CheckpointError`` if fsspec or the driver of the URL's scheme is missing, or
    if the driver does not accept the URL.
    """

    appears_whole = False

    def __init__(self, url: str) -> None:
        self._text = url.rstrip("/")

    @cached_property
    def _found(self) -> tuple[Any, str]:
        scheme = self._text.partition(":")[0]
        try:
            from fsspec.core import url_to_fs

            options = {"auto_mkdir": True} if scheme == "local" else {}
            fs, path = url_to_fs(self._text, **options)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(scheme, "fsspec")
            raise CheckpointError(f"{self}: {error} (pip install {package})") from error
        return fs, str(path)

    @property
    def is_own_memory(self) -> bool:
        """Return whether the storage is memory of this process, which no other process sees."""
        return self._text.startswith("memory:")

    @property
    def fs(self) -> Any:
        """Return the driver's file system."""
        return self._found[0]

    @property
    def path(self) -> str:
        """Return the path of the folder or file in ``fs``."""
        return self._found[1]

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Url({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self._text}/{name}")

    @property
    def name(self) -> str:
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self._text.rpartition("/")[0])

    def exists(self) -> bool:
        return bool(self._fresh.exists(self.path))

    def is_dir(self) -> bool:
        return bool(self._fresh.isdir(self.path))

    def is_file(self) -> bool:
        return bool(self._fresh.isfile(self.path))

    def iterdir(self) -> Iterator[Url]:
        """Return the files and folders in the folder, sorted by name. Raises ``FileNotFoundError``
        if the folder does not exist.
        """
        found = self._fresh.ls(self.path, detail=False)
        names = {str(each).rstrip("/").rpartition("/")[2] for each in found}
        return (self / name for name in sorted(names - {self.path.rpartition("/")[2]}))

    def glob(self, pattern: str) -> Iterator[Url]:
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        return bytes(self._fresh.cat_file(self.path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def held(self, *, links: bool = False) -> RemoteFolder:
        """Return the folder, to read from it; the folder is listed once. ``links`` has no effect,
        because object storage has no links. Raises ``CheckpointError`` if the folder is missing.
        """
        return RemoteFolder(self)

    def holds_checkpoint(self) -> bool:
        """Return whether the folder has a manifest, which is written last and removed first."""
        return (self / _manifest.NAME).exists()

    def put(self, content: bytes) -> None:
        """Create or replace a small file."""
        self.fs.pipe_file(self.path, content)

    def remove(self) -> None:
        """Remove a folder and everything in it, the manifest first."""
        manifest = self / _manifest.NAME
        if manifest.is_file():
            self.fs.rm_file(manifest.path)
        if self.is_dir():
            self.fs.rm(self.path, recursive=True)

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Return a dict from the name of each file in the folder and its subfolders to the size of
        the file and a text that changes when the file changes.
        """
        found = self._fresh.find(self.path, maxdepth=2, detail=True)
        begin = len(self.path.rstrip("/")) + 1
        return {str(path)[begin:]: (int(info["size"]), _mark(info)) for path, info in found.items()}

    @property
    def _fresh(self) -> Any:
        """Return ``fs`` after clearing its cache of listings, because other processes also write to
        the storage.
        """
        self.fs.invalidate_cache()
        return self.fs


def _mark(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created", "oid")
    return repr([str(info[key]) for key in keys if key in info])


AnyPath = LocalPath | Url


def place_of(path: str | os.PathLike[str] | Url) -> AnyPath:
    """Return an absolute ``LocalPath`` for a local path, or a ``Url`` for a URL. Local."""
    if isinstance(path, LocalPath | Url):
        return path
    text = os.fspath(path)
    found = _SCHEME.match(text) if isinstance(text, str) else None
    if found is None:
        return LocalPath(os.path.abspath(text))
    rest = text[found.end() :]
    if found[1] == "file":
        return LocalPath(f"/{rest}")
    return Url(f"{found[1]}://{rest}")


def local_path(path: str | os.PathLike[str]) -> LocalPath:
    """Return the absolute path, for functions that need a local folder. Raises ``ValueError`` if
    ``path`` is a URL.
    """
    found = place_of(path)
    if not isinstance(found, LocalPath):
        raise ValueError(
            f"{str(found)!r} is a URL, and this needs a local folder: copy it, or mount the storage"
        )
    return found


# --- reading -------------------------------------------------------------------------------------


class RemoteFile:
    """A file in object storage. Its method ``read`` is like that of ``held.Held``."""

    def __init__(self, url: Url, size: int, mark: str) -> None:
        self._url, self.size, self.stamp = url, size, (mark, size)

    def read(self, nbytes: int, offset: int, path: object) -> bytes:
        """Return ``nbytes`` bytes from ``offset`` on. Raises ``CheckpointError``, with ``path`` as
        the name of the file, if the file has fewer bytes or cannot be read.
        """
        try:
            found = self._url.fs.cat_file(self._url.path, start=offset, end=offset + nbytes)
        except Exception as error:  # each driver has its own exception classes
            raise CheckpointError(f"reading {path}: {type(error).__name__}: {error}") from error
        if len(found) != nbytes:
            raise CheckpointError(f"{path} ends at byte {offset + len(found)}: the file was cut")
        return bytes(found)

    @contextmanager
    def fetched(self, rows: np.ndarray) -> Iterator[int]:
        """Yield the descriptor of a file in memory that has these ranges of the remote file, at the
        same offsets.
        """
        fd = os.memfd_create("fsdpc checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.size)
            parts = list(_parts(rows))
            paths = [self._url.path] * len(parts)
            starts, ends = (list(side) for side in zip(*parts, strict=True))
            try:
                found = self._url.fs.cat_ranges(paths, starts, ends, on_error="raise")
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"reading {self._url}: {text}") from error
            for (start, end), content in zip(parts, found, strict=True):
                if len(content) != end - start:
                    raise CheckpointError(
                        f"{self._url} ends at byte {start + len(content)}: the file was cut"
                    )
                os.pwrite(fd, content, start)
            yield fd
        finally:
            os.close(fd)


def _parts(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each part of the file to fetch for a table of ranges."""
    begin = end = -1
    order = rows[np.argsort(rows[:, OFFSET], kind="stable")][:, (OFFSET, NBYTES)]
    for offset, nbytes in order.tolist():
        if begin >= 0 and offset <= end + _GAP and offset + nbytes - begin <= _PART:
            end = max(end, offset + nbytes)
            continue
        if begin >= 0:
            yield begin, end
        for begin in range(offset, offset + nbytes, _PART):
            end = min(begin + _PART, offset + nbytes)
            if end < offset + nbytes:
                yield begin, end
    if begin >= 0:
        yield begin, end


class RemoteFolder:
    """A folder in object storage, with the methods of ``held.Root``. The folder is listed once.
    Raises ``CheckpointError`` if there is no file in the folder.
    """

    def __init__(self, url: Url) -> None:
        self.path = url
        try:
            self._sizes = url.sizes()
        except FileNotFoundError:
            self._sizes = {}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"listing {url}: {type(error).__name__}: {error}") from error
        if not self._sizes:
            raise CheckpointError(f"{url} is missing")
        self._files: dict[str, RemoteFile] = {}

    def exists(self, name: str) -> bool:
        return name in self._sizes or any(each.startswith(f"{name}/") for each in self._sizes)

    def is_link(self, name: str) -> bool:
        return False

    def open(self, name: str) -> RemoteFile:
        """Return a file, to read from it. Raises ``CheckpointError`` if the listing does not have
        the file.
        """
        if name not in self._sizes:
            raise CheckpointError(f"{self.path / name} is missing")
        if name not in self._files:
            self._files[name] = RemoteFile(self.path / name, *self._sizes[name])
        return self._files[name]

    def unopened(self) -> list[str]:
        """Return the names of unopened files, and of subfolders in which no file was opened."""
        opened = {name.partition("/")[0] for name in self._files}
        return sorted({name.partition("/")[0] for name in self._sizes} - opened)

    def replaced(self) -> bool:
        return False

    @property
    def stamp(self) -> list[tuple[str, tuple[str, int]]]:
        """Return each opened file's name, with a value that changes when the file changes."""
        return [(name, file.stamp) for name, file in sorted(self._files.items())]

    def check_unwritten(self) -> None:
        """Raise ``CheckpointError`` if an opened file was replaced after it was listed."""
        now = self.path.sizes()
        for name, file in self._files.items():
            if now.get(name, (0, ""))[::-1] != file.stamp:
                raise CheckpointError(f"{self.path / name} was written while it was read")
