"""The places of checkpoints: local folders, and folders in object storage (``s3://bucket/run``), by
fsspec and its drivers.

There are no renames in object storage, so a folder there is a checkpoint as long as it has its
manifest: that file comes last and goes first, and whoever looks for checkpoints passes over folders
without it.
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

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # `Path` makes one slash of two
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs",
             "az": "adlfs", "hf": "huggingface_hub", "oci": "ocifs", "oss": "ossfs"}  # fmt: skip
MOST_AT_ONCE = 64 << 20  # bytes of one file that are fetched together
_PART = 8 << 20
_GAP = 1 << 16  # bytes between two ranges for which no request of its own is worth while


class LocalPath(PosixPath):
    """A local folder or file. Local, like its methods."""

    appears_whole = True  # a folder of a checkpoint gets its name when it is complete

    def held(self, *, links: bool = False) -> Root:
        """The folder to read from; ``links``: see ``Root``. ``CheckpointError``: it is missing."""
        return Root(self, links=links)

    def holds_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint, perhaps a damaged one; False once it is removed."""
        try:
            return any(self.iterdir())
        except OSError:
            return False

    def put(self, content: bytes) -> None:
        """Create or replace a small file; readers see the old or the new one."""
        _folders.replace_durably(self, content)

    def remove(self) -> None:
        """Remove a checkpoint's folder, which counts as no checkpoint from the first moment on."""
        _folders.remove(self)


class Url:
    """A folder or file of object storage, with the methods of ``pathlib.Path`` that this package
    uses, and those for the folder of a checkpoint. Local.

    ``CheckpointError``: fsspec or the scheme's driver is missing, or refuses the URL.
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
        """Whether no other process sees what is written here."""
        return self._text.startswith("memory:")

    @property
    def fs(self) -> Any:
        """The driver's file system."""
        return self._found[0]

    @property
    def path(self) -> str:
        """The name in ``fs``."""
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
        """What is in the folder, by name. ``FileNotFoundError``: there is no such folder."""
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
        """The folder to read from, listed once; there are no links. ``CheckpointError``: it is
        missing.
        """
        return RemoteFolder(self)

    def holds_checkpoint(self) -> bool:
        """Whether the folder has a manifest, which comes last and goes first."""
        return (self / _manifest.NAME).exists()

    def put(self, content: bytes) -> None:
        """Create or replace a small file."""
        self.fs.pipe_file(self.path, content)

    def remove(self) -> None:
        """Remove a folder and all in it, its manifest before the rest."""
        manifest = self / _manifest.NAME
        if manifest.is_file():
            self.fs.rm_file(manifest.path)
        if self.is_dir():
            self.fs.rm(self.path, recursive=True)

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Names of all files in the folder and its folders -> bytes, and a text that changes when
        the file does.
        """
        found = self._fresh.find(self.path, maxdepth=2, detail=True)
        begin = len(self.path.rstrip("/")) + 1
        return {str(path)[begin:]: (int(info["size"]), _mark(info)) for path, info in found.items()}

    @property
    def _fresh(self) -> Any:
        """``fs`` without the listings that drivers remember: other processes write here, too."""
        self.fs.invalidate_cache()
        return self.fs


def _mark(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created", "oid")
    return repr([str(info[key]) for key in keys if key in info])


AnyPath = LocalPath | Url


def place_of(path: str | os.PathLike[str] | Url) -> AnyPath:
    """The place of a path: a local one, absolute, or a URL's. Local."""
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
    """The path, absolute. ``ValueError``: a URL, where only a local folder will do."""
    found = place_of(path)
    if not isinstance(found, LocalPath):
        raise ValueError(
            f"{str(found)!r} is a URL, and this needs a local folder: copy it, or mount the storage"
        )
    return found


# --- reading -------------------------------------------------------------------------------------


class RemoteFile:
    """A file in object storage, read as a ``held.Held`` is."""

    def __init__(self, url: Url, size: int, mark: str) -> None:
        self._url, self.size, self.stamp = url, size, (mark, size)

    def read(self, nbytes: int, offset: int, path: object) -> bytes:
        """``CheckpointError``: the file, which messages call ``path``, ends early or fails."""
        try:
            found = self._url.fs.cat_file(self._url.path, start=offset, end=offset + nbytes)
        except Exception as error:  # each driver has classes of its own
            raise CheckpointError(f"reading {path}: {type(error).__name__}: {error}") from error
        if len(found) != nbytes:
            raise CheckpointError(f"{path} ends at byte {offset + len(found)}: the file was cut")
        return bytes(found)

    @contextmanager
    def fetched(self, rows: np.ndarray) -> Iterator[int]:
        """A descriptor of a memory file with these ranges of the remote file, at their offsets."""
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
    """Begins and ends of what is fetched for a table of ranges."""
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
    """A folder in object storage, as a ``held.Root``, listed once. ``CheckpointError``: no file."""

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
        """A file, to be read. ``CheckpointError``: the listing does not have it."""
        if name not in self._sizes:
            raise CheckpointError(f"{self.path / name} is missing")
        if name not in self._files:
            self._files[name] = RemoteFile(self.path / name, *self._sizes[name])
        return self._files[name]

    def unopened(self) -> list[str]:
        """What is in the folder and was not opened."""
        opened = {name.partition("/")[0] for name in self._files}
        return sorted({name.partition("/")[0] for name in self._sizes} - opened)

    def replaced(self) -> bool:
        return False

    @property
    def stamp(self) -> list[tuple[str, tuple[str, int]]]:
        """Names of the opened files, each with what changes when the file does."""
        return [(name, file.stamp) for name, file in sorted(self._files.items())]

    def check_unwritten(self) -> None:
        """``CheckpointError``: a file was replaced since it was listed."""
        now = self.path.sizes()
        for name, file in self._files.items():
            if now.get(name, (0, ""))[::-1] != file.stamp:
                raise CheckpointError(f"{self.path / name} was written while it was read")
