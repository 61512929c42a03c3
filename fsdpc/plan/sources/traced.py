"""A model from the user's ``module:function``, traced on fake tensors.

The function takes no arguments and returns ``model``, ``(model, inputs)`` or ``(model, inputs,
loss)``; see ``trace.Training``. The function is called inside ``fake.faking``, so that a model of
any size takes no memory, unless the function loads values. If the model's step cannot be traced,
the plan has only the engine's memory, and says what is missing.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from fsdpc._engine.modules import join
from fsdpc._fsdp1.mixed import FullPrecisionHooks
from fsdpc._fsdp2.module import fully_shard
from fsdpc.api import MixedPrecision, MixedPrecisionPolicy
from fsdpc.lowbit import coded_layers
from fsdpc.plan.model import Model, Moment, Setup, Unit
from fsdpc.plan.sources import configs
from fsdpc.plan.sources import trace as _trace
from fsdpc.plan.sources.fake import faking, sentence, settle
from fsdpc.plan.sources.geometry import is_checkpointed
from fsdpc.plan.sources.modules import units_of, units_of_calls
from fsdpc.wrap import ModuleWrapPolicy

Factory = Callable[[], Any]
_KEYS = [field.name for field in fields(_trace.Training)]


def load(text: str) -> Factory:
    """The function that ``module:function`` names; the current folder is on the path.
    ``ValueError``: there is no such module or function, or ``text`` is not of this form.
    """
    module_name, colon, name = text.partition(":")
    if not (colon and module_name and name):
        raise ValueError(f"{text!r} must be module:function, such as train:build")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {module_name!r} of {text!r}: {sentence(error)}") from error
    if not callable(found):
        raise ValueError(f"module {module_name!r} has no function {name!r}")
    return found


def training_of(made: Any) -> _trace.Training:
    """Return ``made``, the result of a user's function, as a ``Training``. ``TypeError``: the
    result has none of the known forms.
    """
    if isinstance(made, dict) and isinstance(made.get("model"), nn.Module):
        return _trace.Training(**{k: v for k, v in made.items() if k in _KEYS})
    parts = made if isinstance(made, tuple) else (made,)
    if not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise TypeError(
            "the function must return a model, (model, inputs), (model, inputs, loss) or a dict "
            f"with these keys and 'shard', not {type(parts[0]).__name__}"
        )
    return _trace.Training(*parts)


def policy_for(module: nn.Module, wrap: str) -> Any:
    """Return the policy for ``wrap``: ``blocks`` (wraps the classes of repeated blocks), ``whole``
    (the policy is None), or class names with commas between them. ``ValueError``: no module has
    such a class.
    """
    classes = classes_for(module, wrap)
    return ModuleWrapPolicy(classes) if classes else None


def fully_shard_by(wrap: str, precision: MixedPrecisionPolicy | None = None) -> Any:
    """Return a function that calls ``fully_shard`` on the modules that ``policy_for`` would wrap,
    inner ones first, and then on the model. The function is collective, except in ``planning()``.
    """

    def shard(model: nn.Module) -> nn.Module:
        options = {} if precision is None else {"mp_policy": precision}
        classes = tuple(classes_for(model, wrap))
        for module in reversed(list(model.modules())):
            if module is not model and classes and isinstance(module, classes):
                fully_shard(module, **options)
        return fully_shard(model, **options)

    return shard


def classes_for(module: nn.Module, wrap: str) -> set[type[nn.Module]]:
    """The classes of modules that ``policy_for`` wraps."""
    if wrap == "whole":
        return set()
    if wrap == "embeddings":
        raise ValueError("--wrap embeddings is for plans by formula: name classes, as Embedding")
    if wrap == "blocks":
        found = {type(module.get_submodule(join(name, "0"))) for name in _trace.repeated(module)}
        return {kind for kind in found if not _splits_a_tie(module, kind)}
    wanted = set(wrap.split(","))
    classes = {type(m) for m in module.modules() if type(m).__name__ in wanted}
    missing = wanted - {c.__name__ for c in classes}
    if missing:
        raise ValueError(f"the model has no module of class {', '.join(sorted(missing))}")
    return classes


def _splits_a_tie(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a parameter of a module of this class is also used outside of that module."""

    def uses(of: nn.Module) -> Counter[int]:
        return Counter(id(p) for m in of.modules() for p in m._parameters.values() if p is not None)

    every = uses(module)
    blocks = [m for m in module.modules() if isinstance(m, kind)]
    return any(every[key] > count for b in blocks for key, count in uses(b).items())


def build_traced(factory: Factory, setup: Setup, wrap: Any = "blocks", api: str = "") -> Model:
    """Return the planner's model of the training that ``factory`` makes. ``wrap``: a name for
    ``policy_for``, or a policy. ``api``: ``fully_shard``, or any other text for the wrapper class.
    If the training has ``shard``, that function makes the units; ``wrap`` and ``api`` are unused.
    ``ValueError``: the factory raises; the message names the line.
    """
    with faking():
        made = _made(factory)
        sized = hasattr(made, "model_type") and hasattr(made, "to_dict")  # a transformers config
        if sized:
            made = configs.step_of(made, setup)
        run = training_of(made)
        module, shard = run.model, run.shard
        settle(module)
        units, notes = _units(module, setup, wrap, api, shard)
        if len(units) == 1 and wrap == "blocks" and shard is None:
            notes.append(
                "no ModuleList or Sequential of more than three blocks of one class was found, so "
                "the model is one unit: name classes with --wrap"
            )
        idle = _idle(module)
        moments, missing = _step(run, units, setup)
        notes.append(missing or "activations traced on fake tensors")
        tokens = _tokens(run.inputs)
        if not tokens:
            notes.append("no token ids among the inputs: FLOPs and step times are not known")
        packed = _packed(module)
        values = sum(u.numel for u in units) + packed
        trained = sum(p.numel for u in units for p in u.params if p.trainable)
        forward = 2.0 * tokens * (values - idle)  # backward: 2 x this (frozen weights: 1 x)
        return Model(
            name=type(module).__name__,
            units=units,
            moments=moments,
            buffer_bytes=_trace.bytes_of_tensors(list(module.buffers())),
            input_bytes=_trace.bytes_of_tensors(run.inputs),
            tokens=tokens,
            flops=forward * (2 + trained / max(values, 1)),  # 0 without token ids
            forward=forward,
            packed=packed,
            notes=tuple(notes),
            traced=True,
            sized=sized,
            missing=missing,
        )


def _made(factory: Factory) -> Any:
    try:
        return factory()
    except configs.Refused:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"the function that makes the model raised {sentence(error)}") from error


def _step(
    run: _trace.Training, units: tuple[Unit, ...], setup: Setup
) -> tuple[tuple[Moment, ...], str]:
    """Return the moments of a step, and the reason why there are none ("" if there are some)."""
    nothing = "activations are not in the plan: "
    if run.inputs is None:
        return (), nothing + "no inputs were given"
    if setup.compress or setup.offload_activations:
        raise ValueError(
            "compressed and offloaded activations are planned by formula, not from a trace: give a "
            "preset, or leave --compress and --offload-activations away"
        )
    try:
        return tuple(_moments(run, units, setup)), ""
    except Exception as error:
        return (), nothing + f"the step raised {sentence(error)}"


def _packed(module: nn.Module) -> int:
    """Return the number of quantized values of ``fsdpc.lowbit``, minus the bytes that hold them."""
    weights = {
        id(layer.weight): len(layer.weight) * layer.row - layer.weight.numel()
        for _, layer in coded_layers(module)
    }
    return sum(weights.values())


def _idle(module: nn.Module) -> int:
    """Return how many parameters of experts a token does not use, by the numbers of experts in a
    transformers configuration.
    """
    config = getattr(module, "config", None)
    count, used = configs.experts_of(config) if config is not None else (0, 0)
    stacked = (p for p in module.parameters() if count and p.dim() == 3 and p.shape[0] == count)
    return sum(p.numel() // count * (count - used) for p in stacked)


def _units(
    module: nn.Module, setup: Setup, wrap: Any, api: str, shard: Any
) -> tuple[tuple[Unit, ...], list[str]]:
    if shard is not None:
        return units_of_calls(module, shard), ["units as the function's shard makes them"]
    types = {"param_dtype": _dtype(setup.compute), "reduce_dtype": _dtype(setup.reduce)}
    if api == "fully_shard":
        sharded = fully_shard_by(wrap, MixedPrecisionPolicy(**types))
        return units_of_calls(module, sharded), ["units of fully_shard, cut between rows"]
    policy = policy_for(module, wrap) if isinstance(wrap, str) else wrap
    mixed = MixedPrecision(**types) if setup.compute or setup.reduce else None
    return units_of(module, policy, mixed_precision=mixed), []


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _tokens(inputs: Any) -> int:
    """Return the number of token ids: the elements of the first integer tensor, or 0."""
    tensors = [t for t in _trace.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    return next((t.numel() for t in tensors if not t.is_floating_point()), 0)


def _moments(run: _trace.Training, units: tuple[Unit, ...], setup: Setup) -> list[Moment]:
    module, compute = run.model, _dtype(setup.compute)
    if compute is not None:
        _cast(module, compute)
    params = {
        unit.name: [module.get_parameter(join(unit.name, p.name)) for p in unit.params]
        for unit in units
    }
    lists = _trace.repeated(module)
    blocks = [b for name in lists for b in module.get_submodule(name).children()]
    blocks = blocks or [module.get_submodule(u.name) for u in units if u.name]
    chosen = [
        block
        for i, block in enumerate(blocks)
        if is_checkpointed(i, len(blocks), setup.checkpointing)
    ]
    with _trace.checkpointed(chosen):
        return _trace.trace(run, params, compute)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters by copies in the compute dtype, which modules compute with. Batch norms
    compute in fp32.
    """
    kept = [
        m
        for m in module.modules()
        if isinstance(m, tuple(MixedPrecision()._module_classes_to_ignore))
    ]
    for child in kept:
        FullPrecisionHooks(child)
    done: dict[int, nn.Parameter] = {}  # by id: modules that share a parameter still share it
    for child in module.modules():
        if child not in kept:
            for name, param in child._parameters.items():
                if param is not None and param.is_floating_point():
                    if id(param) not in done:
                        low = param.detach().to(dtype)
                        done[id(param)] = nn.Parameter(low, requires_grad=param.requires_grad)
                    child._parameters[name] = done[id(param)]
