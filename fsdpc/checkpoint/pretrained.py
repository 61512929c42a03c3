"""Loading of pretrained models from folders of files directly into shards.

Every rank reads its own ranges of the files. Key maps and transformers' tables give the tensors
their names in the model. The modules' own code initialises what no file has (``fresh.py``).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._engine import empties
from fsdpc._engine.root import forget_lost
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._fsdp1.materialize import retie, tied_sites
from fsdpc._fsdp1.names import clean_fqn, cleaner, join
from fsdpc._fsdp2.state import states_below
from fsdpc.checkpoint import loading, torch_fsdp
from fsdpc.checkpoint.dcp_folder import Stored
from fsdpc.checkpoint.entries import parts_of_some, settle
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.fresh import (
    Init,
    bare,
    initialise,
    plain_meta,
    put,
    sentinel,
    shadow_of,
    take,
)
from fsdpc.checkpoint.keymap import (
    KeyMap,
    Mapped,
    Where,
    apply_library,
    apply_maps,
    ignored,
    lazy_of,
    library_model,
    names_inside,
)
from fsdpc.checkpoint.layout import Place
from fsdpc.checkpoint.lazy import Coded, Lazy
from fsdpc.checkpoint.model import Model, named_buffers, read_model
from fsdpc.checkpoint.names import Only, Rename, chooser, chosen_names, renamer
from fsdpc.checkpoint.progress import read_bar
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.storage import local_path
from fsdpc.checkpoint.torch_files import stored_file
from fsdpc.lowbit import can_encode

_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POLL_S = 5.0


@dataclass
class Pretrained:
    """The result of ``load_pretrained``. ``initialized`` has the names of the model's tensors that
    no file has, and ``unexpected`` the names in the files that the model does not have. ``empty``
    has the names of tensors that were on the meta device and that ``only=`` has left out; their
    values are placeholders, such as NaN, until they are set. ``verified`` is True if checksums were
    compared.
    """

    path: Path
    initialized: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    verified: bool = False


def run_pretrained(
    source: str | os.PathLike[str],
    ranks: Ranks,
    model: nn.Module,
    *,
    strict: bool,
    keys: Sequence[KeyMap],
    rename: Rename,
    only: Only,
    init: Init,
    device: torch.device | str | None,
    verify: Literal["before", "no"],
    progress: bool,
    hub: Mapping[str, Any],
) -> Pretrained:
    """Load a pretrained model; see ``fsdpc.checkpoint.load_pretrained``. Collective."""
    path = find_folder(source, ranks, **hub)
    what = f"loading the pretrained model {path}"
    found = loading.open_together(path, ranks, what, links=True)
    with ranks.step(what) as seen:
        if verify not in ("before", "no"):
            raise ValueError(f"verify must be 'before' or 'no', not {verify!r}")
        chosen = chooser(only)
        _tie(model)
        given = give_memory(model, device)
        target = read_model(model, (ranks.rank, ranks.world))
        seen.value = (parts_of_some(target.entries, ranks.world), torch.get_rng_state())
    settle(target.entries, [parts for parts, _ in seen.values], ranks.rank)
    compares = found.manifest is not None and verify != "no"
    with ranks.step(what) as matched:
        kept = chosen_names(target, chosen, only)
        shadow = shadow_with(model, target)
        mapped, extra = _mapped(found.model.where, shadow, target, keys, rename)
        _quantised(mapped, target)
        where, twice = _places(path, mapped, target, kept)
        work, missing, unexpected = loading.match(where, target, True, kept, chosen)
        unexpected = [name for name in unexpected if name not in extra]
        _check_names(path, work.items, missing, unexpected, strict, shadow, target)
        wanted = missing + [name for name in target.unwritten if chosen(name)]
        result = Pretrained(path, sorted(missing), sorted(unexpected), verified=compares)
        lost = [e for e in target.entries if e.name in given and e.name not in kept]
        result.empty = [entry.name for entry in lost]
        result.empty += [name for name in target.unwritten if not chosen(name)]
        matched.value = _C.ckpt_crc32c(repr((work.pairs, wanted, unexpected, verify)).encode(), 0)
    loading.check_equal(matched.values, what)
    with ranks.step(what):
        for at, (name, first, other) in enumerate(twice):
            if at % ranks.world == ranks.rank:
                _check_tied(name, first, other)
        values = _initial(shadow, target, wanted, init, seen.values[0][1], ranks.rank)
    if compares:
        everything = [stored for stored in found.model.where.values()]
        loading.verify_all([loading.Work([], [], everything)], found, ranks, what)
    with ranks.step(f"{what}: values were being read, so the model must not be used"):
        advance = read_bar(work.items, ranks, path.name, progress)
        loading.read_into(work, found, False, advance)
        found.check_unwritten()
        _give(model, target, values)
        for entry in lost:
            take(entry, sentinel(entry.shape, entry.dtype))
        for tensor in target.touched:
            torch.autograd.graph.increment_version(tensor)
        forget_lost(model)
    if ranks.rank == 0:
        _tell(result)
    return result


def _tell(result: Pretrained) -> None:
    log = logging.getLogger("fsdpc")
    if result.initialized:
        log.warning(f"{result.path}: not in the files, so initialised: {result.initialized}")
    if result.unexpected:
        log.warning(f"{result.path}: only in the files, so left out: {result.unexpected}")
    if result.empty:
        log.warning(
            f"{result.path}: on the meta device before, and left out by only=, so NaN until they "
            f"are loaded or initialised: {result.empty}"
        )


# --- the folder ----------------------------------------------------------------------------------


def find_folder(
    source: str | os.PathLike[str],
    ranks: Ranks,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    deadline: float = 3600.0,
) -> Path:
    """Return the folder of a path, or of a name on the Hub. One rank of each host downloads the
    files that the host's cache does not have; the other ranks wait. Collective. Raises
    ``CheckpointError`` if ``source`` is neither an existing path nor a name on the Hub, or if the
    download fails or takes longer than ``deadline`` seconds.
    """
    name = os.fspath(source)
    what = f"looking for the pretrained model {name}"
    is_here = os.path.exists(name)
    with ranks.step(what) as looked:
        looked.value = is_here
    if any(looked.values) or not _REPO.fullmatch(name):
        with ranks.step(what):
            found = local_path(source)
            if not found.exists():
                raise CheckpointError(f"{found} is missing, and {name!r} is no name on the Hub")
        return found
    first = ranks.rank == ranks.hosts_first[ranks.host]
    download = _Download(name, revision, cache_dir) if first else None
    until, places = time.monotonic() + deadline, [None]
    while None in places:
        with ranks.step(what) as waited:
            if download is not None:
                waited.value = download.wait(_POLL_S)
                if waited.value is None and time.monotonic() > until:
                    raise CheckpointError(f"the download takes longer than {deadline} s")
        places = [waited.values[rank] for rank in ranks.hosts_first]
    return Path(places[ranks.host])


class _Download:
    """A download in a thread, so that its rank can exchange messages with other ranks meanwhile."""

    def __init__(self, name: str, revision: str | None, cache_dir: Any) -> None:
        self._args = (name, revision, cache_dir)
        self._path: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"download of {name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = _snapshot(*self._args)
        except BaseException as error:
            self._error = error

    def wait(self, timeout: float) -> str | None:
        """Return the folder, or ``None`` if the download has not ended after ``timeout`` seconds.
        Raises ``CheckpointError`` if the download has failed.
        """
        self._thread.join(timeout)
        if self._error is not None:
            raise CheckpointError(f"{type(self._error).__name__}: {self._error}") from self._error
        return self._path


def _snapshot(name: str, revision: str | None, cache_dir: Any) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name} is no folder; to load it from the Hub, install huggingface_hub"
        ) from error
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    options["ignore_patterns"] = ["*/*"]
    folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json"], **options)
    if not any(each.endswith(".safetensors") for each in os.listdir(folder)):
        folder = snapshot_download(name, allow_patterns=["*.bin", "*.json"], **options)
    return str(folder)


# --- the model -----------------------------------------------------------------------------------


def _is_sharded(model: nn.Module) -> bool:
    return bool(
        unit_modules(model)
        or torch_fsdp.handles(model)
        or any(isinstance(param, DTensor) for param in model.parameters())
    )


def _tie(model: nn.Module) -> None:
    """Tie weights as the configuration of transformers' model says, if nothing is sharded yet."""
    library = library_model(bare(model))
    if library is not None and not _is_sharded(model):
        library[1].tie_weights()


def give_memory(model: nn.Module, device: torch.device | str | None) -> set[str]:
    """Give uninitialised memory to parameters and buffers on the meta device. Returns their names.
    Tied tensors stay tied. Tensors on other devices keep their values. Local. Raises
    ``CheckpointError`` if a tensor on the meta device is neither a parameter nor a buffer.
    """
    stray = plain_meta(model)
    if stray:
        raise CheckpointError(
            f"on the meta device, and neither parameters nor buffers: {', '.join(stray)}: nothing "
            "fills them. Make them buffers, or compute them again on a device"
        )
    clean = cleaner(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    given = {clean(clean_fqn(name)) for name, tensor in tensors if tensor.is_meta}
    if not given:
        return given
    empty = [
        (module, key)
        for module in model.modules()
        for key in module._non_persistent_buffers_set
        if module._buffers.get(key) is not None and module._buffers[key].is_meta
    ]
    for state in states_below(model):  # of fully_shard
        if state._unit is not None:
            state._unit.take_memory()
    ties = tied_sites([(name, module) for name, module in model.named_modules()])

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        place = device
        if place is None:
            place = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
        return torch.empty_like(tensor, device=place)

    model._apply(fill)
    for sites in ties:
        retie(sites)
    for module, key in empty:
        empties.fill(module._buffers[key])
    return given


def shadow_with(model: nn.Module, target: Model) -> nn.Module:
    """Return a shadow of the model (copies of its modules without wrappers, see ``fresh.py``), in
    which all tensors are on the meta device. Local.
    """
    shadow = shadow_of(model)
    others = _others(target)
    clean = cleaner(model)
    buffers = {clean(name) for name, _, _ in named_buffers(model)}
    for entry in target.entries:
        outline = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        put(shadow, entry.name, outline, others[entry.name], entry.name in buffers)
    saved = {entry.name for entry in target.entries} | set(target.aliases)
    for name, buffer, _ in named_buffers(model):
        if clean(name) not in saved:
            outline = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
            put(shadow, clean(name), outline, (), True)
    return shadow


def _others(target: Model) -> dict[str, list[str]]:
    others: dict[str, list[str]] = {entry.name: [] for entry in target.entries}
    for alias, name in target.aliases.items():
        others[name].append(alias)
    return others


# --- names ---------------------------------------------------------------------------------------


def _mapped(
    stored: Mapping[str, Where],
    shadow: nn.Module,
    target: Model,
    keys: Sequence[KeyMap],
    rename: Rename,
) -> tuple[Mapped, set[str]]:
    """Return the files' tensors by their names in the model, and the names of the tensors that
    transformers ignores. ``Pretrained.unexpected`` must not list the ignored names.
    """
    own_name = renamer(rename)
    renamed = Mapped()
    for name, where in stored.items():
        renamed.add(own_name(name), where, name)
    made, used = apply_maps(renamed.tensors, keys)  # type: ignore[arg-type]
    rest = {n: where for n, where in renamed.tensors.items() if n not in used}
    library = library_model(shadow)
    extra: set[str] = set()
    shapes = _shapes(target)
    inside = names_inside(shadow, shapes)
    for name in inside.keys() & rest.keys():  # peft changed these names, and `save` writes them so
        made.add(name, rest.pop(name), renamed.origin[name])
    if library is not None:
        prefix = f"{library[0]}." if library[0] else ""
        shapes = {inside.get(name, name): shape for name, shape in shapes.items()}
        named = apply_library(library[1], prefix, rest, shapes)  # type: ignore[arg-type]
        extra = ignored(library[1], list(named.tensors))
    else:
        named = Mapped(dict(rest), dict(zip(rest, rest, strict=True)))
    for name, value in named.tensors.items():
        made.add(name, value, named.origin[name])
    for name, plain in inside.items():
        if plain in made.tensors:
            made.add(name, made.tensors[plain], made.origin[plain])
    for plain in set(inside.values()) & made.tensors.keys():
        del made.tensors[plain]
    return made, extra


def _quantised(mapped: Mapped, target: Model) -> None:
    """Quantize the files' values for tensors that are quantized in the model
    (``fsdpc.lowbit.quantize``). Raises ``CheckpointError`` if the files have quantized tensors of
    another library, values of 8 bits, or values of another shape.
    """
    others = _others(target)
    for entry in target.entries:
        if entry.coding is None:
            continue
        codec, row = entry.coding.codec, entry.coding.row
        for name in {entry.name, *others[entry.name]} & mapped.tensors.keys():
            value = _lazy(mapped.tensors[name])
            if can_encode(value, (entry.shape[0], row)):
                mapped.tensors[name] = Lazy(Coded(value.node, codec, entry.shape[1]))
            elif f"{name}.absmax" in mapped.tensors:
                raise CheckpointError(
                    f"the files have {name!r} in codes of another library, and the model in "
                    f"{codec} of fsdpc.lowbit.quantize: load a folder of values (by "
                    "dequantize() of that library's model, and save_pretrained)"
                )
            elif value.is_floating_point():
                raise CheckpointError(
                    f"the files have {name!r} as {tuple(value.shape)} values of {value.dtype}, and "
                    f"the model has {codec} of {(entry.shape[0], row)}: values of 16 "
                    "bits or more are quantised (a key map in keys= can make them of scaled ones)"
                )


def _shapes(target: Model) -> dict[str, torch.Tensor]:
    found = {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for entry in target.entries
    }
    return found | {alias: found[name] for alias, name in target.aliases.items()}


def _places(
    path: Path, mapped: Mapped, target: Model, kept: set[str]
) -> tuple[dict[str, Where], list[tuple[str, Any, Any]]]:
    """Return a dict with the file and place of each tensor. Also return the pairs of tied tensors
    that the files have under both names. A ``Lazy`` tensor gets a place in an object that behaves
    like a file and reads the values from ``Lazy.node``.
    """
    where: dict[str, Where] = {}
    places: list[Place] = []
    leaves: list[Stored] = []
    at = 0
    made = stored_file(path, "mapped tensors", places, leaves)
    for name, value in mapped.tensors.items():
        if not isinstance(value, Lazy):
            where[name] = value
            continue
        node = value.node
        nbytes = value.numel() * value.dtype.itemsize
        places.append(Place(name, node.dtype, node.shape, at, nbytes, len(places)))
        leaves.append(Stored(node.dtype, node.shape, node.read))
        where[name] = (made, places[-1])
        at += nbytes
    twice = []
    for name, others in _others(target).items():
        there = [each for each in (name, *others) if each in where and name in kept]
        for other in there[1:]:
            pair = [_lazy(mapped.tensors[each]) for each in (there[0], other)]
            twice.append((f"{there[0]} and {other}", *pair))
    return where, twice


def _lazy(value: Where | Lazy) -> Lazy:
    return value if isinstance(value, Lazy) else lazy_of(value)


def _check_tied(names: str, first: Lazy, other: Lazy) -> None:
    """Raise ``CheckpointError`` if the files have different values for a tied parameter."""
    step = 1 << 20
    if first.shape != other.shape:
        raise CheckpointError(
            f"{names} are one parameter of the model, and the files have {tuple(first.shape)} and "
            f"{tuple(other.shape)}: the files are of another model, or one of the two must be left "
            "out (keys= or rename=)"
        )
    for at in range(0, first.numel(), step):
        count = min(step, first.numel() - at)
        parts = [torch.empty(count, dtype=each.dtype, device="cpu") for each in (first, other)]
        for each, part in zip((first, other), parts, strict=True):
            each.node.read(at, part)
        if not torch.equal(parts[0], parts[1]):
            raise CheckpointError(
                f"{names} are one parameter of the model, and the files have different values for "
                "them: do not tie them (config.tie_word_embeddings = False)"
            )


def _check_names(
    path: Path,
    items: Sequence[Any],
    missing: Sequence[str],
    unexpected: Sequence[str],
    strict: bool,
    shadow: nn.Module,
    target: Model,
) -> None:
    """Raise ``CheckpointError`` if no tensor fits, or if ``strict`` is true and names differ. Also
    raise it if the configuration ties two weights that are separate parameters of the model, and
    the files have only one of the two.
    """
    if not items:
        raise CheckpointError(
            f"no tensor of the files is one of the model: the files have "
            f"{loading.shortened(unexpected)}, the model {loading.shortened(missing)} "
            "(rename= and keys= give other names)"
        )
    if strict and (missing or unexpected):
        raise CheckpointError(loading.difference(missing, unexpected))
    library = library_model(shadow)
    if library is None:
        return
    prefix = f"{library[0]}." if library[0] else ""
    ties = library[1].get_expanded_tied_weights_keys(all_submodels=True)
    for one, other in ties.items():
        pair = [target.aliases.get(prefix + name, prefix + name) for name in (one, other)]
        lost = [name for name in pair if name in missing]
        if pair[0] != pair[1] and len(lost) == 1:
            raise CheckpointError(
                f"{prefix + one} and {prefix + other} are tied by the configuration, but are two "
                f"parameters here, and the files do not have {lost[0]}: call model.tie_weights() "
                "before the model is sharded"
            )


# --- values that no file has ---------------------------------------------------------------------


def _initial(
    shadow: nn.Module,
    target: Model,
    wanted: Sequence[str],
    init: Init,
    generator: torch.Tensor,
    rank: int,
) -> dict[str, torch.Tensor]:
    """Return the full values that the modules' code makes. They are the same on every rank, because
    every rank uses the state of rank 0's random generator.
    """
    if not wanted:
        return {}
    entries = {entry.name: entry for entry in target.entries}
    others = _others(target)
    for name in wanted:
        path, _, key = name.rpartition(".")
        is_buffer = key in shadow.get_submodule(path)._buffers
        entry = entries.get(name)
        like = shadow.get_submodule(path)._buffers[key] if entry is None else entry
        assert like is not None
        put(shadow, name, sentinel(like.shape, like.dtype), others.get(name, ()), is_buffer)
    if rank == 0:
        return initialise(shadow, dict.fromkeys(wanted), init)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator)
        return initialise(shadow, dict.fromkeys(wanted), init)


@torch.no_grad()
def _give(model: nn.Module, target: Model, values: Mapping[str, torch.Tensor]) -> None:
    if not values:
        return
    left = dict(values)
    for entry in target.entries:
        if entry.name in left:
            take(entry, left.pop(entry.name))
    clean = cleaner(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key in module._non_persistent_buffers_set:
            name, buffer = clean(clean_fqn(join(prefix, key))), module._buffers.get(key)
            if buffer is None or name not in left:
                continue
            value = left.pop(name)
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                module._buffers[key] = value.to(buffer.device)
    assert not left, left.keys()
