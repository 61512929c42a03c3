"""Comparison of the states that an optimizer has of a parameter with those in a checkpoint."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fsdpc.checkpoint.model import Model
from fsdpc.checkpoint.optimizer import IMPLEMENTATION, options_of, params_of
from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._chunks import AVERAGE, MASTER
from fsdpc.optim.average import average_of


def check_keys(
    optimizer: torch.optim.Optimizer,
    model: Model,
    kinds: dict[str, dict[str, Any]],
    saved_groups: list[dict[str, Any]],
    chosen: set[str],
) -> None:
    """Check that the checkpoint has the states that the optimizer uses, and no others. Raises
    ``ValueError``, which names the parameter and the states that are missing or not used. If
    ``_usual`` does not know the states of the optimizer's class, the states that a parameter has
    now are expected. If the parameter then has no states, it is not compared. Local.
    """
    if hasattr(optimizer, "span_states"):
        return  # make_state checks the states of such an optimizer
    groups = params_of(optimizer, model)
    saved = options_of(groups, saved_groups, chosen)
    averages = average_of(optimizer) is not None
    for group, members, options in zip(optimizer.param_groups, groups, saved, strict=True):
        usual = _usual({**group, **options}, optimizer)
        for member in members:
            wanted = usual
            if wanted is None:
                wanted = set(dict.get(optimizer.state, member.param, {})) - {AVERAGE} or None
            for name in member.names:
                found = set(kinds.get(name, {})) - ({AVERAGE} if averages else set())
                if found and wanted is not None:
                    _compare(name, found, wanted, type(optimizer).__name__)


def _compare(name: str, found: set[str], wanted: set[str], optimizer: str) -> None:
    missing, unexpected = sorted(wanted - found), sorted(found - wanted - {MASTER, "step"})
    if missing or unexpected:
        texts = [f"lacks {', '.join(missing)}"] if missing else []
        texts += [f"has {', '.join(unexpected)}, which is not used"] if unexpected else []
        if AVERAGE in unexpected:
            texts.append("fsdpc.optim.Average(optimizer) must be made before its averages load")
        raise ValueError(
            f"the state of {name!r} in the checkpoint does not fit {optimizer}: it "
            f"{' and '.join(texts)}; load into an optimizer of the class that was saved, or "
            "without optimizer= (strict=False loads the state all the same)"
        )


def _usual(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the keys of the states that a step makes with these options, or ``None`` if they are
    not known.
    """
    if isinstance(optimizer, FusedOptimizer):
        return set(optimizer._names(group))
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return None
    param = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
    param.grad = torch.zeros_like(param)
    options = {key: value for key, value in group.items() if key not in IMPLEMENTATION}
    try:
        tried: Any = type(optimizer)([{**options, "params": [param]}])
        # Call the bare step, without the wrapper that calls hooks and profilers of all optimizers.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(tried)
    except Exception:  # noqa: BLE001  a closure or a sparse gradient is needed
        return None
    return {key for key, value in tried.state[param].items() if value is not None}
