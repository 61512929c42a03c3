"""``fsdpc.profile_memory``: the live memory in the course of a step, by role and unit.

While a profile is active, the engine calls an observer after each of its hooks (a unit is gathered,
released or reduced; a backward ends), and optimizers call hooks before and after their steps. The
engine's memory is read from its own counters. A dispatch mode counts the storages of torch's
tensors. Each storage belongs to the unit whose forward or backward allocated it, until it is found
to be a gradient or an optimizer's state.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdpc._engine.marks import hosts
from fsdpc._engine.tree import ON_TREE, TREES
from fsdpc._engine.writeback import owner_of
from fsdpc._torch import tree_leaves
from fsdpc.plan.noticed import process_bytes
from fsdpc.plan.profiled import Boundary, Profile, Sample
from fsdpc.plan.rows import ENGINE, SHARDS, Key
from fsdpc.plan.sources.held import (
    cache_line,
    gpu_of,
    optimizers_of,
    planned_by_unit,
    state_tensors,
)
from fsdpc.plan.sources.live import LiveBytes

_PAGE = os.sysconf("SC_PAGE_SIZE")
PROCESS_S = 1.0  # least seconds between two calls of process_bytes, which takes milliseconds
OTHER: Key = ("other", "")
UPDATE: Key = ("update's temporaries", "")


class OwnedBytes(LiveBytes):
    """Live bytes by owner. Counts the tensors that are allocated while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = OTHER
        self.by: Counter[Key] = Counter()
        self._owners: dict[int, Key] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = (out,) if isinstance(out, Tensor) else tree_leaves(out)
        fresh = [t for t in _tensors(results) if self._is_new(t)]
        if fresh:  # in-place results, and views of earlier tensors, are not new memory
            old = {id(t.untyped_storage()) for t in _tensors((*args, *(kwargs or {}).values()))}
            for tensor in fresh:
                if id(tensor.untyped_storage()) not in old:
                    self._see(tensor)
        return out

    def _is_new(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) not in self._sizes

    def _see(self, tensor: Tensor) -> None:
        key = id(tensor.untyped_storage())
        if key not in self._sizes:
            super()._see(tensor)
            self._owners[key] = self.owner
            self.by[self.owner] += self._sizes[key]

    def _gone(self, key: int) -> None:
        self.by[self._owners.pop(key)] -= self._sizes[key]
        super()._gone(key)

    def assign(self, tensor: Tensor, owner: Key) -> None:
        """Move ``tensor`` to another owner, if ``tensor`` is counted."""
        key = id(tensor.untyped_storage())
        before = self._owners.get(key)
        if before is not None and before != owner:
            self.by[before] -= self._sizes[key]
            self.by[owner] += self._sizes[key]
            self._owners[key] = owner


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among ``values``, and those in lists and tuples among ``values``."""
    for value in values:
        if isinstance(value, Tensor):
            yield _local(value)
        elif isinstance(value, (list, tuple)):
            yield from (_local(one) for one in value if isinstance(one, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class _Watched:
    """A tree, with the bytes of each unit's shards, which do not change."""

    tree: Any
    fixed: dict[Key, int]
    gathered: list[int]  # bytes of each unit's gathered values
    stack: list[int] = field(default_factory=list)


class profile_memory:  # noqa: N801: used like a function
    """A context manager that records live memory by role and unit. Local; enter it between steps.

    ``model``: None for all sharded models of this process. ``tensors``: if False, only the
    memory of the engine and of the process is recorded, which costs some microseconds for each unit
    and pass. If True, torch's tensors are counted, too, which costs some microseconds for each
    operator. The ``with`` statement returns a ``Profile``, which is complete after the context.
    ``TypeError``: ``model`` is not a module. ``StateError``: another profile is active.
    """

    _active: profile_memory | None = None

    def __init__(self, model: nn.Module | None = None, *, tensors: bool = True) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"profile_memory expects an nn.Module but got {type(model).__name__}")
        self._model = model
        self._live = OwnedBytes() if tensors else None
        self._watched: list[_Watched] = []
        self._states: Counter[Key] = Counter()
        self._optimizers: list[Any] = []
        self._phase = "idle"
        self._profile = Profile()
        self._stepped = self._backward = False
        self._asked, self._process = 0.0, 0

    def __enter__(self) -> Profile:
        from fsdpc import _C

        if profile_memory._active is not None:
            raise _C.StateError("another memory profile is active; leave its context first")
        profile_memory._active = self
        for tree in list(TREES):
            self._watch(tree)
        ON_TREE.append(self._watch)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._optimizers = optimizers_of([u for one in self._watched for u in one.tree.units])
        self._count_states()
        self._begin = time.monotonic()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        if self._live is not None:
            self._live.__enter__()
        self._sample("begin", "", None)
        return self._profile

    def __exit__(self, *exception: Any) -> None:
        self._sample("end", "", None)
        if self._live is not None:
            self._live.__exit__(*exception)
        for watched in self._watched:
            watched.tree.core.observer = None
        for handle in self._handles:
            handle.remove()
        ON_TREE.remove(self._watch)
        os.close(self._statm)
        profile_memory._active = None
        device = _gpu(self._watched)
        self._profile.end(str(device or "cpu"), cache_line(device) if device else "")

    # --- the engine ---

    def _watch(self, tree: Any) -> None:
        if self._model is not None:
            units = {id(host._unit) for host in hosts(self._model)}
            if not any(id(unit) in units for unit in tree.units):
                return
        fixed, gathered = {}, []
        for unit, print_ in zip(tree.units, planned_by_unit(tree), strict=True):
            name = unit.name or "(root)"
            own = print_["grad_bytes"] + print_["grad_out_bytes"] + print_["partial_bytes"]
            fixed[("shards", name)] = print_["master_bytes"]
            fixed[("gradient shards", name)] = own
            gathered.append(print_["full_bytes"])
        watched = _Watched(tree, fixed, gathered)
        self._watched = [one for one in self._watched if one.tree.units[0].tree is one.tree]
        self._watched.append(watched)
        self._profile.named(tree)
        tree.core.observer = lambda kind, unit: self._seen(watched, kind, unit)

    def _seen(self, watched: _Watched, kind: str, index: int) -> None:
        """The observer, which the engine calls after each of its hooks."""
        name = watched.tree.units[index].name or "(root)"
        recompute = watched.tree.core.phase == "backward"
        if kind == "pre_forward":
            if index == 0 and not recompute:
                watched.stack.clear()  # it may have units of a forward that raised
                self._begin_pass()
            watched.stack.append(index)
        elif kind == "post_forward" and watched.stack:
            watched.stack.pop()
        if kind in ("pre_forward", "post_forward"):
            self._phase = "backward" if recompute else "forward"
        elif kind == "end":
            self._phase, self._backward = "idle", True
        else:
            self._phase = "backward"
        self._sample(kind, name, watched)
        self._own(watched, name if kind == "pre_backward" else None, recompute)

    def _own(self, watched: _Watched, name: str | None, recompute: bool) -> None:
        """Set the owner of the next allocations."""
        if self._live is None:
            return
        if self._phase == "idle":
            self._live.owner = OTHER
        elif watched.stack:
            inner = watched.tree.units[watched.stack[-1]].name or "(root)"
            self._live.owner = ("recomputed" if recompute else "activations", inner)
        elif self._phase == "forward":
            self._live.owner = ("activations", "after the model's forward")
        elif name is not None:
            self._live.owner = ("temporaries", name)

    # --- steps ---

    def _begin_pass(self) -> None:
        if self._backward and not self._stepped:  # no optimizer stepped since the last backward
            self._end_step()
        self._backward = self._stepped = False

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._phase = "step"
        self._sample("step begins", type(optimizer).__name__, None)
        if self._live is not None:
            self._live.owner = UPDATE

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(optimizer is one for one in self._optimizers):
            self._optimizers.append(optimizer)
        self._count_states()
        self._sample("step ends", type(optimizer).__name__, None)
        self._phase = "idle"
        if self._live is not None:
            self._live.owner = OTHER
        self._stepped = True
        self._end_step()

    def _count_states(self) -> None:
        self._states = Counter()
        for one in self._optimizers:
            for param, state in one.state.items():
                owner = owner_of(param)
                name = (owner.name or "(root)") if owner is not None else "not sharded"
                for tensor in state_tensors([state]):
                    self._states[("optimizer states", name)] += tensor.nbytes
                    if self._live is not None:
                        self._live.assign(tensor, ("counted", ""))

    def _end_step(self) -> None:
        kept: Counter[Key] = Counter()
        for watched in self._watched:
            counts = watched.tree.core.references()
            for unit, count, size in zip(watched.tree.units, counts, watched.gathered, strict=True):
                if count and unit.flat.reshards and unit.is_sharded:
                    kept[("gathered", unit.name or "(root)")] += size
        live = {**self._roles(), **kept}
        now = time.monotonic()
        if now - self._asked > PROCESS_S:
            self._process, self._asked = sum(process_bytes().values()), now
        self._profile.boundaries.append(Boundary(live, self._process))

    # --- samples ---

    def _roles(self) -> dict[Key, int]:
        roles = dict(self._states)
        for watched in self._watched:
            if watched.tree.units[0].tree is not watched.tree:
                continue  # another tree has taken over this tree's units
            roles.update(watched.fixed)
            stats = watched.tree.memory_stats()
            for role, stat in ENGINE.items():
                if stats[stat] and role not in SHARDS:
                    roles[(role, "")] = roles.get((role, ""), 0) + stats[stat]
        if self._live is not None:
            for key, count in self._live.by.items():
                if count and key[0] != "counted":
                    roles[key] = count
        return roles

    def _sample(self, event: str, unit: str, watched: _Watched | None) -> None:
        gathered = tuple(self._gathered())
        over = 0
        if self._live is not None:
            if watched is not None and self._phase == "backward":
                self._find_gradients(watched)
            over = self._live.top - self._live.bytes
            self._live.start()
        self._profile.samples.append(
            Sample(
                step=len(self._profile.boundaries),
                phase=self._phase,
                unit=unit,
                event=event,
                seconds=time.monotonic() - self._begin,
                live=self._roles(),
                over=over,
                gathered=gathered,
                resident=int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE,
                device=_device_figures(_gpu(self._watched)),
            )
        )

    def _gathered(self) -> Iterator[str]:
        for watched in self._watched:
            for unit, count in zip(watched.tree.units, watched.tree.core.references(), strict=True):
                if count:
                    yield unit.name or "(root)"

    def _find_gradients(self, watched: _Watched) -> None:
        assert self._live is not None
        for unit, count in zip(watched.tree.units, watched.tree.core.references(), strict=True):
            for full in unit.full if count else ():
                if full.grad is not None:
                    grad = _local(full.grad)
                    self._live.assign(grad, ("unit gradients", unit.name or "(root)"))


def _gpu(watched: Sequence[_Watched]) -> torch.device | None:
    return next((gpu for gpu in (gpu_of(one.tree) for one in watched) if gpu), None)


def _device_figures(device: torch.device | None) -> dict[str, int]:
    """Return the bytes of torch's allocator on a GPU; empty if there is no GPU."""
    if device is None:
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "active": stats["active_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
    }
