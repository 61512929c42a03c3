"""Loading: compare everything, verify checksums, read into place.

Each rank reads only the ranges of its own elements, straight into its shard. Nothing is written
into the model or the optimizer before names, shapes, dtypes and (by default) all checksums were
compared on all ranks. The ranks divide the verification of checksums: each byte is verified by one
rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fsdpc import _C
from fsdpc._companions.spans import whole_span
from fsdpc._engine.root import forget_lost
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.digests import combine, combine_parts
from fsdpc.checkpoint.dtypes import can_cast
from fsdpc.checkpoint.entries import Entry, parts_of_some, settle
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import BLOCK_BYTES, NBYTES, OFFSET, Place, fragments
from fsdpc.checkpoint.model import Model, read_model, set_extra
from fsdpc.checkpoint.names import Only, Rename, chooser, chosen_names, cut_groups, renamer
from fsdpc.checkpoint.opened import Opened, StoredFile
from fsdpc.checkpoint.optimizer import (
    NewState,
    check_objects,
    check_options,
    make_state,
    params_of,
)
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import EXTRA_JSON, joined
from fsdpc.checkpoint.staging import by_device, in_host_memory
from fsdpc.checkpoint.state_keys import check_keys
from fsdpc.checkpoint.storage import MOST_AT_ONCE, AnyPath, RemoteFile
from fsdpc.checkpoint.torch_files import TorchFiles, open_any
from fsdpc.checkpoint.trial import try_states
from fsdpc.checkpoint.values import from_json
from fsdpc.checkpoint.write import rows_of, waves

Verify = Literal["before", "during", "no"]
Found = Opened | TorchFiles
_FILES_AT_ONCE = 4
_WAVE_BYTES = 256 << 20  # largest number of bytes that one call reads without a check for signals
_COLUMNS = 6
_MOST_NAMED = 20
_ATTEMPTS = 10


@dataclass
class Loaded:
    """The result of ``load``. ``world`` is the number of ranks that saved. ``extra`` is what this
    rank saved as ``extra``, or ``None`` if another number of ranks saved; ``extras`` has what every
    rank saved. ``missing`` lists names that the checkpoint lacks, ``unexpected`` names that the
    model lacks. ``verified`` is True if checksums were compared. ``metric`` is the value that
    ``Checkpointer.save`` was given.
    """

    path: AnyPath
    step: int | None
    world: int
    extra: Any
    extras: list[Any]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    verified: bool = False
    metric: float | None = None


@dataclass
class Work:
    """The entries that this rank reads, each with its place in a file. ``pairs`` has, for
    each loaded tensor, its name in the model and its name in the checkpoint; the list must be equal
    on all ranks.
    ``shared`` has the places that several ranks read whole; all ranks have the same list.
    """

    items: list[tuple[Entry, StoredFile, Place]]
    pairs: list[tuple[str, str]]
    shared: list[tuple[StoredFile, Place]] = field(default_factory=list)


def run_load(*args: Any, **options: Any) -> Loaded:
    """Run ``load_steps`` to its end. Returns what was loaded."""
    *_, loaded = load_steps(*args, **options)
    assert loaded is not None
    return loaded


def load_steps(
    path: AnyPath,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    *,
    strict: bool,
    cast: bool,
    verify: Verify,
    only: Only = None,
    rename: Rename = None,
    states: Mapping[str, Any] | None = None,
    holds_model: bool = True,
    digest: int | None = None,
) -> Iterator[Loaded | None]:
    """Load a checkpoint in two steps; see ``fsdpc.checkpoint.load``. Yields ``None`` when
    everything is checked and nothing is changed yet, and a ``Loaded`` at the end. Collective.

    ``holds_model`` is False for a part of a checkpoint that has an optimizer's state but no tensors
    of the model. ``digest`` is given for a part of a checkpoint: the digest of the part's manifest
    according to the manifest of the whole checkpoint.
    """
    what = f"loading checkpoint {path}"
    with ranks.step(what) as seen:
        if verify not in ("before", "during", "no"):
            raise ValueError(f"verify must be 'before', 'during' or 'no', not {verify!r}")
        chosen, own_name = chooser(only), renamer(rename)
        optimizer = check_objects(optimizer, scheduler, "load_state_dict")
        target = read_model(model, (ranks.rank, ranks.world))
        seen.value = parts_of_some(target.entries, ranks.world)
    settle(target.entries, seen.values, ranks.rank)
    found = open_together(path, ranks, what)
    compares = found.manifest is not None and verify != "no"
    with ranks.step(what) as matched:
        if digest is not None and (found.manifest is None or found.manifest.digest != digest):
            raise CheckpointError(f"{path} is not the part that the manifest above it names")
        kept = chosen_names(target, chosen, only)
        where = _renamed(found, own_name)
        _refuse_parts(found, target)
        work, missing, unexpected = Work([], []), [], []
        if holds_model:
            work, missing, unexpected = match(where, target, cast, kept, chosen)
        if strict and (missing or unexpected):
            raise CheckpointError(difference(missing, unexpected))
        if target.unwritten and only is None and holds_model:
            if strict:
                raise CheckpointError(_never_written(target.unwritten))
            missing += target.unwritten
        works = [work]
        state = None
        if optimizer is not None:
            taken = dict(work.pairs)
            state, more = _match_optimizer(
                found, target, optimizer, strict, (kept, chosen), own_name, taken
            )
            works.append(more)
        loaded, scheduled, extra_state = _read_values(found, ranks, scheduler, own_name)
        given = _read_states(found, ranks, states or {})
        loaded.missing, loaded.unexpected = missing, unexpected
        wanted = {
            key: extra_state[key]
            for key in target.extra
            if holds_model and key in extra_state and chosen(key)
        }
        try_states(model, wanted, target.extra, scheduler, scheduled)
        meant = ([part.pairs for part in works], missing, unexpected, verify)
        matched.value = _C.ckpt_crc32c(repr(meant).encode(), 0)
    check_equal(matched.values, what)
    if found.manifest is not None and verify == "before":
        verify_all(works, found, ranks, what)
    yield None
    with ranks.step(f"{what}: values were being read, so the model must not be used") as read:
        read.value = [read_into(part, found, compares) for part in works]
        found.check_unwritten()
    if compares:
        with ranks.step(what):
            parts = [[received[i] for received in read.values] for i in range(len(works))]
            _compare_read(works, found, parts)
    with ranks.step(what):
        for tensor in target.touched if holds_model else ():
            torch.autograd.graph.increment_version(tensor)
        if holds_model:
            forget_lost(model)
        if optimizer is not None and state is not None:
            state.give(optimizer)
        if scheduler is not None:
            scheduler.load_state_dict(scheduled)
        set_extra(model, wanted)
        for name, value in given.items():
            (states or {})[name].load_state_dict(value)
    loaded.verified = compares
    yield loaded


def _refuse_parts(found: Found, target: Model) -> None:
    """Raise ``CheckpointError`` if the checkpoint has several models and the caller gives one."""
    parts = list(parts_in(found)) if target.entries else []
    if parts:
        raise CheckpointError(
            f"{found.path} has the parts {parts}: give a dict with names of theirs, or load the "
            f"folder {found.path / parts[0]}"
        )


def parts_in(found: Found) -> dict[str, int]:
    """Return the names of the parts of a checkpoint of several models, each with the digest of the
    part's manifest. Local.
    """
    if found.manifest is None:
        return {}
    ending = f"/{_manifest.NAME}"
    files = found.manifest.files.items()
    return {path.removesuffix(ending): crc for path, (_, crc) in files if path.endswith(ending)}


def _read_states(found: Found, ranks: Ranks, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of each object in ``states``: this rank's state, if each rank saved
    its own. Raises ``CheckpointError`` if a state is missing, or if each rank saved its own state
    and another number of ranks saved.
    """
    if not states:
        return {}
    table: dict[str, Any] = {}
    if found.manifest is not None:
        table = found.read_json(EXTRA_JSON).get("states", {})
    given = {}
    for name in states:
        forms = table.get(name)
        if not forms:
            raise CheckpointError(f"{found.path} has the states {sorted(table)}, not {name!r}")
        if len(forms) not in (1, ranks.world):
            raise CheckpointError(
                f"the state of {name!r} was saved by {len(forms)} ranks, which had their own each, "
                f"and {ranks.world} load it: load without it"
            )
        form = forms[0 if len(forms) == 1 else ranks.rank]
        given[name] = from_json(form, f"{name!r} in {found.path / EXTRA_JSON}")
    return given


def open_together(path: AnyPath, ranks: Ranks, what: str, *, links: bool = False) -> Found:
    """Open the same checkpoint on every rank. If another process replaces the checkpoint meanwhile,
    open it again. Raises ``CheckpointError`` if the ranks see different files.
    """
    for _ in range(_ATTEMPTS):
        with ranks.step(what) as opened:
            found = open_any(path, links=links)
            own = found.stamp if found.manifest is None else None  # a manifest's digest is enough
            opened.value = _identity(found), ranks.host, repr(own)
        same = all(identity == opened.values[0][0] for identity, _, _ in opened.values)
        hosts = {host for _, host, _ in opened.values}
        if same and len({(host, stamp) for _, host, stamp in opened.values}) == len(hosts):
            return found
    if not same:
        raise CheckpointError(f"{what}: the ranks see different files under this path")
    return found  # equal files, but each rank has its own copy of them


def _identity(found: Found) -> int:
    if found.manifest is not None:
        return found.manifest.digest  # the manifest contains the digests of all headers
    crc = 0
    for stored in found.sets.values():
        for name, (file, place) in stored.where.items():
            crc = _C.ckpt_crc32c(repr((name, file.name, place)).encode(), crc)
    return crc


def check_equal(digests: Sequence[int], what: str) -> None:
    """Raise ``CheckpointError`` if ranks load different tensors, or load them under other names."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        named = f"rank {others[0]} loads" if len(others) == 1 else f"ranks {others} load"
        raise CheckpointError(
            f"{what}: {named} other tensors than rank 0, or under other names: give every rank the "
            "same model, optimizer=, only=, rename= and verify="
        )


# --- what is compared ----------------------------------------------------------------------------


_QUANTISE = "load_pretrained quantises while it reads"
_DECODE = "make values of it (python -m fsdpc.checkpoint convert --values)"


def match(
    where: Mapping[str, tuple[StoredFile, Place]],
    target: Model,
    cast: bool,
    kept: set[str],
    chosen: Callable[[str], bool],
) -> tuple[Work, list[str], list[str]]:
    """Return the model's entries with their places in the files, the names that are missing from
    the files, and the names that the model does not have. Raises ``CheckpointError`` if shapes or
    dtypes differ.
    """
    names: dict[str, list[str]] = {entry.name: [entry.name] for entry in target.entries}
    for alias, name in target.aliases.items():
        names[name].append(alias)
    items, missing, problems, castable, shapes = [], [], [], False, False
    for entry in target.entries:
        if entry.name not in kept:
            continue
        name = next((name for name in names[entry.name] if name in where), None)
        if name is None:
            missing.append(entry.name)
            continue
        file, place = where[name]
        problem = _problem(entry, place, cast)
        if problem is None:
            items.append((entry, file, place))
        else:
            problems.append(problem)
            castable |= _problem(entry, place, True) is None
            coded = entry.coding is not None or place.coding is not None
            shapes |= tuple(place.shape) != tuple(entry.shape) and not coded
    if problems:
        text = "; ".join(shortened(problems))
        hint = " (cast=True converts floats of 16, 32 and 64 bits)" if castable else ""
        if shapes:
            hint += (
                " (strict=False leaves out names, not shapes: give a new head another name, or "
                "replace the old one after the load)"
            )
        raise CheckpointError(text + hint)
    known = {name for some in names.values() for name in some}
    unexpected = [name for name in where if name not in known and chosen(name)]
    pairs = [(entry.name, place.name) for entry, _, place in items]
    return Work(items, pairs), missing, unexpected


def _renamed(found: Found, own_name: Callable[[str], str]) -> dict[str, tuple[StoredFile, Place]]:
    where: dict[str, tuple[StoredFile, Place]] = {}
    for stored, place in found.model.where.items():
        name = own_name(stored)
        if name in where:
            raise CheckpointError(f"rename gives two tensors the name {name!r}, one is {stored!r}")
        where[name] = place
    return where


def _problem(entry: Entry, place: Place, cast: bool) -> str | None:
    if entry.home is not None and _shares_elements(entry.home):
        return (
            f"{entry.name} of shape {entry.shape} is expanded, and its elements share memory, so "
            "that nothing can be loaded into it: register a clone(), or persistent=False"
        )
    ours, theirs = entry.coding, place.coding
    if ours is not None and place.dtype.is_floating_point:
        return f"{entry.name} has values in the checkpoint, {ours.codec} here: {_QUANTISE}"
    if theirs is not None and entry.dtype.is_floating_point:
        return f"{entry.name} is in {theirs.codec} in the checkpoint, {entry.dtype} here: {_DECODE}"
    if ours and theirs and (ours.codec, ours.row) != (theirs.codec, theirs.row):
        forms = [f"rows of {each.row} values in {each.codec}" for each in (theirs, ours)]
        return f"{entry.name} has {forms[0]} in the checkpoint, {forms[1]} here"
    if tuple(place.shape) != tuple(entry.shape):
        return f"{entry.name} has shape {tuple(place.shape)} in the checkpoint, {entry.shape} here"
    if place.dtype == entry.dtype:
        return None
    if cast and can_cast(entry.dtype) and can_cast(place.dtype) and not entry.exact:
        return None
    return f"{entry.name} has {place.dtype} in the checkpoint, {entry.dtype} here"


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Return True if ``copy_`` into the tensor would raise, because its elements share memory. The
    load checks this before it overwrites other tensors.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def difference(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    texts = []
    if missing:
        texts.append(f"missing from the checkpoint: {', '.join(shortened(missing))}")
    if unexpected:
        texts.append(f"only in the checkpoint: {', '.join(shortened(unexpected))}")
    return "; ".join(texts) + " (strict=False loads what fits)"


def _never_written(names: Sequence[str]) -> str:
    return (
        f"no checkpoint holds these buffers, which are not persistent, and nobody has written them "
        f"since to_empty() or the meta device: {', '.join(shortened(names))}. Compute them first "
        "(as the module's __init__ or reset_parameters does), or make the model on its device "
        "(strict=False loads the rest and names them in `missing`)"
    )


def shortened(names: Sequence[str]) -> list[str]:
    more = len(names) - _MOST_NAMED
    return list(names[:_MOST_NAMED]) + ([f"and {more} more"] if more > 0 else [])


def _match_optimizer(
    found: Found,
    target: Model,
    optimizer: torch.optim.Optimizer,
    strict: bool,
    meant: tuple[set[str], Callable[[str], bool]],
    own_name: Callable[[str], str],
    taken: dict[str, str],
) -> tuple[NewState, Work]:
    """Return the optimizer's new state, and the entries of its tensors with their places. ``meant``
    has the chosen names of the model, and the function that chooses other names. ``taken`` has for
    each loaded name of the model the name of the stored tensor.
    """
    if found.optimizer is None:
        raise CheckpointError(f"{found.path} holds no optimizer state: load without optimizer=")
    shapes = {entry.name: entry.shape for entry in target.entries}
    held = [[param.names for param in group] for group in params_of(optimizer, target)]
    if found.numbered:
        own_name = _by_number(found, held)
    first = {name: name for name in shapes} | target.aliases
    kept, chosen = set(meant[0]), meant[1]

    def known_name(stored: str) -> str:
        name = own_name(stored)
        return first.get(name, name)

    forms, groups = found.optimizer_forms(lambda name: shapes.get(known_name(name)))
    stored_names = list(dict.fromkeys([*forms, *(n for g in groups for n in g["params"])]))
    left = _second_states(stored_names, own_name, known_name, taken)
    for group in groups:
        group["params"] = [known_name(name) for name in group["params"] if name not in left]
    kinds: dict[str, dict[str, Any]] = {}
    where: dict[str, tuple[StoredFile, Place]] = {}
    shared = []
    for stored, form in forms.items():
        name = known_name(stored)
        if stored in left or (name not in kept and (name in shapes or not chosen(name))):
            continue
        kinds[name] = form
        for key, kind in form.items():
            if kind in ("cut", "whole") or kind[0] == "blocks":
                full = f"state.{stored}.{key}"
                if full not in found.optimizer.where:
                    raise CheckpointError(f"{found.path} has no tensor {full!r}")
                where[f"state.{name}.{key}"] = found.optimizer.where[full]
                if kind == "whole":
                    shared.append(found.optimizer.where[full])
    kept |= {name for group in groups for name in group["params"] if chosen(name)} - shapes.keys()
    cut_groups(groups, kept)
    if strict:
        saved = {name for group in groups for name in group["params"]}
        ours = {name for group in held for names in group for name in names if name in kept}
        if saved != ours:
            text = difference(sorted(ours - saved), sorted(saved - ours))
            raise CheckpointError(f"parameters of the optimizer: {text}")
        check_options(optimizer, groups)
        check_keys(optimizer, target, kinds, groups, kept)
    if isinstance(found, TorchFiles) and (strict or target.everyone[1] > 1):
        _refuse_tables(found.path, kinds, where, shapes, target.everyone[1])
    dtypes = {name: (place.dtype, tuple(place.shape)) for name, (_, place) in where.items()}
    state = make_state(optimizer, target, kinds, groups, dtypes, kept)
    items = [(entry, *where[entry.name]) for entry in state.entries]
    pairs = sorted((name, place.name) for name, (_, place) in where.items())
    return state, Work(items, pairs, shared)


def _second_states(
    stored_names: Sequence[str],
    own_name: Callable[[str], str],
    known_name: Callable[[str], str],
    taken: dict[str, str],
) -> set[str]:
    """Return stored names whose states are not loaded. If a parameter is tied now but was not tied
    when the checkpoint was saved, the checkpoint has a state under each of the parameter's names.
    Only one of these states is loaded. Raises ``CheckpointError`` if it is unclear which state to
    load.
    """
    found: dict[str, list[str]] = {}
    for stored in stored_names:
        found.setdefault(known_name(stored), []).append(stored)
    left: set[str] = set()
    for name, several in found.items():
        if len(several) == 1:
            continue
        wanted = own_name(taken[name]) if name in taken else name
        first = [stored for stored in several if own_name(stored) == wanted]
        if len(first) != 1:
            raise CheckpointError(
                f"the optimizer states of {several[0]!r} and {several[1]!r} would both be that of "
                f"{name!r}: rename= must give each another name"
            )
        left |= set(several) - set(first)
    return left


def _by_number(found: Found, held: list[list[list[str]]]) -> Callable[[str], str]:
    """Return a function from the numbers in an optimizer's ``state_dict()`` to names. Parameters
    are numbered in the order of the groups, as for ``load_state_dict``.
    """
    _, groups = found.optimizer_forms(lambda name: None)
    counts = [len(group["params"]) for group in groups]
    if counts != [len(group) for group in held]:
        raise CheckpointError(
            f"{found.path} has parameters by number, in groups of {counts}; the optimizer has "
            f"groups of {[len(group) for group in held]}"
        )
    if any(len(names) != 1 for group in held for names in group):
        raise CheckpointError(
            f"{found.path} has parameters by number, and the optimizer holds flat parameters, of "
            "which each has several: wrap with use_orig_params=True"
        )
    numbers = [number for group in groups for number in group["params"]]
    names = [name for group in held for (name,) in group]
    return dict(zip(numbers, names, strict=True)).__getitem__


def _refuse_tables(
    path: AnyPath,
    kinds: dict[str, dict[str, Any]],
    where: dict[str, tuple[StoredFile, Place]],
    shapes: dict[str, tuple[int, ...]],
    world: int,
) -> None:
    """Raise ``CheckpointError`` if a state has neither one element per element of its parameter nor
    a single element. This check also detects parameters that are in another order than when they
    were saved, if their shapes differ.
    """
    places = [(name, key, kind, where[f"state.{name}.{key}"][1])
              for name, form in kinds.items() for key, kind in form.items()
              if kind in ("cut", "whole")]  # fmt: skip
    by_element = {key for _, key, kind, place in places
                  if kind == "cut" and place.nbytes > place.dtype.itemsize}  # fmt: skip
    for name, key, kind, place in places:
        several = place.nbytes > place.dtype.itemsize
        if kind == "whole" and name in shapes and (several or key in by_element):
            raise CheckpointError(
                f"{path}: {place.name!r} has shape {place.shape}, and parameter {name!r} "
                f"{shapes[name]}, so that it has not one element per element: are the optimizer's "
                "parameters in the order in which they were saved? "
                + ("Ranks cannot share such a state: load it on one rank" if world > 1 else
                   "strict=False takes such a state as it is")
            )  # fmt: skip


def _read_values(
    found: Found, ranks: Ranks, scheduler: Any, own_name: Callable[[str], str]
) -> tuple[Loaded, Any, dict[str, Any]]:
    """Return a ``Loaded`` whose ``missing`` and ``unexpected`` are still empty, the scheduler's
    state, and the extra states by the model's keys.
    """
    extra_state: dict[str, Any] = {}
    for stored, value in found.extra_states().items():
        key = own_name(stored)
        if key in extra_state:
            raise CheckpointError(
                f"rename gives two extra states the name {key!r}, one is {stored!r}"
            )
        extra_state[key] = value
    scheduled = None
    if scheduler is not None:
        scheduled = found.scheduler_state()
        if scheduled is None:
            raise CheckpointError(f"{found.path} holds no scheduler state: load without scheduler=")
    if found.manifest is None:
        return Loaded(found.path, None, 1, None, []), scheduled, extra_state
    body = found.read_json(EXTRA_JSON)
    extras = [from_json(form, f"extra in {found.path / EXTRA_JSON}") for form in body["ranks"]]
    extra = extras[ranks.rank] if len(extras) == ranks.world else None
    loaded = Loaded(found.path, found.manifest.step, len(extras), extra, extras)
    loaded.metric = found.manifest.metric
    return loaded, scheduled, extra_state


# --- checksums -----------------------------------------------------------------------------------


def verify_all(works: Sequence[Work], found: Found, ranks: Ranks, what: str) -> None:
    """Read everything that will be loaded, each byte on one rank, and compare the digests."""
    with ranks.step(what) as checked:
        checked.value = [_read_digests(work, ranks) for work in works]
    with ranks.step(what):
        for i, work in enumerate(works):
            _compare(work, found, [received[i] for received in checked.values])


def _read_digests(work: Work, ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
    tables: dict[str, tuple[StoredFile, list[np.ndarray]]] = {}
    shared = {place.index for _, place in work.shared}
    chosen = [
        (place, file, entry, entry.own(place.index, reading=True))
        for entry, file, place in work.items
        if place.index not in shared
    ]
    for file, place in work.shared:
        if place.index % ranks.world == ranks.rank:
            entry = Entry(place.name, place.shape, place.dtype, torch.empty(0, device="cpu"))
            chosen.append((place, file, entry, whole_span(entry.numel)))
    for place, file, entry, spans in chosen:
        _, rows = tables.setdefault(file.name, (file, []))
        rows.append(rows_of(place, entry, spans, memory=0))
    return joined(_read_tables(tables))


def _compare_read(
    works: Sequence[Work],
    found: Found,
    parts: list[list[tuple[np.ndarray, np.ndarray]]],
) -> None:
    """Compare the digests of the bytes that all ranks have read into the model."""
    try:
        for work, received in zip(works, parts, strict=True):
            rows, crcs = _without_doubles(work, received)
            # A flat parameter that covers several parameters has one ``step``. The ``step`` is read
            # only under the name of the first of these parameters.
            read = {int(index) for index in rows[:, 0]}
            shared = [(file, place) for file, place in work.shared if place.index in read]
            _compare(Work(work.items, [], shared), found, [(rows, crcs)])
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; the model's values were overwritten and must not be used"
        ) from error


def _without_doubles(
    work: Work, received: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return all fragments; a fragment that several replicas have read is listed once. Raises
    ``CheckpointError`` if replicas have read different bytes.
    """
    rows, crcs = joined(received)
    keyed = np.concatenate([rows, crcs[:, None].astype(np.int64)], axis=1)
    keyed = np.unique(keyed, axis=0)
    places = np.ascontiguousarray(keyed[:, :3])
    differ = np.flatnonzero((places[1:] == places[:-1]).all(axis=1))
    if len(differ):
        index, begin, _ = places[differ[0]].tolist()
        names = {
            place.index: f"{file.path}: tensor {place.name!r}" for _, file, place in work.items
        }
        raise CheckpointError(
            f"{names.get(index, 'a tensor')} is damaged: ranks have read different bytes at {begin}"
        )
    return places, keyed[:, 3].astype(np.uint32)


def _compare_lent(work: Work, found: Found, read: tuple[np.ndarray, np.ndarray]) -> None:
    """Verify the few bytes that this rank has read but another rank writes (``Entry.borrowed``).
    Read the whole block that contains these bytes. Compare the block's digest with the manifest.
    Compare the digest of these bytes in the block with the digest in ``read``, which is that of the
    bytes that were read before.
    """
    assert found.manifest is not None
    places = {place.index: (file, place) for _, file, place in work.items}
    for (index, begin, count), crc in zip(read[0].tolist(), read[1].tolist(), strict=True):
        file, place = places[index]
        block = begin // BLOCK_BYTES
        low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, place.nbytes)
        edges = np.array([low, begin, begin + count, high])
        item = place.dtype.itemsize
        spans = np.stack([edges[:-1] // item, 0 * edges[:-1], np.diff(edges) // item], axis=1)
        entry = Entry(place.name, place.shape, place.dtype, torch.empty(0, device="cpu"))
        rows = rows_of(place, entry, spans[spans[:, 2] > 0], memory=0)
        parts, crcs = read_table(file, rows)
        (own,) = crcs[parts[:, 1] == begin].tolist()
        whole = combine_parts(crcs, parts[:, 2])
        if own != crc or whole != found.manifest.tensors[file.name][place.name].blocks[block]:
            raise CheckpointError(
                f"{file.path}: tensor {place.name!r} is damaged: the checksum of block {block} "
                f"(bytes {place.offset + low} and on) differs"
            )


def _compare(work: Work, found: Found, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    assert found.manifest is not None
    places = {place.index: (file, place) for _, file, place in work.items}
    places |= {place.index: (file, place) for file, place in work.shared}
    order = [place for _, place in places.values()]
    for digest, (file, place) in zip(combine(order, parts), places.values(), strict=True):
        known = found.manifest.tensors[file.name][place.name]
        if digest != known:
            pairs = enumerate(zip(digest.blocks, known.blocks, strict=True))
            block = next((n for n, (a, b) in pairs if a != b), 0)
            raise CheckpointError(
                f"{file.path}: tensor {place.name!r} is damaged: the checksum of block {block} "
                f"(bytes {place.offset + block * BLOCK_BYTES} and on) differs"
            )


# --- reading -------------------------------------------------------------------------------------


def read_into(
    work: Work, found: Found, compares: bool, advance: Callable[[int], object] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read this rank's elements into their memory. Returns fragments (see ``layout.fragments``)
    and their digests. ``advance`` is called with the number of bytes of each part that is read into
    host memory.
    """
    tables: dict[str, tuple[StoredFile, list[np.ndarray]]] = {}
    done = []
    for entry, file, place in work.items:
        if not in_host_memory(entry):
            continue
        _, rows = tables.setdefault(file.name, (file, []))
        rows.append(rows_of(place, entry, entry.spans))
    done += _read_tables(tables, advance)
    away = [item for item in work.items if not in_host_memory(item[0])]
    done += _read_to_devices(away)
    lent = _read_to_devices(away, borrowed=True)
    for entry, file, place in work.items:
        if len(entry.borrowed) and in_host_memory(entry):
            lent.append(read_rows(file, rows_of(place, entry, entry.borrowed)))
    if compares:
        _compare_lent(work, found, joined(lent))
    for entry, _, _ in work.items:
        if entry.home is not None:
            entry.home.copy_(entry.memory.view(entry.home.shape))
    return joined(done)


def _read_tables(
    tables: dict[str, tuple[StoredFile, list[np.ndarray]]],
    advance: Callable[[int], object] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read tables of ranges, several files at a time."""

    stopped = threading.Event()

    def read_file(item: tuple[StoredFile, list[np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        file, rows = item
        table = np.concatenate(rows)
        table = table[np.argsort(table[:, OFFSET], kind="stable")]
        most = MOST_AT_ONCE if isinstance(file.held, RemoteFile) else _WAVE_BYTES
        parts = takewhile(lambda _: not stopped.is_set(), waves(table, most))
        return [read_part(file, part) for part in parts]

    def read_part(file: StoredFile, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = read_rows(file, part)
        if advance is not None:
            advance(int(part[:, NBYTES].sum()))
        return found

    if len(tables) <= 1:
        return [part for item in tables.values() for part in read_file(item)]
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(tables))) as pool:
        try:
            return [part for parts in pool.map(read_file, tables.values()) for part in parts]
        finally:
            stopped.set()  # after an error or Ctrl-C the other files are not read to their end


def read_rows(file: StoredFile, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read ranges, and return fragments and their digests as ``read_table`` does. The result is
    empty if the file is not safetensors.
    """
    if file.read is None:
        return read_table(file, rows)
    file.read(rows)
    return joined([])


def read_table(file: StoredFile, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read one table of ranges of a safetensors file. Returns fragments and their digests."""
    if isinstance(file.held, RemoteFile):
        held = file.held
        return joined(_read_fetched(file, part, held) for part in waves(rows, MOST_AT_ONCE))
    assert file.held is not None
    return _read_from(file, rows, file.held.fd)


def _read_fetched(
    file: StoredFile, rows: np.ndarray, held: RemoteFile
) -> tuple[np.ndarray, np.ndarray]:
    with held.fetched(rows) as fd:
        return _read_from(file, rows, fd)


def _read_from(file: StoredFile, rows: np.ndarray, fd: int) -> tuple[np.ndarray, np.ndarray]:
    parts = fragments(rows)
    digests = np.zeros(len(parts), dtype=np.uint32)
    table = np.ascontiguousarray(rows[:, :_COLUMNS])
    _C.ckpt_read(str(file.path), table, BLOCK_BYTES, digests, fd)
    return parts, digests


def _read_to_devices(
    items: Sequence[tuple[Entry, StoredFile, Place]], *, borrowed: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read into the memory of GPUs through staging buffers. At the end torch's current stream waits
    for the copies; the host does not.
    """
    files: dict[str, tuple[StoredFile, list[tuple[Entry, np.ndarray]]]] = {}
    for entry, file, place in items:
        rows = rows_of(place, entry, entry.borrowed if borrowed else entry.spans)
        files.setdefault(file.name, (file, []))[1].append((entry, rows))
    found = []
    for file, tables in files.values():
        for staging, table in by_device(tables):
            found += list(staging.rows_in(table, partial(read_rows, file)))
            staging.joined()
    return found
