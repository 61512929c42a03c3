"""Initialisation, by the modules' own code, of values that no file has.

The code runs on a shadow of the model: copies of the modules without FSDP's and other wrappers. In
the shadow, the tensors that need values are full tensors on the CPU, and all other tensors are on
the meta device. The modules' code runs on the shadow as it would on the unsharded model, and then
each rank takes its own elements. So the values do not depend on the sharding, and only the tensors
that are initialised need memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc._fsdp1.names import CHECKPOINT_WRAPPED, FSDP_WRAPPED, join
from fsdpc.checkpoint.entries import Entry
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.keymap import adapter_layers, library_model

Init = Callable[[nn.Module], object] | None
_RESETS = ("reset_parameters", "_reset_parameters", "rope_init")
_DONE = "_is_hf_initialized"  # transformers' mark of initialised tensors
_WRAPPERS = (FSDP_WRAPPED, CHECKPOINT_WRAPPED, "_orig_mod")


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers around it."""
    while True:
        inner = next((module._modules[k] for k in _WRAPPERS if k in module._modules), None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def shadow_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model without wrappers. A copied module shares all attributes with the
    original except its children, which are copies too, and its tensors, which are None until
    ``put`` sets them.
    """
    made: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        module = bare(module)
        if id(module) not in made:
            shadow: nn.Module = object.__new__(_plain_class(type(module)))
            shadow.__dict__.update(module.__dict__)
            shadow.__dict__.pop(_DONE, None)
            shadow._parameters = dict.fromkeys(module._parameters)
            shadow._buffers = dict.fromkeys(module._buffers)
            made[id(module)] = shadow
            shadow._modules = {
                name: None if child is None else copy(child)
                for name, child in module._modules.items()
            }
        return made[id(module)]

    return copy(model)


def _plain_class(cls: type) -> type:
    """Return the class from which ``fully_shard`` has derived ``cls``, or ``cls`` if it is not
    derived by ``fully_shard``.
    """
    while any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        cls = next(base for base in cls.__bases__ if base.__name__ != "FSDPModule")
    return cls


def put(
    shadow: nn.Module, name: str, tensor: torch.Tensor, others: Sequence[str], is_buffer: bool
) -> None:
    """Give the shadow a tensor under all its names."""
    kept = tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
    if tensor.is_meta:
        setattr(kept, _DONE, True)
    for each in (name, *others):
        path, _, key = each.rpartition(".")
        module = shadow.get_submodule(path)
        module.__dict__.pop(key, None)  # a sharded module has a plain attribute of this name
        (module._buffers if is_buffer else module._parameters)[key] = kept


def initialise(shadow: nn.Module, wanted: Mapping[str, Any], init: Init) -> dict[str, torch.Tensor]:
    """Run the modules' initialisation, and return the values of ``wanted``. Local. Random values
    come from torch's default generator. Raises ``CheckpointError`` if the code fails or does not
    write all wanted values.
    """
    before = {name: _tensor(shadow, name) for name in wanted}
    versions = {name: tensor._version for name, tensor in before.items()}
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in wanted))
    left = list(wanted)
    for run in _runs(shadow, left, owners, init):
        if not left:
            break
        try:
            with torch.no_grad():
                run()
        except Exception as error:
            raise CheckpointError(
                f"not in the files: {', '.join(left[:20])}; and their modules' initialisation "
                f"fails: {type(error).__name__}: {error}"
            ) from error
        written = {
            n for n in left if _is_written(_tensor(shadow, n), before[n], versions[n])
        }  # fmt: skip
        for name in written:  # transformers' code skips tensors with this mark
            setattr(_tensor(shadow, name), _DONE, True)
        left = [name for name in left if name not in written]
    if left:
        raise CheckpointError(
            f"not in the files, and no initialisation of their modules (transformers' "
            f"_init_weights, reset_parameters) writes them: {', '.join(left[:20])}"
            f"{f' and {len(left) - 20} more' if len(left) > 20 else ''}. Give init=, a function of "
            "a module that does, or keys= and rename=, if the files have them under other names"
        )
    return {name: _tensor(shadow, name) for name in wanted}


def _runs(
    shadow: nn.Module, names: Sequence[str], owners: Sequence[str], init: Init
) -> Iterator[Callable[[], object]]:
    """Yield functions that may initialise the values. If ``init`` is given, they call ``init`` for
    each module with a missing value. Otherwise they are the code of peft, of transformers, of each
    module with a missing value, and of the parents of these modules.
    """
    modules = {name: shadow.get_submodule(name) for name in owners}
    if init is not None:
        for module in modules.values():
            yield lambda module=module: init(module)
        return
    yield from _adapter_runs(shadow, names)
    library = library_model(shadow)
    if library is not None:
        yield library[1].initialize_weights
    around = {name.rpartition(".")[0] for name in owners if name} - modules.keys()
    for name in (*owners, *sorted(around, reverse=True)):
        module = shadow.get_submodule(name)
        reset = next((getattr(module, r) for r in _RESETS if hasattr(module, r)), None)
        if reset is not None:
            yield reset


def _adapter_runs(shadow: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], object]]:
    """Yield peft's initialisation of each adapter that has a missing value."""
    layers = dict(adapter_layers(shadow))
    configs = next(
        (vars(m)["peft_config"] for m in shadow.modules() if "peft_config" in vars(m)), {}
    )
    wanted: dict[tuple[int, str], Any] = {}
    for name in names if layers else ():
        parts = name.split(".")
        for end in range(len(parts) - 2, 0, -1):  # the innermost layer
            layer = layers.get(".".join(parts[:end]))
            if layer is not None:
                if parts[end] in layer.adapter_layer_names:
                    wanted[id(layer), parts[end + 1]] = layer
                break
    for (_, adapter), layer in wanted.items():
        yield partial(_reset_adapter, layer, adapter, configs.get(adapter))


def _reset_adapter(layer: Any, adapter: str, config: Any) -> None:
    how = getattr(config, "init_lora_weights", None)
    if getattr(config, "peft_type", None) != "LORA" or how not in (True, False, "gaussian"):
        raise NotImplementedError(
            f"adapter {adapter!r} of a {type(layer).__name__} of peft ({how!r}) is made beside "
            "whole weights: fill the model before get_peft_model, or give init="
        )
    if how is not False:
        layer.reset_lora_parameters(adapter, how)
        return
    for kind in layer.adapter_layer_names:
        made = getattr(layer, kind, {})
        if adapter in made and hasattr(made[adapter], "reset_parameters"):
            made[adapter].reset_parameters()


def sentinel(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor by whose values ``_is_written`` can tell if code has written the tensor."""
    made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if dtype.is_floating_point or dtype.is_complex:
        return made.fill_(float("nan"))
    return made if dtype == torch.bool else made.fill_(_low(dtype))


def _low(dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return info.min or info.max


def _is_written(now: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if now is not before:
        return not now.is_meta
    if now.numel() == 0:
        return True
    if now.is_floating_point() or now.is_complex():
        return not bool(now.isnan().any())
    if now._version > version:
        return True
    return now.dtype != torch.bool and not bool((now == _low(now.dtype)).any())


def _tensor(shadow: nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    module = shadow.get_submodule(path)
    found = module._parameters.get(key)
    found = module._buffers.get(key) if found is None else found
    assert found is not None, name
    return found.detach() if isinstance(found, nn.Parameter) and found.requires_grad else found


@torch.no_grad()
def take(entry: Entry, value: torch.Tensor) -> None:
    """Copy this rank's elements of a full value into the entry's memory."""
    flat = value.reshape(-1)
    for begin, at, count in entry.spans.tolist():
        entry.memory[at : at + count].copy_(flat[begin : begin + count])
    if entry.home is not None:
        entry.home.copy_(entry.memory.view(entry.home.shape))


def plain_meta(model: nn.Module) -> list[str]:
    """Return the names of tensors on the meta device that are neither parameters nor buffers, and
    that are therefore never filled.
    """
    return [
        join(name, key)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
