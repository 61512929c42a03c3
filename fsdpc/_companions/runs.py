"""Steps of Adam and AdamW that treat several small parameters of a unit as one tensor, a run.

On CPUs torch's loop makes a dozen operations for each parameter, and for a small parameter an
operation's overhead exceeds its arithmetic. The parameters of a unit lie one behind another in
memory, and so do the gradients. The optimizer states of these parameters are moved so that they lie
in the same order. torch's function then gets one tensor per run in each of its lists. The
parameters, gradients, states and step counters remain the same objects with the same values.

A run depends on the addresses of tensors, which a program may change at any time. Before each step
the addresses of all tensors are therefore compared with those for which the runs were planned. If
an address differs, torch collects the tensors as usual, and the runs are planned anew.

Results are bitwise equal to those without runs: each kernel computes an element only from the same
element of its inputs, and the kernel's code for the last elements of a tensor rounds as its other
code does. Once in each process a trial checks this rounding for each of ``_DTYPES``. Runs are
shorter than the tensors that torch divides among threads, because the divided parts would end at
other elements.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adam import adam

from fsdpc import _C
from fsdpc._engine.writeback import owner_of

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
_DTYPES = (torch.float32, torch.float64)
_LONGEST = 32767  # largest size of a run in elements: torch divides longer tensors among threads
_WIDEST = 512  # two neighbours in a run have at most this many bytes of padding between them
# Steps with a smaller eps have no runs: a step divides the zeros of the padding by eps.
_SMALLEST_EPS = 1e-30
_MOVES = 8  # the same states are moved at most this often: a program may undo each move
_PATIENCE = 8  # after 8 failed plans in a row, only one step in 8 makes a plan
_grad_of = attrgetter("grad")


def runs_of(optimizer: Any) -> Runs | None:
    """Return the ``Runs`` of an optimizer, or None if its steps cannot have runs. Local."""
    may = (
        type(optimizer) in _CLASSES
        and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # else reading an address is slow
        and _rounds_alike()
    )
    return Runs() if may else None


class Runs:
    """The runs of one optimizer. Local."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}
        self._moves: Counter[int] = Counter()
        self._missed = 0

    def collect(self, optimizer: Any, group: dict[str, Any], lists: Sequence[list[Any]]) -> bool:
        """Return whether the last plan of ``group`` is valid. If so, fill the lists for a step."""
        plan = self._plans.get(id(group))
        if plan is None or _options(optimizer, group) != plan.options:
            return False
        now = _collected(optimizer, group)
        if now is None or not plan.holds(now):
            return False
        self._missed = 0
        plan.fill(now, lists)
        return True

    def plan(self, optimizer: Any, group: dict[str, Any], lists: Sequence[list[Any]]) -> None:
        """Find the runs in a step's lists, which torch has filled with this rank's local tensors.

        Afterwards the lists have a run's tensors in the place of its parameters' tensors.
        """
        options = _options(optimizer, group)
        if options is None or len(lists[0]) < 2:
            return
        self._missed += 1
        if self._missed > _PATIENCE and self._missed % _PATIENCE:
            return
        now = _collected(optimizer, group)
        if now is None:
            return
        present = {id(one) for one in optimizer.param_groups}
        self._plans = {key: plan for key, plan in self._plans.items() if key in present}
        before = self._plans.get(id(group))
        known = _Memory(before.flats if before is not None else ())
        plan = self._plans[id(group)] = _planned(now, options, known, self._moves)
        states = (optimizer.state.get(param, {}) for param in group["params"])
        plan.flats = known.used(map(_local, chain.from_iterable(map(dict.values, states))))
        for tensors in lists:
            tensors.clear()
        plan.fill(now, lists)


def _options(optimizer: Any, group: dict[str, Any]) -> tuple[bool, ...] | None:
    """Return the options that decide which lists a step has; None if a step has no runs."""
    other = any(group.get(name) for name in ("fused", "capturable", "differentiable"))
    scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    refused = group["foreach"] and isinstance(group["lr"], Tensor)  # torch raises
    if other or scaled or refused or group["eps"] < _SMALLEST_EPS:
        return None
    return (bool(group["amsgrad"]),)


class _Collected:
    """The tensors of a parameter group's step. Each list has one entry for each parameter with a
    gradient, in the group's order.
    """

    def __init__(self, params: list[Any], grads: list[Any], states: list[Any]) -> None:
        self.lists = [params, grads, *map(list, zip(*states, strict=True))]
        self.tensors = list(chain(params, grads, chain.from_iterable(states)))

    def locals(self, positions: Sequence[int]) -> list[list[Tensor]]:
        return [[_local(tensors[i]) for i in positions] for tensors in self.lists]


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _collected(optimizer: Any, group: dict[str, Any]) -> _Collected | None:
    """Return the tensors of a group's step. Return None if states are unusual or missing, or if no
    parameter has a gradient.
    """
    params = group["params"]
    grads = list(map(_grad_of, params))
    given = list(map(is_not, grads, repeat(None)))
    if not all(given):
        params, grads = list(compress(params, given)), list(compress(grads, given))
    names = ["exp_avg", "exp_avg_sq", "step"]
    if group["amsgrad"]:
        names.insert(2, "max_exp_avg_sq")
    try:
        states = list(map(itemgetter(*names), map(optimizer.state.get, params)))
    except (KeyError, TypeError):
        return None
    return _Collected(params, grads, states) if states else None


class _Plan:
    """Which parameters of a step are in runs, and the tensors of the runs."""

    def __init__(self, options: tuple[bool, ...], count: int) -> None:
        self.options = options
        self.places: bytes | None = None
        # For each run: the tensors over all its parameters, all its gradients and all its states of
        # each kind, and the step counter of its first parameter.
        self.runs: list[list[Tensor]] = []
        self.single = list(range(count))  # positions of parameters that are in no run
        self.flats: list[Tensor] = []  # the tensors that contain the runs' states and step counters
        self.steps: Tensor | None = None
        # `steps` has the step counters of all parameters in runs. `members`: the position of each
        # such parameter's counter in `steps`. `firsts`: for each item of `members`, the position of
        # the first counter of the same run.
        self.members: Tensor
        self.firsts: Tensor
        # Added to `steps` in each step: 1 for the counters that torch's function does not increase.
        self.others: Tensor
        self.written: list[Any] = []

    def holds(self, now: _Collected) -> bool:
        if self.places is None or not _C.at_places(now.tensors, self.places):
            return False
        return self.steps is None or self._equal_steps(self.steps)

    def _equal_steps(self, steps: Tensor) -> bool:
        return torch.equal(steps[self.members], steps[self.firsts])

    def fill(self, now: _Collected, lists: Sequence[list[Any]]) -> None:
        """Fill the lists of torch's function. Without amsgrad the fifth list stays empty."""
        used = [*lists[:4], lists[5]] if len(now.lists) == 5 else lists
        single = now.locals(self.single)
        for tensors, own, column in zip(
            used, single, zip(*self.runs, strict=True) if self.runs else repeat(()), strict=False
        ):
            tensors.extend(column)
            tensors.extend(own)
        if self.steps is not None:
            self.steps.add_(self.others)
            increment_version(self.written)


# --- planning ------------------------------------------------------------------------------------


def _planned(
    now: _Collected, options: tuple[bool, ...], known: _Memory, moves: Counter[int]
) -> _Plan:
    plan = _Plan(options, len(now.lists[0]))
    chains = _chains(now)
    with torch.no_grad():
        chains = [run for run in chains if _pack_states(now, run, known, moves)]
        if chains and not _pack_steps(now, list(chain.from_iterable(chains)), known, moves):
            chains = []
        _add_runs(plan, now, chains, known)
    plan.places = _C.places(now.tensors)
    return plan


class _Memory:
    """The flat tensors that were made for states. A gap between two states in such a tensor is
    padding.
    """

    def __init__(self, flats: Iterable[Tensor]) -> None:
        self.flats = sorted(flats, key=Tensor.data_ptr)
        self.starts = [flat.data_ptr() for flat in self.flats]

    def add(self, flat: Tensor) -> None:
        at = bisect_right(self.starts, flat.data_ptr())
        self.flats.insert(at, flat)
        self.starts.insert(at, flat.data_ptr())

    def used(self, tensors: Iterable[Any]) -> list[Tensor]:
        """Return the flat tensors that contain at least one of ``tensors``."""
        found = (self.of(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        return list({id(flat): flat for flat in found if flat is not None}.values())

    def of(self, tensor: Tensor) -> Tensor | None:
        at = bisect_right(self.starts, tensor.data_ptr()) - 1
        if at < 0:
            return None
        flat = self.flats[at]
        end = flat.data_ptr() + flat.nbytes
        return flat if tensor.data_ptr() + tensor.nbytes <= end else None


class _Member:
    """A parameter that can be in a run."""

    def __init__(self, position: int, unit: Any, local: Tensor, grad: Tensor, step: float) -> None:
        self.position, self.unit, self.local, self.step = position, unit, local, step
        self.at, self.grad_at, self.bytes = local.data_ptr(), grad.data_ptr(), local.nbytes


def _chains(now: _Collected) -> list[list[_Member]]:
    """Return lists of parameters that can form runs: their step counters are equal, and they and
    their gradients lie one behind another in memory.
    """
    by_unit: dict[int, list[_Member]] = {}
    found: list[list[_Member]] = []
    for position, tensors in enumerate(zip(*now.lists, strict=True)):
        member = _member(position, tensors)
        if member is not None:
            by_unit.setdefault(id(member.unit), []).append(member)
    if _shared(now, chain.from_iterable(by_unit.values())):
        return found
    for members in by_unit.values():
        following = _following(members[0].unit)
        members.sort(key=lambda member: member.at)
        run = members[:1]
        for member in members[1:]:
            if not _joins(run, member, following):
                found.append(run)
                run = []
            run.append(member)
        found.append(run)
    return [run for run in found if len(run) > 1]


def _shared(now: _Collected, members: Iterable[_Member]) -> bool:
    """Whether parameters share a gradient or a state: torch would update a shared state twice."""
    addresses = Counter(
        _local(tensors[member.position]).data_ptr()
        for member in members
        for tensors in now.lists[1:]
    )
    return any(count > 1 for count in addresses.values())


def _member(position: int, tensors: Sequence[Any]) -> _Member | None:
    unit = owner_of(tensors[0])
    if unit is None:
        return None
    local, *rest, step = map(_local, tensors)
    if local.device.type != "cpu" or local.dtype not in _DTYPES:
        return None
    if not 0 < local.numel() < _LONGEST or type(step) is not Tensor or step.dim() > 0:
        return None
    if step.device.type != "cpu" or step.dtype not in _DTYPES or step.requires_grad:
        return None
    for other in rest:
        if type(other) is not Tensor or other.dtype != local.dtype or other.requires_grad:
            return None
        if other.device.type != "cpu" or other.shape != local.shape:
            return None
        if other.stride() != local.stride():
            return None
    return _Member(position, unit, local, rest[0], step.item())


def _following(unit: Any) -> dict[int, int]:
    """Return {address of a parameter of the unit: address of the next parameter in memory}.

    There is only padding between the two parameters.
    """
    held = sorted(view.data_ptr() for view in unit.views if view.numel() > 0)
    return dict(zip(held, held[1:], strict=False))


def _joins(run: list[_Member], member: _Member, following: dict[int, int]) -> bool:
    first, last = run[0], run[-1]
    gap = member.at - (last.at + last.bytes)
    return (
        following.get(last.at) == member.at
        and 0 <= gap <= _WIDEST
        and member.grad_at - last.grad_at == member.at - last.at
        and member.local.dtype == last.local.dtype
        and member.step == last.step
        and _numel(first, member) <= _LONGEST
    )


def _numel(first: _Member, last: _Member) -> int:
    return (last.at + last.bytes - first.at) // first.local.element_size()


def _pack_states(now: _Collected, run: list[_Member], known: _Memory, moves: Counter[int]) -> bool:
    """Move the states of a run so that they lie in memory in the order of the run's parameters.

    Return False if the states have been moved too often.
    """
    first = run[0]
    states = [[_local(tensors[m.position]) for m in run] for tensors in now.lists[2:-1]]
    if all(_lie_like(run, own, known) for own in states):
        return True
    if moves[first.at] >= _MOVES:
        return False
    moves[first.at] += 1
    for own in states:
        flat = torch.zeros(_numel(first, run[-1]), dtype=first.local.dtype, device="cpu")
        known.add(flat)
        for member, state in zip(run, own, strict=True):
            begin = (member.at - first.at) // state.element_size()
            _move(state, flat[begin : begin + state.numel()])
    return True


def _lie_like(run: list[_Member], states: list[Tensor], known: _Memory) -> bool:
    first = known.of(states[0])
    return first is not None and all(
        known.of(state) is first
        and state.data_ptr() - states[0].data_ptr() == member.at - run[0].at
        for member, state in zip(run, states, strict=True)
    )


def _move(tensor: Tensor, memory: Tensor) -> None:
    """Move the values of ``tensor`` to ``memory``. ``tensor`` gets a storage that covers only this
    memory, so that code that saves or copies the storage gets no other tensor's values.
    """
    own = torch.from_dlpack(memory).as_strided(tensor.shape, tensor.stride())
    own.copy_(tensor)
    tensor.data = own


def _pack_steps(
    now: _Collected, members: list[_Member], known: _Memory, moves: Counter[int]
) -> bool:
    """Move the step counters of all runs into one tensor. Return False if that is not possible."""
    steps = [now.lists[-1][member.position] for member in members]
    flat = known.of(steps[0])
    if flat is not None and all(known.of(step) is flat for step in steps):
        return True
    if moves[0] >= _MOVES or any(step.dtype != steps[0].dtype for step in steps):
        return False
    moves[0] += 1
    flat = torch.zeros(len(steps), dtype=steps[0].dtype, device="cpu")
    known.add(flat)
    for i, step in enumerate(steps):
        _move(step, flat[i : i + 1])
    return True


def _add_runs(plan: _Plan, now: _Collected, chains: list[list[_Member]], known: _Memory) -> None:
    members, firsts = [], []
    for run in chains:
        tensors = _flats_of(now, run, known)
        if tensors is None:
            continue
        plan.runs.append(tensors)
        for member in run:
            param = now.lists[0][member.position]
            plan.written.extend({id(t): t for t in (param, member.local)}.values())
            step = now.lists[-1][member.position]
            plan.steps = known.of(step)
            members.append(_index(step, plan.steps))
            firsts.append(_index(tensors[-1], plan.steps))
        joined = {member.position for member in run}
        plan.single = [i for i in plan.single if i not in joined]
    if plan.steps is not None:
        plan.members = torch.tensor(members, device="cpu")
        plan.firsts = torch.tensor(firsts, device="cpu")
        plan.others = torch.zeros_like(plan.steps)
        plan.others[plan.members] = 1
        plan.others[plan.firsts] = 0


def _index(step: Tensor, steps: Any) -> int:
    return (step.data_ptr() - steps.data_ptr()) // steps.element_size()


def _flats_of(now: _Collected, run: list[_Member], known: _Memory) -> list[Tensor] | None:
    """Return the tensors that torch's function gets for a run; None if parameters or gradients are
    not in the unit's memory.
    """
    first, numel = run[0], _numel(run[0], run[-1])
    dtype, flat = first.local.dtype, first.unit.flat
    param = _span(flat.shard, first.at, numel, dtype)
    grad = _span(flat.grad, first.grad_at, numel, dtype)
    if param is None or grad is None:
        return None
    states = []
    for tensors in now.lists[2:-1]:
        state = _local(tensors[first.position])
        memory: Any = known.of(state)
        begin = _index(state, memory)
        states.append(memory[begin : begin + numel])
    return [param, grad, *states, now.lists[-1][first.position]]


def _span(memory: Any, at: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor over ``numel`` elements from address ``at`` on. Return None if the elements
    are not in ``memory``.
    """
    whole = torch.from_dlpack(memory.view(np.uint8))
    begin, size = at - whole.data_ptr(), numel * dtype.itemsize
    if begin < 0 or begin + size > whole.numel():
        return None
    return whole[begin : begin + size].view(dtype)


# --- rounding ------------------------------------------------------------------------------------


@functools.cache
def _rounds_alike() -> bool:
    """Whether torch's kernels for this CPU give the same bits for several tensors as for one tensor
    with all their elements. The kernels may have separate code for a tensor's last elements.
    """
    sizes = [1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 33, 47, 63, 65]
    return all(
        torch.equal(*_both_ways(sizes, dtype, foreach))
        for dtype in _DTYPES
        for foreach in (False, True)
    )


def _both_ways(sizes: list[int], dtype: torch.dtype, foreach: bool) -> list[Tensor]:
    """Return the parameters after steps of Adam on tensors of these sizes, and on one tensor."""
    random = torch.Generator(device="cpu").manual_seed(1)
    numel, results = sum(sizes), []
    values = torch.randn((4, numel), dtype=dtype, generator=random, device="cpu")
    for cut in (sizes, [numel]):
        param, *grads, average = values.clone()
        columns = [param, average.mul_(0.1), average.square(), average.square()]
        lists = [list(column.split(cut)) for column in columns]
        steps = [torch.zeros((), device="cpu") for _ in cut]
        for grad in grads:
            adam(
                lists[0],
                list(grad.split(cut)),
                lists[1],
                lists[2],
                lists[3],
                steps,
                foreach=foreach,
                amsgrad=True,
                beta1=0.9,
                beta2=0.999,
                lr=1e-2,
                weight_decay=0.1,
                eps=1e-8,
                maximize=False,
            )
        results.append(param)
    return results
