"""Several models and optimizers in one checkpoint, and states that each rank has for itself.

Every model is a separate checkpoint in a folder with the model's name. An optimizer is saved in the
folder of the model that has the same name; if there is no such model, in a separate folder. The
manifest of the whole checkpoint has the digests of the folders' manifests.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import lay_out
from fsdpc.checkpoint.loading import Loaded, load_steps, open_together, parts_in
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import Plan, make_plan
from fsdpc.checkpoint.storage import AnyPath
from fsdpc.checkpoint.write import planned_set

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None
States = Mapping[str, Any] | None
_NAME = re.compile(r"[A-Za-z0-9_][\w-]*", re.ASCII)
_TAKEN = ("optimizer", "fsdpc")
RNG = "rng"


@dataclass
class Part:
    """A part of a checkpoint, which is a folder. It has the tensors of ``model`` if ``holds_model``
    is true, and the state of ``optimizer`` if ``optimizer`` is not None.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    holds_model: bool


def parts_of(models: Mapping[str, nn.Module], optimizers: Optimizers) -> list[Part]:
    """Return one part for each name of a model or an optimizer. Local. Raises ``TypeError`` if
    ``optimizers`` is not a dict, and ``ValueError`` if a name cannot be the name of a folder, or if
    an optimizer's parameters are in no model or in several models.
    """
    given = {} if optimizers is None else optimizers
    if not isinstance(given, Mapping):
        raise TypeError("several models need a dict of optimizers, by names")
    for name in (*models, *given):
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            raise ValueError(f"{name!r} cannot be the name of a part: letters, digits, - and _")
    parts = [Part(name, model, given.get(name), True) for name, model in models.items()]
    for name, optimizer in given.items():
        if name not in models:
            parts.append(Part(name, _model_of(name, optimizer, models), optimizer, False))
    return parts


def _check_models(models: Any) -> None:
    if (
        not isinstance(models, Mapping)
        or not models
        or not all(isinstance(model, nn.Module) for model in models.values())
    ):
        raise TypeError(
            f"model must be a torch.nn.Module, not {type(models).__name__}, or a dict of them by "
            "names"
        )


def _model_of(
    name: str, optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]
) -> nn.Module:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = [m for m in models.values() if held & {id(param) for param in m.parameters()}]
    if len(found) != 1:
        where = "none" if not found else "several"
        raise ValueError(
            f"the parameters of optimizer {name!r} are in {where} of the models {list(models)}: "
            "give the model that has them"
        )
    return found[0]


# --- values of ranks -----------------------------------------------------------------------------


class RandomStates:
    """The random generators of this process: those of Python, NumPy, torch and the GPUs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators as plain values."""
        import numpy as np

        kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
        version, words, gauss = random.getstate()
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to the states that ``state_dict`` returned."""
        import numpy as np

        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and state["devices"]:
            torch.cuda.set_rng_state_all(state["devices"])


def states_of(scheduler: Any, states: States, rng: bool) -> tuple[Any, dict[str, Any]]:
    """Return the single scheduler, and a dict from names to the objects of which a checkpoint saves
    every rank's state. If ``scheduler`` is a dict, the returned dict has its schedulers, and the
    first result is ``None``. Local. Raises ``TypeError`` if an object has no ``state_dict()`` or no
    ``load_state_dict()``, and ``ValueError`` if ``states`` has the name that ``rng`` uses.
    """
    found = dict(states or {})
    if isinstance(scheduler, Mapping):
        found |= {f"scheduler.{name}": each for name, each in scheduler.items()}
        scheduler = None
    if rng:
        if RNG in found:
            raise ValueError(f"states= has {RNG!r}, which rng=True uses")
        found[RNG] = RandomStates()
    for name, each in found.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, method, None)):
                raise TypeError(f"{name!r} ({type(each).__name__}) has no {method}()")
    return scheduler, found


# --- saving --------------------------------------------------------------------------------------


def plan_of(
    target: Path,
    ranks: Ranks,
    models: Models,
    optimizers: Optimizers,
    scheduler: Any,
    extra: dict[str, Any] | None,
    states: Mapping[str, Any],
    **options: Any,
) -> Plan:
    """Plan a save as ``make_plan`` does, also for dicts of models. Collective."""
    if isinstance(models, nn.Module):
        return make_plan(
            target, ranks, models, optimizers, scheduler, extra, states=states, **options
        )
    with ranks.step(f"planning checkpoint {target}") as listed:
        _check_models(models)
        if options.get("only") is not None or options.get("form") is not None:
            raise TypeError("only= and hf=True are for one model")
        parts = parts_of(models, optimizers)
        listed.value = [part.name for part in parts]
    if any(names != listed.values[0] for names in listed.values):
        raise CheckpointError(f"planning checkpoint {target}: ranks give other names of parts")
    whole = make_plan(target, ranks, nn.Module(), None, scheduler, extra, states=states, **options)
    whole.parts = [part.name for part in parts]
    for part in parts:
        plan = make_plan(target, ranks, part.model, part.optimizer, None, None, **options)
        if not part.holds_model:
            plan.sets[0] = planned_set(lay_out([], name="model"), [])
        for each in plan.sets:
            folder = f"{part.name}/{each.layout.folder}".rstrip("/")
            layout = dataclasses.replace(each.layout, folder=folder)
            whole.sets.append(dataclasses.replace(each, layout=layout))
        whole.files |= {f"{part.name}/{path}": content for path, content in plan.files.items()}
        whole.params += plan.params
    return whole


# --- loading -------------------------------------------------------------------------------------


def run_several(
    path: AnyPath,
    ranks: Ranks,
    models: Models,
    optimizers: Optimizers,
    scheduler: Any,
    states: Mapping[str, Any],
    **options: Any,
) -> Loaded:
    """Load as ``run_load`` does, also for dicts of models. All parts are checked before the first
    one is changed. Collective.
    """
    what = f"loading checkpoint {path}"
    if isinstance(models, nn.Module):
        steps = [load_steps(path, ranks, models, optimizers, scheduler, states=states, **options)]
        return _finish(steps)[0]
    with ranks.step(what):
        _check_models(models)
        if options.get("only") is not None or options.get("rename") is not None:
            raise TypeError("only= and rename= are for one model")
        parts = parts_of(models, optimizers)
    top = open_together(path, ranks, what)
    with ranks.step(what):
        there = parts_in(top)
        lost = [part.name for part in parts if part.name not in there]
        if lost:
            raise CheckpointError(f"{path} has the parts {sorted(there)}, not {lost}")
    steps = [load_steps(path, ranks, nn.Module(), None, scheduler, states=states, **options)]
    for part in parts:
        steps.append(
            load_steps(
                path / part.name,
                ranks,
                part.model,
                part.optimizer,
                None,
                states={},
                holds_model=part.holds_model,
                digest=there[part.name],
                **options,
            )
        )
    found = _finish(steps)
    for part, loaded in zip(parts, found[1:], strict=True):
        found[0].missing += [f"{part.name}.{name}" for name in loaded.missing]
        found[0].unexpected += [f"{part.name}.{name}" for name in loaded.unexpected]
        found[0].verified |= loaded.verified
    return found[0]


def _finish(steps: list[Iterator[Loaded | None]]) -> list[Loaded]:
    for each in steps:
        next(each)
    done = [next(each) for each in steps]
    return [loaded for loaded in done if loaded is not None]
