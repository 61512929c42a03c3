"""The form of a save for transformers and inference engines: tensors with the names and shapes that
they have on the Hub, ``config.json``, the generation configuration, and the tokenizer's files.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdpc.checkpoint.entries import Entry
from fsdpc.checkpoint.keymap import library_model, names_inside
from fsdpc.checkpoint.lazy import Lazy, Source, merged
from fsdpc.checkpoint.model import Model
from fsdpc.checkpoint.pretrained import shadow_with


class HubForm:
    """The ``Form`` of a save with the names and files of the Hub. ``tokenizer`` is ``None`` or has
    a method ``save_pretrained``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._model: Any = None

    def apply(self, model: nn.Module, found: Model) -> None:
        """Give the entries the names and forms of the Hub; see ``_as_on_hub``. Local."""
        self._model = _as_on_hub(model, found)

    def files(self, dtype: torch.dtype | None) -> dict[str, bytes]:
        """Return the contents of the files that have no tensors, by file name. ``dtype`` is the
        dtype in which floats are saved. Local.
        """
        return _small_files(self._model, dtype, self._tokenizer)


def _as_on_hub(model: nn.Module, found: Model) -> Any:
    """Give the entries the names and forms that transformers saves. Returns a copy of transformers'
    model, with tensors on the meta device. Local. Raises ``TypeError`` if there is no single model
    of transformers, if the model is quantized or has adapters of peft, or if a conversion does more
    than cut tensors.
    """
    shadow = shadow_with(model, found)
    library = library_model(shadow)
    coded = next((entry.name for entry in found.entries if entry.coding is not None), None)
    if coded is not None:
        raise TypeError(
            f"hf=True: {coded} is in codes, which from_pretrained does not read: save with "
            "values=True, too, or without hf=True"
        )
    around = sorted(names_inside(shadow, (entry.name for entry in found.entries)))
    if around:
        raise TypeError(
            f"hf=True: {around[0]} is inside of an adapter of peft, which from_pretrained does not "
            'have: save the adapters, by only="*lora_*" and without hf=True, beside their base, or '
            "merge_and_unload() before the model is sharded"
        )
    if library is None:
        raise TypeError("hf=True is for a model of transformers (one, perhaps inside of another)")
    prefix = f"{library[0]}." if library[0] else ""
    outside = [entry.name for entry in found.entries if not entry.name.startswith(prefix)]
    if outside:
        raise TypeError(f"hf=True: {outside[0]} is no tensor of the model of transformers")
    sources = {
        entry.name.removeprefix(prefix): Source(entry.shape, entry.dtype, _unread)
        for entry in found.entries
    }
    entries = {id(sources[e.name.removeprefix(prefix)]): e for e in found.entries}
    lazies = {name: Lazy(source) for name, source in sources.items()}
    reverted = _revert()(library[1], lazies)
    found.entries = [_entry(name, value, entries) for name, value in reverted.items()]
    order = {id(entry): at for at, entry in enumerate(entries.values())}
    found.entries.sort(key=lambda entry: order[id(entry.__dict__.pop("source"))])
    names = {entry.name for entry in found.entries}
    aliases = ((a.removeprefix(prefix), n.removeprefix(prefix)) for a, n in found.aliases.items())
    found.aliases = {a: n for a, n in aliases if n in names and a not in names}
    return library[1]


def _unread(first: int, target: torch.Tensor) -> None:
    raise TypeError("its values are computed")


def _revert() -> Callable[[Any, dict[str, Lazy]], dict[str, Any]]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 there are no conversions
        return lambda model, state: state
    found: Callable[[Any, dict[str, Lazy]], dict[str, Any]] = revert_weight_conversion
    return found


def _entry(name: str, value: Any, entries: dict[int, Entry]) -> Entry:
    node = value.node
    try:
        runs = merged(node.runs([0] * len(node.shape), node.shape))
        if len({id(source) for source, _, _ in runs}) != 1:
            raise TypeError("it consists of several parameters")
    except TypeError as error:
        raise TypeError(
            f"hf=True cannot write {name}, as transformers has it on the Hub: {error}. Save "
            "without hf=True, and load that into transformers' model on one rank"
        ) from error
    entry = entries[id(runs[0][0])]
    made = dataclasses.replace(
        entry, name=name, shape=tuple(node.shape), spans=_cut(entry.spans, runs)
    )
    made.__dict__["source"] = entry
    return made


def _cut(spans: np.ndarray, runs: list[Any]) -> np.ndarray:
    """Return this rank's spans of a tensor that consists of ``runs`` of another tensor. ``spans``
    are this rank's spans of that other tensor.
    """
    found, at = [], 0
    for _, begin, count in runs:
        low = np.maximum(spans[:, 0], begin)
        high = np.minimum(spans[:, 0] + spans[:, 2], begin + count)
        rows = np.stack([low - begin + at, spans[:, 1] + low - spans[:, 0], high - low], axis=1)
        found.append(rows[rows[:, 2] > 0])
        at += count
    table = np.concatenate(found)
    return np.ascontiguousarray(table[np.argsort(table[:, 0], kind="stable")])


def _small_files(model: Any, dtype: torch.dtype | None, tokenizer: Any) -> dict[str, bytes]:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    floats = [param.dtype for param in model.parameters() if param.is_floating_point()]
    config.dtype = dtype or (floats[0] if floats else None)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None and model.can_generate():
            generation.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
