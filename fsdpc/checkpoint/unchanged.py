"""Hard links to files of an earlier save, for files of frozen parameters whose bytes have not
changed. Such files are neither copied in memory nor written again.
"""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsdpc import _C
from fsdpc.checkpoint.folders import OF_ONE_FILE, Draft, has_links
from fsdpc.checkpoint.held import Held
from fsdpc.checkpoint.layout import FILE_TYPE, MEMORY, MEMORY_TYPE, NBYTES, PlannedSet, Table
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.staging import SIZES, bytes_at
from fsdpc.checkpoint.write import joined

if TYPE_CHECKING:
    from fsdpc.checkpoint.saving import Plan

Part = tuple[np.ndarray, np.ndarray]  # fragments (see ``layout.fragments``), and the digest of each
_MOST_KNOWN = 256


@dataclass
class _Written:
    """A file as this process last wrote or linked it. ``digests`` has the digests of the ranges
    that this rank wrote.
    """

    path: Path
    form: int
    digests: list[tuple[int, int]]
    part: Part
    save: str  # a text that identifies the save
    stamp: tuple[int, int, int] | None  # changes if the file changes; None on ranks other than 0


# A key is (the folder that contains the checkpoints, the path of the file in a checkpoint).
_written: OrderedDict[tuple[Path, str], _Written] = OrderedDict()
_links: dict[Path, bool] = {}  # on rank 0: whether files can be linked in a folder


class Unchanged:
    """The files of a save that are not written again, but linked to files of an earlier save.
    ``parts`` has, by the path of each file, the fragments that this rank would write, and their
    digests. Local.
    """

    def __init__(self, target: Path, ranks: Ranks) -> None:
        self._target, self._ranks = target, ranks
        self._now: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        self._own: dict[str, list[Part]] = {}
        self._held: dict[str, Held] = {}
        self._is_done = False
        self.parts: dict[str, Part] = {}

    def look(self, plan: Plan, what: str, begin: Callable[[], object] = lambda: None) -> None:
        """Take the files that have not changed out of the plan. ``begin`` is called before the
        memory of frozen parameters is read.

        The first call does not read parameters in a GPU's memory. A later call reads them after
        they were copied to the host. When every rank has read all its frozen parameters, further
        calls do nothing. Until then, a call is collective if the plan has frozen files.
        """
        named = [(each.layout.path(file), file, table) for each in plan.sets
                 for file, table in zip(each.layout.files, each.tables, strict=True)
                 if file.frozen]  # fmt: skip
        if self._is_done or not named:
            return
        with self._ranks.step(what) as seen:
            begin()
            away = False
            for path, file, table in named if plan.links else ():
                if (table.gpu >= 0).any():
                    away = True
                elif path not in self._now:
                    self._now[path] = _C.ckpt_crc32c(file.header), _digests(table)
            known = [path for path in self._now if self._is_known(path)]
            seen.value = away, [(path, self._before(path).save) for path in known]
        self._is_done = not any(away for away, _ in seen.values)
        for pair in seen.values[self._ranks.rank][1]:
            if all(pair in pairs for _, pairs in seen.values):
                self.parts[pair[0]] = self._before(pair[0]).part
        plan.sets = [self._rest(each) for each in plan.sets]

    def _rest(self, planned: PlannedSet) -> PlannedSet:
        paths = [planned.layout.path(file) for file in planned.layout.files]
        pairs = zip(paths, planned.tables, strict=True)
        tables = [table.none if path in self.parts else table for path, table in pairs]
        return dataclasses.replace(planned, tables=tables)

    def _key(self, path: str) -> tuple[Path, str]:
        return self._target.parent, path

    def _before(self, path: str) -> _Written:
        return _written[self._key(path)]

    def _is_known(self, path: str) -> bool:
        before = _written.get(self._key(path))
        if before is None or (before.form, before.digests) != self._now[path]:
            return False
        if self._ranks.rank == 0:
            held = _open(before.path)
            if held is None or held.stamp != before.stamp:
                return False
            folder = self._target.parent
            if folder not in _links:
                _links[folder] = has_links(before.path, self._target)
            if not _links[folder]:
                return False
            self._held[path] = held
        return True

    def link(self, draft: Draft, path: str) -> bool:
        """Link the file into the draft if the file has not changed, or copy it if it cannot be
        linked any more. Return False if the file must be written. Call this only on the rank that
        has the draft. ``OSError``: the file cannot be copied.
        """
        if path not in self.parts:
            return False
        held = self._held.pop(path)
        try:
            draft.link(path, self._before(path).path)
            linked = _open(draft.path / path)
            if linked is not None and linked.stamp == held.stamp:
                return True
            (draft.path / path).unlink()
        except OSError as error:
            if error.errno not in OF_ONE_FILE:
                _links[self._target.parent] = False
        draft.copy(path, held)
        return True

    def add(self, path: str, part: Part) -> None:
        """Record the fragments of a file that this rank has written, and their digests. Local."""
        if path in self._now:
            self._own.setdefault(path, []).append(part)

    def keep(self, save: str) -> None:
        """Record the files of the complete checkpoint for later saves. ``save`` is a word that is
        equal on all ranks and different for each save. Local.
        """
        for path, (form, digests) in self._now.items():
            file, key = self._target / path, self._key(path)
            held = _open(file) if self._ranks.rank == 0 else None
            part = self.parts.get(path) or joined(self._own.get(path, []))
            _written.pop(key, None)
            stamp = None if held is None else held.stamp
            _written[key] = _Written(file, form, digests, part, save, stamp)
        while len(_written) > _MOST_KNOWN:
            _written.popitem(last=False)


def _open(path: Path) -> Held | None:
    try:
        return Held(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError:
        return None


def _digests(table: Table) -> list[tuple[int, int]]:
    """Return a digest of the positions of the ranges, then a digest of each range's bytes in
    memory. Some weights that count as frozen, such as averages, may change at every step. A
    32-bit checksum would miss one change in 2^32, so a digest is wider.
    """
    rows, sizes = table.rows, np.array(SIZES)
    lengths = rows[:, NBYTES] // sizes[rows[:, FILE_TYPE]] * sizes[rows[:, MEMORY_TYPE]]
    places = np.ascontiguousarray(np.delete(rows, MEMORY, axis=1))
    found = [_C.ckpt_digest(places.view(np.uint8).reshape(-1))]
    for address, nbytes in zip(rows[:, MEMORY].tolist(), lengths.tolist(), strict=True):
        found.append(_C.ckpt_digest(bytes_at(address, nbytes).numpy()) if nbytes else (0, 0))
    return found
