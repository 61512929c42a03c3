"""Warnings before an optimizer's first step on flat shards.

A warning is given in two cases. In the first, the step of an element depends on other elements of
the parameter. In the second, the parameter groups were chosen by the number of dimensions, which is
1 for every flat shard. The results then differ from those of an unsharded run, and nothing else
would report the difference.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc._engine.companions import registered
from fsdpc._engine.writeback import owner_of

_ELEMENTWISE = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and kind.__name__ not in ("Adafactor", "LBFGS", "Muon")
)
_COLLECTIVES = frozenset(
    "all_gather all_gather_into_tensor all_reduce all_to_all_single broadcast reduce_scatter "
    "reduce_scatter_tensor".split()
)
_SHAPE, _CUT, _STEPS = (16, 8), 64, 5
_NOT_RULES = ("params", "param_names", "name", "lr", "initial_lr")  # no part of an update rule
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_said: set[type] = set()


@functools.cache
def install() -> None:
    """Inspect each optimizer of this process before the optimizer's first step. Local."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Any, args: Any, kwargs: Any) -> None:
    if optimizer in _seen or torch.compiler.is_compiling():
        return
    _seen.add(optimizer)
    _look_at_groups(optimizer.param_groups)
    kind = type(optimizer)
    if kind in _said or kind in _ELEMENTWISE or kind.__module__.startswith("fsdpc."):
        return
    flat = {  # one parameter per update rule, which depends on the options of the group
        _rule(group): (param, {**optimizer.defaults, **group})
        for group in optimizer.param_groups
        for param in group["params"]
        if _is_flat(param) and not group.get("fsdp_in_use")  # with this option, sums are over ranks
    }
    if not flat:
        return
    if registered("known")(kind) or not all(
        _is_elementwise(kind, options, param.device) for param, options in flat.values()
    ):
        _said.add(kind)
        ours = registered("instead")(kind)
        instead = "an elementwise optimizer" if ours is None else f"{ours} of fsdpc.optim"
        warnings.warn(
            f"{kind.__name__} steps an element by other elements of its parameter, and sees flat "
            "parts of parameters under FullyShardedDataParallel: results are not those of an "
            f"unsharded run. Use {instead} (docs/optimizers.md), "
            "ShardingStrategy.NO_SHARD with use_orig_params=True, or fully_shard, whose parameters "
            "are DTensors: the optimizer sees all of them there, or raises",
            stacklevel=2,
        )


def _rule(group: dict[str, Any]) -> str:
    return repr([(name, group[name]) for name in sorted(group) if name not in _NOT_RULES])


def _look_at_groups(groups: list[dict[str, Any]]) -> None:
    """Warn if the groups were chosen by ``p.dim()``. Flat shards have one dimension, so all weights
    are then in the group meant for vectors, and the group meant for matrices is empty.
    """
    decays: tuple[list[float], list[float]] = ([], [])
    for group in groups:
        decays[bool(group["params"])].append(group.get("weight_decay") or 0)
    empty, held = (max(each, default=0) for each in decays)
    if empty > 0 == held and any(_was_matrix(p) for group in groups for p in group["params"]):
        warnings.warn(
            f"a parameter group with weight_decay={empty} is empty, and weights of "
            "FullyShardedDataParallel have none: parts of parameters have one dimension, "
            "so groups chosen by p.dim() put all of them with the biases. Choose groups by name, "
            "or use fully_shard, whose parameters keep their shapes",
            stacklevel=3,
        )


def _was_matrix(param: Any) -> bool:
    unit = owner_of(param) if _is_flat(param) else None
    covered = () if unit is None else (c for p, _, c in unit.optim_params if p is param)
    return any(len(unit.shapes[i]) > 1 for each in covered for i in each)


def _is_flat(param: Any) -> bool:
    """Return whether ``param`` is, for an optimizer, a flat shard of one parameter or a flat
    parameter that joins several parameters.
    """
    unit = owner_of(param)
    return unit is not None and not unit.dtensors and (unit.is_sharded or not unit.use_orig_params)


def _is_elementwise(kind: type, options: dict[str, Any], device: torch.device) -> bool:
    """Take a few steps on a matrix, and the same steps on the two halves of the matrix as flat
    tensors. Return whether all elements change in the same way. The result is also True if the step
    calls collectives, if the trial raises, if a second trial gives another result, or if the steps
    move nothing.
    """
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    if code is not None and _COLLECTIVES & set(code.co_names):
        return True
    names = inspect.signature(kind).parameters
    known = {name: options[name] for name in names if name in options and name != "params"}
    group = {name: options[name] for name in options if name not in ("params", "param_names")}
    for given in (known, group):
        if isinstance(given.get("lr"), (float, Tensor)):
            given["lr"] = 0.1
    makers = (  # the second is for constructors that take no groups
        lambda param: kind([{**group, "params": [param]}], **known),
        lambda param: kind([param], **known),
    )
    for make in makers:
        with contextlib.suppress(Exception):
            return _moves_alike(make, device)
    return True


def _moves_alike(make: Any, device: torch.device) -> bool:
    values, grads = _matrix()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [
            _moved(make, values.view(-1)[cut], [g.view(-1)[cut] for g in grads], device)
            for cut in (slice(0, _CUT), slice(_CUT, None))
        ]
        whole, again = (_moved(make, values, grads, device) for _ in range(2))
    size = whole.norm()
    if not ((again - whole).norm() <= 1e-6 * size and size > 0):
        return True
    return bool((torch.cat(parts) - whole.view(-1)).norm() <= 1e-3 * size)


def _matrix() -> tuple[Tensor, list[Tensor]]:
    """Return the values and the gradients of a trial. The first gradient is orthogonal to the
    values row by row. The other gradients resemble the first one up to noise and a random factor
    per element. With other gradients the trial would take some optimizers for elementwise.
    """
    numbers = torch.Generator().manual_seed(0)
    values, first = (torch.randn(_SHAPE, generator=numbers, device="cpu") for _ in range(2))
    along = (first * values).sum(1, keepdim=True) / values.square().sum(1, keepdim=True)
    grads = [first - along * values]
    for _ in range(1, _STEPS):
        size = torch.randn(_SHAPE, generator=numbers, device="cpu").mul(2).exp()
        grads.append(size * (first + torch.randn(_SHAPE, generator=numbers, device="cpu") / 4))
    return values, grads


def _moved(make: Any, values: Tensor, grads: list[Tensor], device: torch.device) -> Tensor:
    """Return how steps with ``grads`` change a parameter that begins with ``values``."""
    param = nn.Parameter(values.to(device, copy=True))
    optimizer = make(param)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    for grad in grads:

        def backward(grad: Tensor = grad) -> Tensor:
            param.grad = grad.to(device, copy=True)
            return (param.detach() * param.grad).sum()

        backward()
        required = closure is not None and closure.default is inspect.Parameter.empty
        optimizer.step(*[backward] * required)
    return param.detach().cpu() - values
