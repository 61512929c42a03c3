"""Reading of checkpoints that other programs saved with torch: DCP folders and torch.save files.

The keys of the saved dict (``MODEL``, ``OPTIMIZER``, ``SCHEDULER``) state which values belong to
the model, the optimizer and the scheduler; docs/checkpoints.md lists these keys. Such checkpoints
have no checksums.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fsdpc._states.keys import is_cut, numbers_of
from fsdpc._torch import ShardedTensor
from fsdpc.checkpoint.dcp_folder import INDEX as DCP_INDEX
from fsdpc.checkpoint.dcp_folder import Folder, Pickled, Stored, TextKeys
from fsdpc.checkpoint.deepspeed import universal_tree
from fsdpc.checkpoint.dtypes import dtype_of_code
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.held import Held, Root, opened_whole
from fsdpc.checkpoint.layout import FILE_TYPE, IN_TENSOR, INDEX, MEMORY, MEMORY_TYPE, NBYTES, Place
from fsdpc.checkpoint.manifest import NAME as MANIFEST
from fsdpc.checkpoint.opened import Opened, StoredFile, StoredSet, file_names
from fsdpc.checkpoint.storage import AnyPath, place_of

MODEL = ("model", "state_dict", "model_state_dict", "model_state", "module")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
             "optimizer_0", "optimizer_states")  # fmt: skip
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict",
             "lr_schedulers")  # fmt: skip
_EXTRA = "_extra_state"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MEGATRON, _MEGATRON_STATE = "common.pt", re.compile(r"(chained_\d+\.)?optimizer\.")
_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a")  # first bytes of new and old torch.save files


class TorchFiles:
    """A checkpoint that torch has written, with the interface of ``Opened``. Local.

    ``numbered``: whether the optimizer's parameters have numbers instead of names. ``left``: the
    names of values that are not read. ``aliases``: a dict from the other names of tied tensors to
    their first names. ``prefix``: only tensors whose names begin with this prefix are read, and the
    prefix is removed from their names.

    ``CheckpointError``: the layout is unknown, or a tensor is only one rank's shard.
    """

    manifest = None

    def __init__(
        self, path: Path, tree: dict[Any, Any], roots: Sequence[Root], prefix: str = ""
    ) -> None:
        self.path, self._roots = path, roots
        is_dcp = any(root.exists(DCP_INDEX) for root in roots)
        self.kind = "a folder of torch's DCP" if is_dcp else "a torch.save file"
        parts = _parts(path, tree, prefix)
        self.left: list[str] = parts["left"]
        if path.is_dir() and len(roots) == 1:
            self.left += roots[0].unopened()
        self._scheduler = parts["scheduler"]
        leaves = dict(_leaves(parts["model"], ""))
        self.extra_state = {name: value for name, value in leaves.items() if _is_extra(name)}
        values = {n: v for n, v in leaves.items() if not _is_extra(n)}
        self.aliases = _tied(values)
        self.model = self._set("model", values)
        self.optimizer: StoredSet | None = None
        self.numbered = False
        self._states: dict[str, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        if parts["optimizer"] is not None:
            self._read_optimizer(parts["optimizer"], prefix)

    @property
    def sets(self) -> dict[str, StoredSet]:
        named = {"model": self.model, "optimizer": self.optimizer}
        return {name: found for name, found in named.items() if found is not None}

    @property
    def stamp(self) -> list[Any]:
        """See ``Root.stamp``."""
        return [root.stamp for root in self._roots]

    def check_unwritten(self) -> None:
        """See ``Root.check_unwritten``."""
        for root in self._roots:
            root.check_unwritten()

    def scheduler_state(self) -> Any:
        """Return the scheduler's state, or ``None`` if the checkpoint has none."""
        return _values(_milestones(self._scheduler))

    def extra_states(self) -> dict[str, Any]:
        """Return, by name, what the modules' ``get_extra_state()`` returned when the checkpoint was
        saved.
        """
        return {name: _values(value) for name, value in self.extra_state.items()}

    def optimizer_forms(
        self, shape_of: Callable[[str], tuple[int, ...] | None]
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Return ``kinds`` and ``groups`` as in ``optimizer.State``. The keys are the names or
        numbers that the parameters have in the checkpoint. ``shape_of`` returns the shape of the
        parameter with such a name or number.
        """
        found = {
            name: (shape_of(name), {k: tuple(v.shape) for k, v in state.items() if _is_tensor(v)})
            for name, state in self._states.items()
        }
        numbers = numbers_of(found.values())
        kinds: dict[str, dict[str, Any]] = {}
        for name, (of, shapes) in found.items():
            kinds[name] = {
                key: ["value", value]
                if key not in shapes
                else "cut"
                if is_cut(key, shapes[key], of, numbers)
                else "whole"
                for key, value in self._states[name].items()
            }
        return kinds, [dict(group) for group in self._groups]

    # --- the optimizer ---

    def leave_other_states(self) -> None:
        """Leave out the states of parameters that the model does not have. Must not be called if
        the optimizer's parameters have numbers.
        """
        self._name_states(lambda name: name if name in self.model.where else None)

    def _read_optimizer(self, form: Any, prefix: str) -> None:
        form = form[0] if isinstance(form, list) and len(form) == 1 else form
        states, groups = _optimizer_parts(form)
        if states is None:
            shown = list(form) if isinstance(form, dict) else type(form).__name__
            raise CheckpointError(
                f"{self.path}: the optimizer's part is no state dict of torch's, with 'state' and "
                f"'param_groups', but has {_shown(shown)}: load without optimizer="
            )
        names = {}
        self.numbered = any(isinstance(p, int) for group in groups for p in group["params"])
        if self.numbered and all("param_names" in group for group in groups):
            pairs = [(g["params"], g["param_names"]) for g in groups]
            names = {str(n): name for ns, own in pairs for n, name in zip(ns, own, strict=True)}
            self.numbered = False
        self._states = {names.get(str(p), str(p)): dict(state) for p, state in states.items()}
        for group in groups:
            params = [names.get(str(p), str(p)) for p in group.pop("params")]
            group.pop("param_names", None)
            self._groups.append({**group, "params": params})
        start = "" if self.numbered else prefix
        self._name_states(lambda name: name[len(start) :] if name.startswith(start) else None)

    def _name_states(self, name_of: Callable[[str], str | None]) -> None:
        """Rename the parameters of the states and of the groups. A parameter whose new name is
        ``None`` is left out.
        """
        olds = [*self._states, *(name for group in self._groups for name in group["params"])]
        names = {old: name_of(old) for old in olds}
        self.left += [f"optimizer.state.{old}" for old, new in names.items() if new is None]
        states = [(names[old], state) for old, state in self._states.items()]
        self._states = {name: state for name, state in states if name is not None}
        groups, self._groups = self._groups, []
        for group in groups:
            params = [names[old] for old in group["params"] if names[old] is not None]
            if params or not group["params"]:
                self._groups.append({**group, "params": params})
        tensors = {
            f"state.{name}.{key}": value
            for name, state in self._states.items()
            for key, value in state.items()
            if _is_tensor(value)
        }
        self.optimizer = self._set("optimizer", tensors)

    # --- tensors ---

    def _set(self, name: str, values: dict[str, Any]) -> StoredSet:
        places, leaves, at = [], [], 0
        for tensor, value in values.items():
            if not _is_tensor(value):
                raise CheckpointError(f"{self.path}: {tensor!r} of the {name} is no tensor")
            leaf = self._stored(tensor, value)
            nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
            places.append(Place(tensor, leaf.dtype, leaf.shape, at, nbytes, len(places)))
            leaves.append(leaf)
            at += nbytes
        file = stored_file(self.path, name, places, leaves)
        return StoredSet([file], {place.name: (file, place) for place in places})

    def _stored(self, name: str, value: Any) -> Stored:
        if isinstance(value, Stored):
            return value
        if isinstance(value, DTensor | ShardedTensor):
            raise CheckpointError(
                f"{self.path}: {name!r} is one rank's part of a distributed tensor: save with "
                "torch.distributed.checkpoint, or a full state dict"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CheckpointError(f"{self.path}: {name!r} is no dense tensor with values")

        def read(first: int, target: torch.Tensor) -> None:
            target.copy_(value.detach().reshape(-1)[first : first + len(target)])

        return Stored(value.dtype, tuple(value.shape), read)


def stored_file(path: Path, name: str, places: list[Place], leaves: Sequence[Stored]) -> StoredFile:
    """Return a ``StoredFile`` for tensors that are read one by one, as if they lay one behind the
    other in a file.
    """
    nbytes = sum(place.nbytes for place in places)
    return StoredFile(
        path, name, nbytes, places, {}, read=lambda rows: _read(leaves, rows), leaves=leaves
    )


def open_any(
    path: AnyPath, *, trust: bool = False, prefix: str = "", links: bool = False
) -> Opened | TorchFiles:
    """Open any checkpoint that ``load`` takes. In object storage, only checkpoints of safetensors
    can be opened. Local. ``trust``: see ``Folder``. ``prefix``: see ``TorchFiles``; ignored for
    safetensors. ``links``: see ``Root``. ``CheckpointError``: the checkpoint is missing or damaged.
    """
    place = place_of(path)
    if not place.appears_whole:
        return Opened(place)
    return opened_whole(place, lambda: _open_any(place, trust, prefix, links))


def _open_any(path: Path, trust: bool, prefix: str, links: bool) -> Opened | TorchFiles:
    folders = _dcp_folders(path)
    if folders:
        tree: dict[Any, Any] = {}
        opened = [Folder(folder, trust) for folder in folders]
        for folder in opened:
            more = folder.tree()
            twice = tree.keys() & more.keys()
            if twice:
                raise CheckpointError(
                    f"{path} has several folders with {sorted(twice)[0]!r}: load one of "
                    f"{_shown([folder.name for folder in folders])}"
                )
            tree |= more
        if (path / _MEGATRON).exists():
            tree = _without_states(tree)
        return TorchFiles(path, tree, [folder.root for folder in opened], prefix)
    if path.is_dir():
        root = Root(path, links=links)
        if root.exists(_BIN_INDEX) or root.exists(_BIN):
            if not any(map(root.exists, ("model.safetensors", "model.safetensors.index.json"))):
                return TorchFiles(path, {"state_dict": _read_bins(root)}, [root], prefix)
        universal = universal_tree(root, lambda name: _mapped(root, name))
        if universal is not None:
            return TorchFiles(path, universal, [root], prefix)
    if path.is_file():
        real = path.resolve()
        root = Root(real.parent)
        held = root.open(real.name)
        if held.read(min(4, held.size), 0, path).startswith(_STARTS):
            return TorchFiles(path, _read_file(path, held), [root], prefix)
    return Opened(path, links=links)


def _without_states(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Return Megatron's tree without the optimizer's states, which would otherwise be read as
    tensors of the model.
    """
    states = [key for key in tree if isinstance(key, str) and _MEGATRON_STATE.match(key)]
    why = f"their step and groups are in {_MEGATRON}, which pickles Megatron's objects"
    left = {f"the optimizer's {len(states)} tensors: {why}": None} if states else {}
    return {key: value for key, value in tree.items() if key not in states} | left


def _dcp_folders(path: Path) -> list[Path]:
    """Return ``path`` if it is a DCP folder, else the DCP folders in it, such as those of a model
    and an optimizer that were saved separately.
    """
    if (path / DCP_INDEX).is_file():
        if (path / MANIFEST).exists():
            raise CheckpointError(
                f"{path} holds two checkpoints, with {MANIFEST} and with {DCP_INDEX}: move one of "
                f"these files, and what it lists, to another folder"
            )
        return [path]
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return []
    return sorted(folder for folder in path.iterdir() if (folder / DCP_INDEX).is_file())


def _read_bins(root: Root) -> dict[Any, Any]:
    """Return the state dict of a transformers folder with one or several ``torch.save`` files."""
    if not root.exists(_BIN_INDEX):
        return _read_file(root.path / _BIN, root.open(_BIN))
    index, held = root.path / _BIN_INDEX, root.open(_BIN_INDEX)
    try:
        table = json.loads(held.read(held.size, 0, index)).get("weight_map")
    except (ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from error
    state: dict[Any, Any] = {}
    for name in file_names(table, index):
        more = _read_file(root.path / name, root.open(name))
        for key in more:
            if table.get(key) != name:
                raise CheckpointError(
                    f"{index}: tensor {key!r} should be in {table.get(key)!r} but is in {name!r}"
                )
        state |= more
    lost = sorted(table.keys() - state.keys())
    if lost:
        raise CheckpointError(f"{index}: tensor {lost[0]!r} is in no file")
    return state


def _read_file(path: Path, held: Held) -> dict[Any, Any]:
    state = _unpickled(path, held)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    return dict(state)


def _mapped(root: Root, name: str) -> Any:
    """Return the content of a file. The file is closed again, because a checkpoint may have more
    files than the process may have descriptors.
    """
    held = root.open(name)
    try:
        return _unpickled(root.path / name, held)
    finally:
        root.close(name)


def _unpickled(path: Path, held: Held) -> Any:
    own = held.proc_path if os.path.exists(held.proc_path) else str(path)
    try:
        try:
            return torch.load(own, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # a file in the old format cannot be mapped
            if "mmap" not in str(error):
                raise
            return torch.load(own, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which torch.load(weights_only=True) "
            f"refuses: save state dicts, not modules ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


# --- which value is what -------------------------------------------------------------------------


def _parts(path: Path, tree: dict[Any, Any], prefix: str) -> dict[str, Any]:
    if len(tree) == 1:  # one Stateful object has everything: {"app": {"model": ..., "optim": ...}}
        (inner,) = tree.values()
        tree = inner if isinstance(inner, dict) and _first(inner, MODEL) else tree
    optimizer, scheduler = _first(tree, OPTIMIZER), _first(tree, SCHEDULER)
    model = _first(tree, MODEL)
    known = {key for key in (model, optimizer, scheduler) if key}
    if model:
        held = tree[model]
    else:  # the tree is the model's state dict, perhaps with other values
        held = {key: value for key, value in tree.items() if _is_tensor(value) or _is_extra(key)}
        known |= held.keys()
    if not isinstance(held, dict):
        if not prefix:
            raise CheckpointError(
                f"{path}: {model!r} is a {type(held).__name__}, not a state dict: save "
                "model.state_dict() there, and several models as the parts of one nn.ModuleDict"
            )
        held = {}
    if prefix and not any(name.startswith(prefix) for name, _ in _leaves(held, "")):
        held, known, optimizer = tree, set(tree), None
    found = dict(_leaves(held, ""))
    if not any(_is_tensor(value) and name.startswith(prefix) for name, value in found.items()):
        raise CheckpointError(
            f"{path}: no tensor"
            + (f" with the prefix {prefix!r}" if prefix else " of a model")
            + f" is under {_shown(MODEL)}, or at the top; there is {_shown(found or tree)}. "
            "Save it under one of these, or take the names under a key: python -m "
            "fsdpc.checkpoint convert --prefix KEY. SOURCE TARGET"
        )
    left = [name for name in found if not name.startswith(prefix)]
    return {
        "model": {n.removeprefix(prefix): v for n, v in found.items() if n.startswith(prefix)},
        "optimizer": tree[optimizer] if optimizer else None,
        "scheduler": tree[scheduler] if scheduler else None,
        "left": left + [str(key) for key in tree if key not in known],
    }


def _first(tree: dict[Any, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if isinstance(tree.get(key), dict | list)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Stored | torch.Tensor)


def _is_extra(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA


def _leaves(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not _is_extra(name):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _tied(values: dict[str, Any]) -> dict[str, str]:
    """Return a dict from the name of each tensor that shares the memory of an earlier tensor to the
    name of that earlier tensor.
    """
    first: dict[Any, str] = {}
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() and not isinstance(value, DTensor):
            memory = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype,
                      value.is_conj(), value.is_neg())  # fmt: skip
            if first.setdefault(memory, name) != name:
                found[name] = first[memory]
    return found


def _values(tree: Any) -> Any:
    """Return a copy of the tree in which every stored value has been read from its file."""
    if isinstance(tree, TextKeys):
        raise CheckpointError(
            f"a dict in a folder of torch's DCP has the keys {_shown(tree)}, which may have been "
            "numbers: DCP writes every key as a text. Save with fsdpc.checkpoint or torch.save"
        )
    if isinstance(tree, dict):
        found = {key: _values(value) for key, value in tree.items()}
        return Counter(found) if isinstance(tree, Counter) else found
    if isinstance(tree, list):
        return [_values(value) for value in tree]
    if isinstance(tree, Pickled):
        return tree.get()
    if isinstance(tree, Stored):
        value = torch.empty(tree.shape, dtype=tree.dtype, device="cpu")
        if value.numel():
            tree.read(0, value.view(-1))
        return value
    return copy.deepcopy(tree)  # a tensor in a mapped file would change with the file


def _milestones(tree: Any) -> Any:
    """Return a copy of the tree in which the keys of ``milestones`` (of torch's MultiStepLR), and
    no other keys, are converted to ints.
    """
    if isinstance(tree, list):
        return [_milestones(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    made = type(tree)({key: _milestones(value) for key, value in tree.items()})
    epochs = made.get("milestones")
    if isinstance(epochs, TextKeys) and all(key.isdecimal() for key in epochs):
        made["milestones"] = Counter({int(key): count for key, count in epochs.items()})
    return made


def _optimizer_parts(form: Any) -> tuple[dict[Any, Any] | None, list[dict[str, Any]]]:
    """Return the states and groups of an optimizer's state dict. The state dict may also have flat
    names (``state.<name>.exp_avg``, ``param_groups.<name>.lr``); each parameter is then a group.
    """
    if not isinstance(form, dict):
        return None, []
    if isinstance(form.get("state"), dict) or isinstance(form.get("param_groups"), list | Pickled):
        groups = _values(form.get("param_groups", []))
        return _scalars(form.get("state", {})), [dict(group) for group in groups]
    flat = {key: value for key, value in form.items() if isinstance(key, str)}
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            states.setdefault(name, {})[last] = value
        elif kind == "param_groups" and name:
            options.setdefault(name, {})[last] = _values(value)
    if not states and not options:
        return None, []
    return _scalars(states), [{**own, "params": [name]} for name, own in options.items()]


def _scalars(states: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of the states in which all values except tensors were read from the file."""
    return {
        param: {key: v if _is_tensor(v) else _values(v) for key, v in state.items()}
        for param, state in states.items()
    }


def _shown(names: Any) -> str:
    listed = [repr(name) for name in (names if not isinstance(names, str) else [names])]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


# --- reading -------------------------------------------------------------------------------------


def _read(leaves: Sequence[Stored], rows: np.ndarray) -> None:
    """Read ranges of tensors into host memory; see ``write.rows_of`` for ``rows``."""
    for row in rows.tolist():
        leaf = leaves[row[INDEX]]
        item = leaf.dtype.itemsize
        count = row[NBYTES] // item
        if count:
            own = row[MEMORY_TYPE] == row[FILE_TYPE]
            dtype = leaf.dtype if own else dtype_of_code(row[MEMORY_TYPE])
            leaf.read(row[IN_TENSOR] // item, _memory(row[MEMORY], count, dtype))


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)
