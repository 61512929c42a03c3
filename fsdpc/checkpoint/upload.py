"""Targets of a save. A save to a folder is written there directly. A save to object storage is
written into a local staging folder, which all ranks then upload: each rank uploads whole files, and
rank 0 uploads the manifest last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdpc.checkpoint import folders as _folders
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import FILE_BYTES
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import STATE_JSON
from fsdpc.checkpoint.steps import next_number
from fsdpc.checkpoint.storage import AnyPath, LocalPath, Url

_UPLOADED_BYTES = 1_000_000_000  # per file; below FILE_BYTES, because one rank uploads a whole file
_NAME = "fsdpc-upload"


@dataclass
class Direct:
    """A save that is written directly to its target. ``local``: the folder to write; ``published``,
    ``links``: see ``Plan``; ``file_bytes``: the largest size of a file with several tensors,
    unless the save sets another size. The save calls this object when the folder is complete.
    """

    local: LocalPath
    published: int | None = None
    file_bytes: int = FILE_BYTES
    links: bool = True

    def __call__(self) -> None:
        pass


def way_to(
    place: AnyPath,
    ranks: Ranks,
    staging: str | os.PathLike[str] | None,
    *,
    overwrite: bool,
    is_step: bool = False,
) -> Direct | Upload:
    """Return the object that brings a save to ``place``. Collective; see ``Upload``."""
    if isinstance(place, LocalPath):
        return Direct(place)
    if place.is_own_memory and ranks.world > 1:
        raise CheckpointError(
            f"{place} is memory of each process alone, and {ranks.world} ranks save there: "
            "save to a folder, or to storage that all of them see"
        )
    return Upload(ranks, place, staging, overwrite=overwrite, is_step=is_step)


class Upload:
    """A save to object storage, with the interface of ``Direct``. A call of this object uploads the
    local folder and then removes it.

    Collective. ``CheckpointError``: there is a checkpoint at ``url``, the driver is missing, or not
    all ranks can access the staging folder. ``is_step``: the checkpoint is a step of a
    ``Checkpointer``; an old checkpoint at ``url`` is removed before the new one is uploaded.
    """

    file_bytes, links = _UPLOADED_BYTES, False

    def __init__(
        self,
        ranks: Ranks,
        url: Url,
        staging: str | os.PathLike[str] | None,
        *,
        overwrite: bool,
        is_step: bool,
    ) -> None:
        self._ranks, self._url = ranks, url
        self.discard: Callable[[], object] = lambda: None  # on rank 0, _make sets a finalizer
        self._what = f"saving checkpoint {url}"
        self.published: int | None = None
        parent = Path(os.path.abspath(tempfile.gettempdir() if staging is None else staging))
        with ranks.step(self._what) as made:
            if overwrite and not is_step:
                raise ValueError(
                    f"overwrite=True: {url} cannot be replaced as a whole, and would be lost if "
                    "the upload failed: choose another name, or use Checkpointer"
                )
            url.fs  # noqa: B018  every rank needs the driver
            if ranks.rank == 0:
                if not is_step and (url / _manifest.NAME).exists():
                    raise FileExistsError(
                        f"{url} exists: choose another name (object storage cannot replace a "
                        "folder as a whole; Checkpointer removes old ones)"
                    )
                self.published = next_number(url)
                made.value = str(self._make(parent))
        self._folder = LocalPath(made.values[0])
        self.local = self._folder / url.name
        with ranks.step(self._what):
            if not self._folder.is_dir():
                raise CheckpointError(
                    f"the staging folder {self._folder} is not there: ranks on several hosts need "
                    "staging=, a folder that all of them see"
                )

    def _make(self, parent: Path) -> Path:
        parent.mkdir(parents=True, exist_ok=True)
        target = parent / _NAME
        _folders.clean(target)  # remove folders of processes that were killed
        folder = parent / f"{_folders.NEW}{_NAME}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)
        self.discard = weakref.finalize(self, _discard, folder, _folders.lock(folder))
        return folder

    def __call__(self) -> None:
        try:
            self._upload()
        finally:
            self.discard()

    def _upload(self) -> None:
        ranks = self._ranks
        with ranks.step(self._what) as listed:
            if ranks.rank == 0:
                self._clear()
                found = self._files()
                marks = [name for name in found if name.endswith(STATE_JSON)]
                self._put(marks)  # from these files a reader can tell that the folder is incomplete
                last = [name for name in found if name.endswith(_manifest.NAME)]
                last.sort(key=lambda name: -name.count("/"))  # manifests of parts come first
                listed.value = [name for name in found if name not in (*marks, *last)]
        with ranks.step(self._what):
            self._put(share(listed.values[0], self.local, ranks.rank, ranks.world))
        with ranks.step(self._what):
            if ranks.rank == 0:
                self._put(last)

    def _clear(self) -> None:
        """Remove the files of a failed upload, or the checkpoint that is replaced."""
        if self._url.is_dir():
            self._url.remove()

    def _files(self) -> list[str]:
        paths = (path for path in self.local.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.local)) for path in paths)

    def _put(self, names: Iterable[str]) -> None:
        for name in names:
            target = self._url / name
            try:
                target.fs.put_file(str(self.local / name), target.path)
            except Exception as error:  # each driver has its own exception classes
                text = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"uploading {target}: {text}") from error


def _discard(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        with suppress(OSError):
            os.close(lock)


def share(names: list[str], folder: Path, rank: int, world: int) -> list[str]:
    """Return the files that ``rank`` uploads. In the order of falling size, each file goes to the
    rank that has the fewest bytes so far. Local.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    loads = [0] * world
    own = []
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == rank:
            own.append(name)
    return own
