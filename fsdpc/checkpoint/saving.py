"""Saving in four stages: plan, write, combine digests, publish. No rank gathers tensors.

Every rank computes the plan (where each tensor is, and which rank writes which elements) by itself.
The ranks exchange descriptions, digests and the values of ``extra`` and ``states``, but no shards;
with ``values=True`` they also exchange parts of quantized rows. Each step succeeds on all ranks or
on none.
"""

from __future__ import annotations

import gc
import json
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.decoded import Pieces, cut_rows, decoded
from fsdpc.checkpoint.digests import Digests, combine
from fsdpc.checkpoint.dtypes import can_cast
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.folders import Draft, sync
from fsdpc.checkpoint.kept import Reading, StateReading
from fsdpc.checkpoint.layout import FILE_BYTES, NBYTES, Layout, PlannedSet, fingerprint, lay_out
from fsdpc.checkpoint.model import Model
from fsdpc.checkpoint.names import Only, chooser, cut_model, cut_state
from fsdpc.checkpoint.optimizer import State, check_objects
from fsdpc.checkpoint.ranks import Ranks, check_equal
from fsdpc.checkpoint.steps import next_number
from fsdpc.checkpoint.unchanged import Unchanged
from fsdpc.checkpoint.values import dump, to_json
from fsdpc.checkpoint.write import jobs, joined, write_edges, write_job

OPTIMIZER = "optimizer"
OPTIMIZER_JSON = "optimizer/optimizer.json"
STATE_JSON = "fsdpc/state.json"
EXTRA_JSON = "fsdpc/extra.json"


@dataclass
class Plan:
    """The plan of a save. ``sets`` are the tensors of the model and, if there is an optimizer,
    those of its state. ``files`` has the contents of small files by path, only on rank 0.
    """

    target: Path
    sets: list[PlannedSet]
    files: dict[str, bytes]
    step: int | None
    overwrite: bool
    params: list[torch.Tensor]  # the parameters in the form that an optimizer gets
    parts: list[str] = field(default_factory=list)  # the subfolders with their own manifests
    metric: float | None = None
    published: int | None = None  # the manifest's number, see ``steps``; None: chosen at the end
    links: bool = True  # whether unchanged files are linked, see ``Unchanged``

    @property
    def layouts(self) -> list[Layout]:
        """The layout of each set."""
        return [each.layout for each in self.sets]


class Form(Protocol):
    """A form in which a model is saved: other names and shapes of tensors, and additional files."""

    def apply(self, model: nn.Module, found: Model) -> None:
        """Change the entries of ``found``. Local."""

    def files(self, dtype: torch.dtype | None) -> dict[str, bytes]:
        """Return the contents of the additional files by name; ``dtype`` is the argument of
        ``make_plan``. Local.
        """


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable Python's garbage collector during a block. A plan of many small tensors makes many
    new objects, most of which stay alive. Because of the new objects, the collector would scan all
    objects of the program again and again. These scans take a third of the processor time of a
    first save with AdamW's states.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_without_collections()
def make_plan(
    target: Path,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: dict[str, Any] | None,
    *,
    states: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None,
    step: int | None,
    overwrite: bool,
    file_bytes: int = FILE_BYTES,
    only: Only = None,
    form: Form | None = None,
    values: bool = False,
) -> Plan:
    """Plan a save. Collective. Raises ``CheckpointError`` if the ranks' models differ, or if a
    value cannot be saved.
    """
    what = f"planning checkpoint {target}"
    with ranks.step(what) as seen:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and can_cast(dtype)):
            raise TypeError(
                f"dtype must be torch.float32, bfloat16, float16 or float64, not {dtype!r}"
            )
        if step is not None and not isinstance(step, float):
            step = operator.index(step)  # JSON has neither NumPy's numbers nor tensors
        optimizer = check_objects(optimizer, scheduler, "state_dict")
        everyone, whole = (ranks.rank, ranks.world), only is None and form is None and not values
        read = Reading(model, everyone, dtype, file_bytes, whole=whole)
        seen.value = read.parts, cut_rows(read.entries) if values else None
    found = read.settled([parts for parts, _ in seen.values])
    held, state = None, State()
    if optimizer is not None:
        held = StateReading(optimizer, found, ranks, read, whole)
        state = held.state
    with ranks.step(what) as planned:
        if values:
            found.entries = decoded(found.entries, _agreed([cut for _, cut in seen.values]))
        if only is not None:
            cut_state(state, cut_model(found, chooser(only), only))
        if form is not None:
            form.apply(model, found)
        sets = [read.planned()]
        if held is not None:
            place: dict[str, Any] = {"name": OPTIMIZER, "folder": OPTIMIZER}
            sets.append(held.planned(lambda es: lay_out(es, file_bytes=file_bytes, **place)))
        planned.value = {
            "sets": fingerprint([each.layout for each in sets]),
            "target": str(target),
            "extra": json.dumps(to_json(extra, "extra")),
            "states": json.dumps(
                {name: to_json(each.state_dict(), name) for name, each in (states or {}).items()}
            ),
        }
        files = _files(ranks, found.extra, state, optimizer, scheduler)
        if form is not None and ranks.rank == 0:
            files |= form.files(dtype)
    check_equal(what, planned.values)
    if ranks.rank == 0:
        extras = [json.loads(planning["extra"]) for planning in planned.values]
        own = [json.loads(planning["states"]) for planning in planned.values]
        if any(each.keys() != own[0].keys() for each in own):
            raise CheckpointError(f"{what}: ranks give other states=")
        body = {"world": ranks.world, "ranks": extras}
        files[EXTRA_JSON] = dump(body | ({"states": _shared(own)} if own[0] else {}))
    return Plan(target, sets, files, step, overwrite, read.params)


def _agreed(cuts: list[Pieces | None]) -> list[Pieces]:
    found = [cut for cut in cuts if cut is not None]
    if len(found) < len(cuts):
        raise CheckpointError(f"rank {cuts.index(None)} saves without values=True, and others with")
    return found


def _shared(own: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a dict from each name to the list of all ranks' states of that name. If these states
    are equal, the list has only one of them.
    """
    found = {name: [each[name] for each in own] for name in own[0]}
    return {n: all[:1] if all.count(all[0]) == len(all) else all for n, all in found.items()}


def _files(
    ranks: Ranks, extra_state: dict[str, Any], state: State, optimizer: Any, scheduler: Any
) -> dict[str, bytes]:
    if ranks.rank != 0:
        return {}
    scheduled = None if scheduler is None else scheduler.state_dict()
    body = {
        "extra_state": to_json(extra_state, "get_extra_state()"),
        "scheduler": to_json(scheduled, "the scheduler's state"),
    }
    files = {STATE_JSON: dump(body)}
    if optimizer is not None:
        groups = json.dumps(to_json(state.groups, "param_groups"))
        text = f'{{"kinds": {state.kinds_text}, "param_groups": {groups}}}\n'
        files[OPTIMIZER_JSON] = text.encode()
    return files


# --- writing -------------------------------------------------------------------------------------

Advance = Callable[[int], object]


def write_plan(
    plan: Plan,
    ranks: Ranks,
    *,
    advance: Advance | None = None,
    failpoint: Callable[[str], object] | None = None,
    unchanged: Unchanged | None = None,
) -> None:
    """Write and publish what was planned. Collective over ``ranks``. If ``Unchanged.look`` was
    already called for this plan, ``unchanged`` is the ``Unchanged`` on which it was called.

    ``advance`` is called with the number of bytes of each part that this rank has written.
    ``failpoint`` is for tests; it is called before each step with the name of the step. Raises
    ``CheckpointError`` if a rank fails; the target is then what it was before.
    """
    what = f"saving checkpoint {plan.target}"
    reach = failpoint or (lambda name: None)
    draft: Draft | None = None
    try:
        unchanged = Unchanged(plan.target, ranks) if unchanged is None else unchanged
        unchanged.look(plan, what, lambda: reach("create"))
        with ranks.step(what) as created:
            reach("create")
            if ranks.rank == 0:
                draft = Draft(plan.target, plan.overwrite)
                for layout in plan.layouts:
                    for file in layout.files:
                        if not unchanged.link(draft, layout.path(file)):
                            draft.create(layout.path(file), file.nbytes, file.header)
                created.value = str(draft.path)
        folder = Path(created.values[0])
        parts = _write_ranges(plan, ranks, folder, what, advance, reach, unchanged)
        with ranks.step(what):
            reach("finish")
            if draft is not None:
                made = _manifest.Manifest(
                    plan.step, ranks.world, published=plan.published, metric=plan.metric
                )
                sets = _digested(plan, parts)
                finish(draft, sets, plan.files, made, reach, plan.parts, unchanged.parts)
        unchanged.keep(folder.name)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def _write_ranges(
    plan: Plan,
    ranks: Ranks,
    folder: Path,
    what: str,
    advance: Advance | None,
    reach: Callable[[str], object],
    unchanged: Unchanged,
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Write the ranges of files that this rank has to write. Returns, for each set and each rank,
    the fragments that the rank has written or left unchanged, and their digests.
    """
    several = len(ranks.hosts) > 1
    with ranks.step(what) as written:
        own = []
        for planned in plan.sets:
            paths = [planned.layout.path(file) for file in planned.layout.files]
            found = [unchanged.parts[path] for path in paths if path in unchanged.parts]
            if advance is not None:
                advance(sum(int(part[:, NBYTES].sum()) for part, _ in found))
            for job in jobs(folder, planned):
                reach("write")
                found.append(write_job(job, skip_edges=several))
                unchanged.add(str(job.path.relative_to(folder)), found[-1])
                if advance is not None:
                    advance(int(job.rows[:, NBYTES].sum()))
            own.append(joined(found))
        reach("sync")
        sync(_tensor_files(plan, folder))
        written.value = own
    if several:
        _write_edges_in_turns(plan, ranks, folder, what)
    return [[received[i] for received in written.values] for i in range(len(plan.sets))]


def _write_edges_in_turns(plan: Plan, ranks: Ranks, folder: Path, what: str) -> None:
    """Write the pages that ranges of several hosts share, one host after the other. A network file
    system writes whole pages. If two hosts wrote one page at once, the values of one host would be
    lost.
    """
    for host in range(len(ranks.hosts)):
        with ranks.step(what):
            if ranks.host == host:
                for planned in plan.sets:
                    for job in jobs(folder, planned):
                        write_edges(job)
                sync(_tensor_files(plan, folder))


def _digested(
    plan: Plan, parts: list[list[tuple[np.ndarray, np.ndarray]]]
) -> list[tuple[Layout, Digests]]:
    return [
        (layout, combine([place for file in layout.files for place in file.places], received))
        for layout, received in zip(plan.layouts, parts, strict=True)
    ]


def _tensor_files(plan: Plan, folder: Path) -> list[Path]:
    return [folder / layout.path(file) for layout in plan.layouts for file in layout.files]


def finish(
    draft: Draft,
    sets: Sequence[tuple[Layout, Digests]],
    files: dict[str, bytes],
    made: _manifest.Manifest,
    reach: Callable[[str], object] = lambda name: None,
    parts: Sequence[str] = (),
    linked: Container[str] = (),
) -> None:
    """Write the lengths of headers, the indexes, small files and the manifest; then publish the
    folder. Local: only the rank that has the draft calls this function, after the tensors' bytes
    are durable.
    """
    files = dict(files)
    written = []
    for layout, digests in sets:
        made.add_set(layout, digests)
        files[layout.path(layout.index_name)] = layout.index
        for file in layout.files:
            reach("header")
            if layout.path(file) not in linked:
                draft.write_length(layout.path(file), file.header)
            written.append(draft.path / layout.path(file))
    for path, content in files.items():
        draft.write_file(path, content)
        made.add_file(path, content)
        written.append(draft.path / path)
    reach("manifest")
    if parts:
        _manifest.split(made, parts, draft.write_file)
        written += [draft.path / part / _manifest.NAME for part in parts]
    if made.published is None:
        made.published = next_number(draft.target)
    draft.write_file(_manifest.NAME, made.encode())
    reach("publish")
    draft.publish([*written, draft.path / _manifest.NAME])
    reach("end")
