"""The units of one root module, in the order of a training step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from fsdpc import _C
from fsdpc._comm.bootstrap import trust_order
from fsdpc._comm.rendezvous import agree_on_model
from fsdpc._engine.interop import torch_functions
from fsdpc._engine.unit import Unit
from fsdpc._engine.writeback import grads_free, renew_grads, viewed

TREES: weakref.WeakSet[Any] = weakref.WeakSet()  # all trees that exist
# Functions that are called with every new tree.
ON_TREE: list[Callable[[Any], None]] = []
PROCESS = os.getpid()  # the id of the process that imported this module, not of a forked child
_PREFETCH = {None: 0, "pre": 1, "post": 2}


def _slots(variable: str) -> int:
    """Return a positive integer from the environment, or 0 if the variable is not set.

    ``ValueError``: the variable has any other text.
    """
    text = os.environ.get(variable)
    if text is None:
        return 0
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{variable} must be an integer >= 1, got {text!r}")
    return int(text)


class Tree:
    """The units of one root, made at the root's lazy initialisation. Collective over the units'
    groups.

    ``units`` are in module order, the root's unit first; ``depths[i]`` is the nesting depth of
    ``units[i]`` among the units. Environment variables: FSDPC_GATHER_SLOTS (slots per nesting
    level, default 2, over a wire 3), FSDPC_REDUCE_SLOTS (default 2), FSDPC_POISON=1 (fill released
    slots with NaN). ``MismatchError``: ranks differ in the units, their depths, the options or the
    numbers of slots.
    """

    def __init__(
        self,
        units: list[Unit],
        depths: list[int],
        *,
        backward_prefetch: str | None,
        forward_prefetch: bool,
    ) -> None:
        self.units, self.depths = units, depths
        gather_slots, reduce_slots = _slots("FSDPC_GATHER_SLOTS"), _slots("FSDPC_REDUCE_SLOTS")
        options = [
            f"{len(units)} units",
            f"backward_prefetch {backward_prefetch}, forward_prefetch {forward_prefetch}",
            f"gather slots {gather_slots}, reduce slots {reduce_slots}",
            f"order of collectives {'trusted' if trust_order() else 'compared'}",
        ]
        names = [u.name or "(root)" for u in units]
        texts = [
            "\n".join(
                [*options, *(f"unit {n} at depth {d}" for n, d in zip(each, depths, strict=True))]
            )
            for each in (names, range(len(units)))
        ]
        for comm in {id(u.groups.shard): u.groups.shard for u in units}.values():
            agree_on_model(comm, *texts, "first forward", names)
        self.core = _C.Tree(
            [unit.flat for unit in units],
            depths,
            torch=torch_functions(),
            backward_prefetch=_PREFETCH[backward_prefetch],
            forward_prefetch=forward_prefetch,
            gather_slots=gather_slots,
            reduce_slots=reduce_slots,
            poison=os.environ.get("FSDPC_POISON") == "1",
            trust_order=trust_order(),
        )
        for unit in units:
            unit.tree = self
            unit.follow_memory()
        self.set_steppers()
        TREES.add(self)
        for call in ON_TREE:
            call(self)
        # Close the core when the tree is deleted: Python's gc would need several runs.
        weakref.finalize(self, self.core.close)

    def set_steppers(self) -> None:
        """Let units with a ``stepper`` step once their gradients are summed in backward. Local."""
        units = self.units  # `step` must not refer to self, which would keep the tree alive

        def step(number: int) -> bool:
            stepper = units[number].stepper
            if stepper is not None:
                stepper(units[number])
            return stepper is None or viewed(units[number])

        self.core.step_unit = step if any(unit.stepper for unit in units) else None
        free = (i for i, unit in enumerate(units) if unit.stepper is not None and grads_free(unit))
        for number in self.core.share_grads(tuple(free)):
            renew_grads(units[number])

    @property
    def training_state(self) -> str:
        """The phase of the step: "idle", "forward" or "backward"."""
        return self.core.phase

    @property
    def kind(self) -> str:
        """How units exchange values: "shared" (memory), "wire", "stream" (GPU), "mixed", "none"."""
        return self.core.kind

    def memory_stats(self) -> dict[str, int]:
        """Return the bytes on this rank by purpose. Local.

        Gather slots in shared memory count once per host.
        """
        return self.core.memory()

    def trace(self, last: int = 0) -> list[dict[str, Any]]:
        """Return the latest ``last`` events, oldest first. If ``last`` is 0, return all. Local.

        Each event has the keys op, phase, step, unit, bytes and time_ns.
        """
        return self.core.trace(last)

    def clear_trace(self) -> None:
        """Delete all recorded events. Local."""
        self.core.clear_trace()

    def detach(self) -> None:
        """Undo lazy initialisation, so that the units belong to no tree. Local."""
        self.core.detach()
        for unit in self.units:
            unit.tree = None
