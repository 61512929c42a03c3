"""Tests of saves under power loss. Anything that was not made durable may be lost, in any part and
any order that POSIX allows. Whenever the power fails, the folder must be the complete old or the
complete new checkpoint (invariant 4 of docs/decisions/041-simulated-cluster.md).

The ranks save as usual, and note their calls to the file system, with a snapshot before each call.
A simulated disk then replays the notes. Everything that was synced is durable; of the rest, each
page of a file and each name in a folder is there or not, as a seed decides. To plant a fault, a
test leaves calls out of the replay, or lets the ranks publish the folder too early.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import folders

PAGE, SEEDS = 4096, 20
NAME = "a"


# --- what the ranks note -------------------------------------------------------------------------


@dataclass
class Snapshot:
    """The contents of a folder: its files and folders, by their inodes."""

    root: int
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)


def snapshot(root: Path) -> Snapshot:
    """Return the folder's present contents. Other threads may remove files meanwhile."""
    found = Snapshot(root.stat().st_ino)
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            names = found.folders.setdefault(folder.stat().st_ino, {})
            for path in sorted(folder.iterdir()):
                inode = path.lstat().st_ino
                if path.is_dir():
                    waiting.append(path)
                else:
                    found.files[inode] = path.read_bytes()
                names[path.name] = inode
        except FileNotFoundError:
            continue
    return found


@dataclass
class Note:
    """A call, and the folder's contents before it. For a sync, ``synced`` is the inode and ``path``
    the path of what is synced. For a rename, ``rename`` has the old and the new name in the root
    folder, and whether both names are exchanged.
    """

    before: Snapshot
    synced: int = 0
    path: str = ""
    rename: tuple[str, str, bool] | None = None


@contextmanager
def noted(root: Path, log: Path) -> Iterator[None]:
    real, rename, plain = os.fsync, folders._C.ckpt_rename, os.rename

    def do(make: Callable[[], Note], call: Callable[[], Any]) -> Any:
        """Write a note, then run ``call``. A rank holds a lock while it does both, so the notes
        have the order of the calls.
        """
        with open(log / "lock", "a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            number = len(list(log.glob("*.note")))
            (log / f"{number:06d}.note").write_bytes(pickle.dumps(make()))
            return call()

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        do(lambda: Note(snapshot(root), os.fstat(fd).st_ino, path), lambda: real(fd))

    def move(source: Any, target: Any, exchange: bool, call: Callable[[], Any]) -> Any:
        names = (Path(source).name, Path(target).name, exchange)
        return do(lambda: Note(snapshot(root), rename=names), call)

    os.fsync = fsync
    os.rename = lambda a, b: move(a, b, False, lambda: plain(a, b))
    folders._C.ckpt_rename = lambda a, b, *, exchange: move(
        a, b, exchange, lambda: rename(a, b, exchange=exchange)
    )
    try:
        yield
        folders.finish_removing()
        do(lambda: Note(snapshot(root)), lambda: None)
    finally:
        os.fsync, os.rename, folders._C.ckpt_rename = real, plain, rename


# --- the simulated disk --------------------------------------------------------------------------

Tree = dict[str, bytes]


class Disk:
    def __init__(self, first: Snapshot) -> None:
        self.root = first.root
        self.durable = {inode: dict(names) for inode, names in first.folders.items()}
        self.files = dict(first.files)
        self.now = first
        # The last contents of each file, also of files that no longer have a name.
        self.last = dict(first.files)
        # Changes of each folder that are not durable yet, in order: names and the inodes that they
        # get. None means that the name is removed.
        self.waits: dict[int, list[dict[str, int | None]]] = {}

    def see(self, now: Snapshot) -> None:
        """Record all changes since the last snapshot. `do` has already recorded renames."""
        for inode in self.now.folders.keys() | now.folders.keys():
            before, after = self.now.folders.get(inode, {}), now.folders.get(inode, {})
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    self.waits.setdefault(inode, []).append({name: after.get(name)})
        self.now = now
        self.last.update(now.files)

    def do(self, note: Note) -> None:
        if note.synced in self.now.folders:
            self.durable[note.synced] = dict(self.now.folders[note.synced])
            self.waits[note.synced] = []
        elif note.synced:
            self.files[note.synced] = self.now.files.get(note.synced, b"")
        if note.rename:
            source, target, exchange = note.rename
            names = dict(self.now.folders[self.root])
            moved: dict[str, int | None] = {source: names.get(target) if exchange else None}
            moved[target] = names.get(source)
            self.waits.setdefault(self.root, []).append(moved)
            names.update({name: inode for name, inode in moved.items() if inode is not None})
            if not exchange:
                del names[source]
            self.now = Snapshot(
                self.root, {**self.now.folders, self.root: names}, dict(self.now.files)
            )

    def lose_power(self, seed: int) -> Tree | None:
        """Return the folder that has the checkpoint's name after the power loss, or None."""
        rng = random.Random(seed)
        share = rng.choice((0, 0.5, 1))

        def names(inode: int) -> dict[str, int | None]:
            found: dict[str, int | None] = dict(self.durable.get(inode, {}))
            for change in self.waits.get(inode, []):
                if rng.random() < share:
                    found.update(change)
            return found

        def content(inode: int) -> bytes:
            old, new = self.files.get(inode, b""), self.last.get(inode, b"")
            size = rng.choice((len(old), len(new)))
            parts = []
            for at in range(0, size, PAGE):
                part = new if rng.random() < share else old
                parts.append(part[at : min(at + PAGE, size)].ljust(min(PAGE, size - at), b"\0"))
            return b"".join(parts)

        def walk(inode: int, prefix: str) -> Iterator[tuple[str, bytes]]:
            for name, child in names(inode).items():
                if child in self.last:
                    yield prefix + name, content(child)
                elif child is not None:
                    yield from walk(child, f"{prefix}{name}/")

        top = names(self.root).get(NAME)
        return None if top is None else dict(walk(top, ""))


def tree(now: Snapshot) -> Tree | None:
    disk = Disk(now)
    return disk.lose_power(0)


def broken(notes: list[Note], left_out: str = "/") -> str:
    """Lose power at each call, and return a description of the first wrong state of the folder. A
    state is right if it is the old or the new checkpoint; after the save, only the new checkpoint
    is right. Return "" if no state is wrong.

    Files and folders whose names contain ``left_out`` are never synced.
    """
    good = (tree(notes[0].before), tree(notes[-1].before))
    assert good[1] and good[0] != good[1]
    disk = Disk(notes[0].before)
    for number, note in enumerate(notes):
        disk.see(note.before)
        for seed in range(SEEDS):
            found = disk.lose_power(seed)
            # Once the save has returned, the folder must be the new checkpoint.
            if found not in (good[1:] if number == len(notes) - 1 else good):
                differs = sorted(
                    name for name in found or {} if (found or {})[name] != good[1].get(name)
                )
                return f"before call {number} ({note.path or note.rename}), seed {seed}: {differs}"
        if left_out not in note.path.rsplit("/", 1)[-1]:
            disk.do(note)
        else:
            disk.do(Note(note.before))
    return ""


# --- tests ---------------------------------------------------------------------------------------


def publish_early(draft: folders.Draft, written: Any = ()) -> None:
    """Give the folder its name before its files are durable."""
    exchange = draft.overwrite and os.path.lexists(draft.target)
    folders._C.ckpt_rename(str(draft.path), str(draft.target), exchange=exchange)
    draft._named = True
    folders.sync([*(draft.target / path.relative_to(draft.path) for path in written), draft.target])
    folders.sync([draft.target.parent])
    draft._unlock()


def save(rank: int, world: int, path: str, log: str, overwrite: bool, early: bool) -> None:
    model = fsdpc.FSDP(nn.Linear(64, 96))
    folder = Path(path)
    if overwrite:
        checkpoint.save(folder / NAME, model)
    with torch.no_grad():
        for param in model.parameters():
            param += 1
    if early:
        folders.Draft.publish = publish_early
    with noted(folder, Path(log)):
        checkpoint.save(folder / NAME, model, overwrite=overwrite)


def notes_of(tmp_path: Path, overwrite: bool, early: bool = False) -> list[Note]:
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    log.mkdir()
    run_ranks(save, 2, path=str(root), log=str(log), overwrite=overwrite, early=early)
    return [pickle.loads(path.read_bytes()) for path in sorted(log.glob("*.note"))]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_old_or_the_new_checkpoint_whenever_power_is_lost(tmp_path: Path, overwrite: bool):
    notes = notes_of(tmp_path, overwrite)
    assert broken(notes) == ""
    for left_out in (".safetensors", "fsdpc.json", "index.json", folders.NEW, "root"):
        assert broken(notes, left_out), f"nothing shows that {left_out} is not synced"


def test_a_name_before_the_data_is_found(tmp_path: Path):
    assert broken(notes_of(tmp_path, overwrite=True, early=True))
