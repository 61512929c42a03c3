"""The mapping from tensors of files to tensors of a model, by key maps and transformers' tables.

The result has for each name of the model either a tensor as it is in a file, or a ``Lazy`` tensor
that is made from tensors of files.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import Place
from fsdpc.checkpoint.lazy import Lazy, Source
from fsdpc.checkpoint.opened import StoredFile

_HOLE = re.compile(r"\{(\w+)\}")
Where = tuple[StoredFile, Place]


@dataclass(frozen=True)
class KeyMap:
    """One rule for ``load_pretrained``: tensors of the files -> tensors of the model.

    Args:
        sources: a name in the files, or several. A placeholder such as ``{i}`` stands for any text,
            and for the same text wherever it is repeated. If a placeholder is in no target, all
            tensors whose names differ only in this placeholder are one argument: a list in natural
            order (``experts.2`` before ``experts.10``).
        targets: a name in the model, or several, with placeholders of the sources.
        by: a function that is called with a tensor (or a list) per source and returns a tensor per
            target. If it only uses torch functions that move elements (``cat``, ``stack``,
            ``split``, ``t``, ``view``, ``permute``), each rank reads only its part of the result.
            If it computes new values, every rank reads the whole arguments. By default the result
            is the source tensor, under its new name.

    ::

        KeyMap(["{p}.q.weight", "{p}.k.weight", "{p}.v.weight"], "{p}.qkv.weight",
               lambda q, k, v: torch.cat((q, k, v)))
        KeyMap("{p}.qkv.weight", ["{p}.q.weight", "{p}.k.weight", "{p}.v.weight"],
               lambda qkv: qkv.split((4096, 1024, 1024)))
        KeyMap("{p}.experts.{e}.w1.weight", "{p}.experts.w1", torch.stack)
        KeyMap("{p}.c_fc.weight", "{p}.up.weight", torch.t)
    """

    sources: str | Sequence[str]
    targets: str | Sequence[str]
    by: Callable[..., Any] | None = None
    _patterns: list[re.Pattern[str]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            value = getattr(self, name)
            listed = [value] if isinstance(value, str) else list(value)
            if not listed or not all(isinstance(each, str) for each in listed):
                raise TypeError(f"{name} must be a name or several, not {value!r}")
            object.__setattr__(self, name, listed)
        holes = [set(_HOLE.findall(source)) for source in self.sources]
        wanted = {hole for target in self.targets for hole in _HOLE.findall(target)}
        for hole in wanted:
            if not all(hole in own for own in holes):
                raise ValueError(f"{{{hole}}} of a target is not in every source of {self}")
        if self.by is None and (len(self.sources), len(self.targets)) != (1, 1):
            raise ValueError(f"{self} has several sources or targets: by= says how")
        if self.by is None and holes[0] - wanted:
            raise ValueError(f"{self} makes one of several tensors: by= says how (torch.stack)")
        object.__setattr__(self, "_patterns", [_pattern(source) for source in self.sources])


def _pattern(template: str) -> re.Pattern[str]:
    seen: set[str] = set()
    text = ""
    for i, part in enumerate(_HOLE.split(template)):
        if i % 2 == 0:
            text += re.escape(part)
        elif part in seen:
            text += f"(?P={part})"
        else:
            seen.add(part)
            text += f"(?P<{part}>.+?)"
    return re.compile(text)


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that compares the numbers in names as numbers."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


@dataclass
class Mapped:
    """The result of a mapping. The keys of ``tensors`` are names in the model. A key that the model
    does not have is an unexpected name.
    """

    tensors: dict[str, Where | Lazy] = field(default_factory=dict)
    # For error messages: for each key of ``tensors``, a name in the files from which it is made.
    origin: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Where | Lazy, stored: str) -> None:
        if name in self.tensors:
            raise CheckpointError(
                f"{self.origin[name]!r} and {stored!r} of the files would both be {name!r}"
            )
        self.tensors[name], self.origin[name] = value, stored


def lazy_of(where: Where) -> Lazy:
    """Return a ``Lazy`` for a tensor of a file."""
    file, place = where
    return Lazy(Source(place.shape, place.dtype, partial(_fetch, file, place)))


def _fetch(file: StoredFile, place: Place, first: int, target: torch.Tensor) -> None:
    item = place.dtype.itemsize
    if file.leaves is not None:
        file.leaves[place.index].read(first, target)
    elif target.numel():
        assert file.held is not None
        view = memoryview(target.view(torch.uint8).numpy())
        file.held.read_into(view, place.offset + first * item, file.path)


def apply_maps(stored: Mapping[str, Where], maps: Sequence[KeyMap]) -> tuple[Mapped, set[str]]:
    """Return the tensors that the rules make, and the names of the stored tensors that the rules
    have used. Raises ``CheckpointError`` if a rule fails, or if the files have only some of the
    sources of a rule.
    """
    made, used = Mapped(), set()
    for rule in maps:
        for name, group in _groups(rule, [name for name in stored if name not in used]).items():
            missing = [s for s, found in zip(rule.sources, group, strict=True) if not found]
            if missing:
                there = next(names[0] for names in group if names)
                raise CheckpointError(
                    f"{rule}: {there!r} is in the files, but nothing as {missing}"
                )
            names = [each for names in group for each in names]
            used |= set(names)
            _apply(rule, name, group, stored, made)
    return made, used


def _groups(rule: KeyMap, names: Sequence[str]) -> dict[tuple[str, ...], list[list[str]]]:
    """Return a dict from the names of the targets to a list that has, for each source, the names in
    the files that match the source.
    """
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for name in sorted(names, key=natural):
        for at, pattern in enumerate(rule._patterns):
            match = pattern.fullmatch(name)
            if match is not None:
                targets = tuple(
                    _HOLE.sub(lambda hole: match[hole[1]], target)  # noqa: B023
                    for target in rule.targets
                )
                found.setdefault(targets, [[] for _ in rule.sources])[at].append(name)
                break
    return found


def _apply(
    rule: KeyMap,
    targets: tuple[str, ...],
    group: list[list[str]],
    stored: Mapping[str, Where],
    made: Mapped,
) -> None:
    if rule.by is None:
        made.add(targets[0], stored[group[0][0]], group[0][0])
        return
    wanted = {hole for target in rule.targets for hole in _HOLE.findall(target)}
    args: list[Any] = []
    for source, names in zip(rule.sources, group, strict=True):
        tensors = [lazy_of(stored[name]) for name in names]
        args.append(tensors if set(_HOLE.findall(source)) - wanted else tensors[0])
    try:
        with torch.no_grad():
            found = rule.by(*args)
    except Exception as error:
        raise CheckpointError(
            f"{rule} fails for {targets[0]!r}: {type(error).__name__}: {error}"
        ) from error
    several = [found] if isinstance(found, torch.Tensor) else list(found)
    if len(several) != len(targets):
        raise CheckpointError(f"{rule}: by= has returned {len(several)} tensors for {targets}")
    for target, value in zip(targets, several, strict=True):
        made.add(target, value, group[0][0])


# --- peft ----------------------------------------------------------------------------------------


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of the layers that peft has put around other layers. The list is
    empty if peft is not imported.
    """
    library = sys.modules.get("peft.tuners.tuners_utils")
    if library is None:
        return []
    return [(n, m) for n, m in model.named_modules() if isinstance(m, library.BaseTunerLayer)]


def names_inside(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return a dict of the names in the model that peft has changed, each with the name that it had
    before peft put layers around modules. The copies of a module that peft trains as a whole
    (``modules_to_save``) get the names of the original module.
    """
    cuts: dict[str, int] = {}  # prefix ending in peft's part -> index where this part begins
    for path, module in adapter_layers(model):
        if "base_layer" in module._modules:
            cuts[f"{path}.base_layer."] = len(path) + 1
    library = sys.modules.get("peft.utils.other")
    for path, module in model.named_modules() if library is not None else ():
        if isinstance(module, library.AuxiliaryTrainingWrapper):
            copies = [f"modules_to_save.{key}" for key in getattr(module, "modules_to_save", ())]
            cuts |= {f"{path}.{own}.": len(path) + 1 for own in ("original_module", *copies)}
    found = {}
    for name in names if cuts else ():
        inside = name
        for dot in reversed([i for i, letter in enumerate(name) if letter == "."]):
            begin = cuts.get(name[: dot + 1])
            inside = inside if begin is None else inside[:begin] + inside[dot + 1 :]
        if inside != name:
            found[name] = inside
    return found


# --- transformers --------------------------------------------------------------------------------


def library_model(shadow: nn.Module) -> tuple[str, Any] | None:
    """Return the name and the module of transformers' model in a tree of modules. Models inside of
    other models of transformers do not count. Returns ``None`` if there is not exactly one model.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return None
    kind = library.PreTrainedModel
    found = [(name, module) for name, module in shadow.named_modules() if isinstance(module, kind)]
    top = [
        (name, module)
        for name, module in found
        if not any(
            name.startswith(f"{other}." if other else "") for other, _ in found if other != name
        )  # fmt: skip
    ]
    return top[0] if len(top) == 1 else None


def apply_library(
    model: Any, prefix: str, tensors: Mapping[str, Where], shapes: Mapping[str, torch.Tensor]
) -> Mapped:
    """Return the tensors, renamed and converted as transformers does for this model. ``prefix`` is
    the model's name in the tree of modules, followed by a dot. ``shapes`` has meta tensors by their
    names in the tree.
    """
    made = Mapped()
    known = {n.removeprefix(prefix): t for n, t in shapes.items() if n.startswith(prefix)}
    inner = {
        name.removeprefix(prefix) if prefix and name not in known else name: (name, where)
        for name, where in tensors.items()
    }
    table = _table(model)
    base = model.base_model_prefix
    converters: dict[str, Any] = {}
    for key in sorted(inner, key=natural):
        stored, where = inner[key]
        name, pattern, converter = table.rename(key, base, known)
        if pattern is None or name not in known:
            made.add(prefix + name if pattern is None else stored, where, stored)
            continue
        used = converters.setdefault(name, converter())
        used.add_tensor(name, key, pattern, lazy_of(where))
    for name, used in converters.items():
        for target, value in _converted(used, name, model).items():
            made.add(prefix + target, value, sorted(used.layer_targets[name])[0])
    return made


def _converted(converter: Any, name: str, model: Any) -> dict[str, Lazy]:
    try:
        with torch.no_grad():
            found = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        raise CheckpointError(
            f"transformers' conversion to {name!r} fails: {type(error).__name__}: {error}"
        ) from error
    return {key: v[0] if isinstance(v, list | tuple) else v for key, v in found.items()}


class _Table:
    """The renaming for versions of transformers that have no tables: the prefix of the base model
    is added or removed.
    """

    def rename(
        self, key: str, base: str, known: Mapping[str, Any]
    ) -> tuple[str, str | None, Callable[[], Any]]:
        if base and key not in known:
            bare = key.removeprefix(f"{base}.")
            if bare in known:
                return bare, None, dict
            if f"{base}.{key}" in known:
                return f"{base}.{key}", None, dict
        return key, None, dict


class _Tables(_Table):
    """The renaming by the tables of transformers 5, which are lists of renamings and converters."""

    def __init__(self, model: Any, loading: Any, conversions: Sequence[Any]) -> None:
        self._loading = loading
        self._renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}

    def rename(
        self, key: str, base: str, known: Mapping[str, Any]
    ) -> tuple[str, str | None, Callable[[], Any]]:
        """Return the new name, the pattern that matched (or None), and a function that returns a
        new copy of the pattern's converter.
        """
        renamed = self._loading.rename_source_key
        name, pattern = renamed(key, self._renamings, self._converters, base, known)
        if name not in known and key in known:
            name, pattern = renamed(key, [], [], base, known)
        if pattern is None:
            return name, None, dict
        return name, pattern, lambda: copy.deepcopy(self._by_pattern[pattern])


def _table(model: Any) -> _Table:
    with contextlib.suppress(ImportError):
        from transformers import conversion_mapping, core_model_loading

        found = conversion_mapping.get_model_conversion_mapping(model)
        return _Tables(model, core_model_loading, found)
    return _Table()


def ignored(model: Any, names: Sequence[str]) -> set[str]:
    """Return the names of tensors in files that transformers would ignore for this model."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
