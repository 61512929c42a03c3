"""The base class of fsdpc's optimizers, which chooses the tensors of a step and the places of
states, and loads state dicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fsdpc import _C
from fsdpc._companions.state_layout import Extent
from fsdpc._engine.compiled import hook
from fsdpc._engine.interop import around
from fsdpc._fsdp2.extension import is_opaque
from fsdpc.optim._chunks import (
    AVERAGE,
    MASTER,
    NARROW,
    Ends,
    GuardedState,
    Store,
    follow,
    step_chunks,
    whole_extent,
)
from fsdpc.optim._device import ordinals_of, step_device, step_on
from fsdpc.optim._disk import Disk
from fsdpc.optim._disk import Store as DiskStore
from fsdpc.optim._host import Host, HostStore, all_in_host_memory
from fsdpc.optim._places import Group, local_of, locals_of
from fsdpc.optim._scaling import Members, Rule, ScaledSteps, Scaling, are_finite, is_set
from fsdpc.optim._statistics import MEASURES, Measured, Meter
from fsdpc.optim._table import COPIES, GRADS, PARAMS, PATIENCE, Table, table_of

NOT_OF_GROUPS = set("self params offload matrices split ns_dtype head_dim block".split())
TUPLES = {"betas", "adamw_betas", "ns_coefficients"}


class FusedOptimizer(ScaledSteps):
    """The base class of optimizers that step in one pass over parameters, gradients and states. The
    pass runs in C on the host, or as kernels on a GPU.

    Subclasses step one parameter group at a time in ``_step_group``. A step with clipping is
    collective over the ranks that share the parameters. Any other step is local, unless the
    optimizer's documentation says that it is collective.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf for the step
    _state_names: tuple[
        str, ...
    ] = ()  # names of the states with one value per element, in the order of the C code

    _kind: str | None = None  # the name of the rule in C; None: steps use no table (_table.py)
    _counter: str | None = "step"  # the name of the state that counts steps; None: there is none
    _tables = 0  # successive steps without a table; measured and skipped steps do not count
    _copies: dict[Tensor, Tensor] | None = None
    _store: Store | None = None  # where offloaded states are; None: no state is offloaded
    _where: int | None = None  # in a worker (see worker_of): the GPU on which it steps; else None
    _meter: Meter | None = None
    _fsdpc_average: Any = None  # the ``optim.Average`` of the parameters, if there is one

    def _open(self, given: dict[str, Any], **more: Any) -> None:
        """Do the work of a subclass's constructor. ``given``: the constructor's ``locals()``. The
        arguments that are not in ``NOT_OF_GROUPS``, and ``more``, become options of the groups.
        ``ValueError``, with torch's text: a number is out of range.
        """
        known = [name for name in given if name not in NOT_OF_GROUPS and name[:2] != "__"]
        options = {name: given[name] for name in known} | more
        for name in TUPLES & options.keys():
            options[name] = None if options[name] is None else tuple(options[name])
        if isinstance(options["lr"], Tensor) and options["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        check_number(options["lr"], "learning rate")
        check_number(options.get("eps", 0.0), "epsilon value")
        check_number(options.get("momentum", 0.0), "momentum value")
        check_number(options["weight_decay"], "weight_decay value")
        if options.get("differentiable"):
            raise NotImplementedError(
                f"fsdpc.optim.{type(self).__name__} has no differentiable steps: use torch.optim"
            )
        for number, beta in enumerate(options.get("betas", ())):
            check_number(beta, f"beta parameter at index {number}", below=1.0)
        super().__init__(given["params"], options)
        self._offload(given["offload"])

    def _offload(self, where: Disk | Host | None) -> None:
        """Set the store of offloaded states: a file for a ``Disk``, host memory for a ``Host``. A
        ``Host`` without ``masters`` has no effect if all parameters are in host memory.
        """
        name = type(self).__name__
        if isinstance(where, Disk):
            self._store = DiskStore(where, name)
        elif isinstance(where, Host):
            params = [p for group in self.param_groups for p in group["params"]]
            if not where.masters and all_in_host_memory(params):
                return
            self._store = HostStore(where, name)
        elif where is not None:
            raise TypeError(f"offload must be a fsdpc.optim.Disk, a Host or None, got {where!r}")
        else:
            return
        self.state = GuardedState(self.state, self._store)

    def _add_defaults(self, **options: Any) -> None:
        """Add a subclass's options to groups that lack them, also to groups added later."""
        self.defaults.update(options)
        for group in self.param_groups:
            for name, value in options.items():
                group.setdefault(name, value)

    # --- a step ----------------------------------------------------------------------------------

    @torch.no_grad()
    @hook  # torch.compile must not trace a step, whose work is in C
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
    ) -> Any:
        """Do one step and return the closure's loss.

        With ``max_norm``, gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))`` in the
        same pass. The result is that of ``torch.nn.utils.clip_grad_norm_`` and a step after it.
        ``norm`` is the 2-norm of all gradients of this optimizer over all ranks, and is kept as
        ``last_norm``. Such a step does not write to ``.grad``, neither for the clipping nor for a
        loss scale. With ``torch.amp.GradScaler``, call ``scaler.step(optimizer, max_norm=...)``.

        With ``max_norm``, collective over the ranks that share parameters. Without it, local,
        unless the class says otherwise. ``NotImplementedError``: a parameter is neither on the host
        nor on a CUDA GPU. ``RuntimeError``: a gradient is sparse. After either error, the parameter
        group with this parameter has not changed.

        If all parameters are on one GPU, the step is queued on torch's current stream and the host
        does not wait: the loss scale, the flag for infinities, the clipping factor and the state
        ``step`` stay on the GPU. With ``max_norm``, the host waits for the norm unless all
        parameters are in units of one model. The host also reads ``lr`` if it is a tensor.
        """
        if self._inside is not None:
            return self._inside.end_step(closure, max_norm)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        table, measures = self._table, self._meter is not None and self._meter.begin()
        if table is not None and not measures and table.read(self):
            self._tables = 0
            try:
                self._step_table(table, max_norm, grad_scale, found_inf)
            finally:
                table.end()
            return loss
        if not measures:
            self._table = None
        on_gpu = self._is_on_gpu()
        members = [self._members(group["params"]) for group in self.param_groups]
        if self._check is not None:
            found_inf = self._checked(self._squares(members), partial(are_finite, members))
        if not on_gpu and is_set(found_inf):
            return loss
        self._check_states()
        reading = self._begin_step(members)
        if on_gpu:
            scaling = self._scaling_on_gpu(members, max_norm, grad_scale, found_inf)
        else:
            parts = [] if max_norm is None else self._squares(members)
            scaling = self._scaling_on_host(parts, max_norm, grad_scale)
        self._step_begun(members, reading, scaling)
        if measures:
            assert self._meter is not None
            self._meter.end(scaling.scale)
        else:
            self._make_table()
        return loss

    def _steps_plainly(self) -> bool:
        """Return False if a subclass overrides ``step``, because that method may do more than this
        class's ``step``.
        """
        step: Any = type(self).step
        if getattr(step, "hooked", False):  # torch's wrapper calls hooks around the step
            step = step.__wrapped__
        return step is FusedOptimizer.step

    def measure(self, every: int = 1) -> None:
        """Let each ``every``-th step measure its gradients (before clipping, divided by the loss
        scale), its updates, and the weights after the step. ``statistics`` then has the norms and
        largest magnitudes of each parameter and unit. With 0, no step is measured. Local. A
        measured step is collective over the ranks that share parameters, and every rank must call
        ``step`` the same number of times.

        The pass of the step computes the numbers; the step's results do not change by a bit.
        ``NotImplementedError``: states are offloaded, or the optimizer steps in backward. A
        measured step raises this error if a parameter is on a GPU.
        """
        if every < 0:
            raise ValueError(f"measure: every={every} must not be negative")
        if self._store is not None or self._inside is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.measure(): steps with offload= and in backward have no "
                "statistics. Keep the states in memory, and step after backward"
            )
        self._meter = Meter(self, every) if every else None

    @property
    def statistics(self) -> Measured | None:
        """The statistics of the last measured step, or None before the first measured step. A step
        that a loss scaler skips is not measured. Local.
        """
        return None if self._meter is None else self._meter.found

    @property
    def _measured(self) -> Meter | None:
        """The meter if the present step is measured, else None."""
        return self._meter if self._meter is not None and self._meter.on else None

    def _make_table(self) -> None:
        if self._kind is None or (self._tables > PATIENCE and self._tables % PATIENCE):
            self._tables += 1
            return
        self._table = table_of(self)
        self._tables += 1

    def _step_table(
        self, table: Table, max_norm: float | None, grad_scale: Any, found_inf: Any
    ) -> None:
        parts: list[tuple[list[Group], float]] = []
        if max_norm is not None or self._check is not None:
            parts = table.squares()
        if self._check is not None:
            found_inf = self._checked(parts, table.are_finite)
        if is_set(found_inf):
            return
        scaling = self._scaling_on_host(parts, max_norm, grad_scale)
        threads = torch.get_num_threads()
        for number, group in enumerate(self.param_groups):
            rule = tuple(self._rule(group, scaling))
            weight, params = self._weight_of(group), group["params"]
            moved = _C.optim_table_step(table.core, number, self._kind, rule, threads, weight)
            if moved:
                whole = moved == len(params)
                stepped = params if whole else [p for p in params if p.grad is not None]
                self._fsdpc_average._took(p for p in stepped if whole or AVERAGE in self.state[p])
        increment_version(table.changed(PARAMS))
        if self._copies is not None:
            increment_version(table.changed(COPIES))
        if scaling.writes_grads:
            increment_version(table.changed(GRADS))

    def _table_place(self, param: Tensor) -> tuple[int, int] | None:
        """Return two numbers that the random bits of a step depend on: the index in the whole
        parameter of the first element that this rank has, and the whole parameter's key. Return
        None if a table cannot step this parameter.
        """
        return 0, 0

    def _rule(self, group: dict[str, Any], scaling: Scaling) -> Rule:
        raise NotImplementedError

    def _step_members(self, members: list[Members], scaling: Scaling) -> None:
        self._check_states()
        self._step_begun(members, self._begin_step(members), scaling)

    def _step_begun(self, members: list[Members], reading: Any, scaling: Scaling) -> None:
        self._before_step(members, scaling)
        resident = members if self._store is None else self._part(members, False)
        with self._inside_state():
            for group, found in zip(self.param_groups, resident, strict=True):
                if found.params:
                    self._step_resident(group, found, scaling)
            if reading is not None:
                step_chunks(self, reading, self._part(members, True), scaling)
        for found in members:
            if found.params:
                self._finish(found, scaling.writes_grads)

    def _step_resident(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        """Step parameters whose states are not offloaded. If a parameter has a master, the master
        is stepped and then copied to the parameter.
        """
        if self._store is None or not self._store.masters:
            scaling = scaling._replace(weight=self._weight_of(group))
            self._step_group(group, found, scaling)
            return
        pairs = [
            (number, value, local_of(self.state[param][MASTER]))
            for number, (param, value) in enumerate(zip(found.params, found.values, strict=True))
            if self._has_master(param)
        ]
        values = list(found.values)
        for number, value, master in pairs:
            follow(master, value)
            values[number] = master
        self._step_group(group, found._replace(values=values), scaling)
        for _, value, master in pairs:
            value.copy_(master)

    def _weight_of(self, group: dict[str, Any]) -> float | None:
        """Return the weight with which a step adds new values of a group's parameters to their
        averages (``optim.Average``), or None if the pass of this step does not update averages.
        """
        average = self._fsdpc_average
        plain = average is not None and self._store is None and self._steps_plainly()
        return average._weight_in_pass(group) if plain else None

    def _part(self, members: list[Members], offloaded: bool) -> list[Members]:
        """Return ``members`` with only those parameters whose states are offloaded, or, with
        ``offloaded=False``, with only the other parameters.
        """
        store = self._store
        assert store is not None
        parts = []
        for found in members:
            own = [i for i, p in enumerate(found.params) if store.takes(p) == offloaded]
            values, grads = [found.values[i] for i in own], [found.grads[i] for i in own]
            parts.append(Members([found.params[i] for i in own], values, grads, []))
        return parts

    def _inside_state(self) -> Any:
        state = self.state
        return state.inside() if isinstance(state, GuardedState) else nullcontext()

    def write_copies(self, copies: Mapping[Tensor, Tensor] | None) -> None:
        """Let each step write the new value of each float32 parameter ``param`` also to
        ``copies[param]``, rounded to the nearest bfloat16 or float16. In host memory, the pass
        that updates the parameters also writes the copies, 2 bytes per element.

        This method is for a model in low precision whose float32 masters are this optimizer's
        parameters. The copies get the parameters' values now and after each step that changes the
        parameters. A program that writes a parameter itself must call this method again. With None,
        steps no longer write copies. Local.

        ``ValueError``: a key is no parameter of this optimizer, or a copy has another shape.
        ``TypeError``: a copy is no plain 16-bit tensor, or its parameter is no plain float32
        tensor.
        """
        self._copies = self._table = None
        own = {param for group in self.param_groups for param in group["params"]}
        for param, copy in (copies or {}).items():
            if param not in own:
                raise ValueError("write_copies: a parameter is not this optimizer's")
            what = f"write_copies: a copy of a parameter of shape {tuple(param.shape)}"
            low = copy.dtype in (torch.bfloat16, torch.float16) and param.dtype == torch.float32
            if not low or type(copy) not in (Tensor, Parameter) or isinstance(param, DTensor):
                raise TypeError(
                    f"{what} in {param.dtype} is a {type(copy).__name__} in {copy.dtype}: copies "
                    "are plain tensors in bfloat16 or float16, of float32 parameters that are no "
                    "DTensors"
                )
            if copy.shape != param.shape or not copy.is_contiguous():
                raise ValueError(f"{what} is {tuple(copy.shape)} or not contiguous")
            with torch.no_grad():
                copy.copy_(param)
        self._copies = dict(copies) if copies else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's method does. ``TypeError``: a parameter is of a tensor subclass
        whose memory only the code of the subclass can read.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if is_opaque(local_of(param)):
                raise TypeError(
                    f"{type(self).__name__} steps on plain memory, but a parameter of shape "
                    f"{tuple(param.shape)} is a {type(local_of(param)).__name__}: use an optimizer "
                    "of torch.optim for it"
                )

    def step_and_clip(self, max_norm: float) -> Tensor:
        """Call ``step(max_norm=max_norm)`` and return the norm before clipping, a float64 0-dim
        tensor.

        The step makes one pass over the gradients for the norm, and one pass over gradients,
        parameters and states for the update. Collective.
        """
        self.step(max_norm=max_norm)
        assert self.last_norm is not None
        return self.last_norm

    def _check_states(self) -> None:
        """Raise the store's error if an earlier step failed after it had changed some states."""
        if isinstance(self.state, GuardedState):
            with self.state.inside():
                self.state.check()

    def _begin_step(self, members: list[Members]) -> Any:
        """Make the states that do not exist yet, and start to read the offloaded states. Return the
        pass over the offloaded states, or None if there are none.
        """
        active = [param for found in members for param in found.params]
        with self._inside_state():
            if self._store is not None:
                self._place_states({id(param) for param in active})
            for group, found in zip(self.param_groups, members, strict=True):
                self._begin_group(group, found)
            for param in active:
                self._begin_master(param)
        store = self._store
        return None if store is None else store.passes([p for p in active if store.takes(p)])

    def _begin_master(self, param: Tensor) -> None:
        """Make the master of a parameter whose states are not offloaded, if the parameter needs a
        master and has none.
        """
        if not self._has_master(param) or self._store is None or self._store.takes(param):
            return
        self._widen(param)
        state = self.state[param]
        if MASTER not in state:
            own = local_of(param).to(torch.float32, memory_format=torch.contiguous_format)
            state[MASTER] = around(own, param._spec) if isinstance(param, DTensor) else own

    def _widen(self, param: Tensor) -> None:
        """Convert the states of a parameter with a master to float32. States that were loaded, or
        set by the user, may have another dtype.
        """
        state = self.state[param]
        for name in (*self._state_names, MASTER):
            value = state.get(name)
            if isinstance(value, Tensor) and value.dtype != torch.float32:
                state[name] = value.detach().to(torch.float32).contiguous()

    def _place_states(self, which: set[int]) -> None:
        """Reserve places in the store for the states of the parameters with the ids ``which``, and
        copy states that are elsewhere to these places.
        """
        store = self._store
        assert store is not None
        everything = [
            (param, self._extents(group, param))
            for group in self.param_groups
            for param in group["params"]
        ]
        store.choose(everything)
        wanted = [each for each in everything if id(each[0]) in which and store.takes(each[0])]
        store.reserve(wanted)
        for param, _ in wanted:
            if param in self.state:
                self._adopt(param)

    def _adopt(self, param: Tensor) -> None:
        """Copy offloaded states that are elsewhere (loaded, or set by the user) to their places."""
        assert self._store is not None
        self._store.adopt(param, self.state[param])

    def _show_states(self, param: Tensor) -> None:
        """Add to ``self.state`` the offloaded states that a step has made."""
        store, state = self._store, self.state[param]
        assert store is not None
        for name in store.held[param][0]:
            if name not in state:
                state[name] = store.tensor(param, name)

    def _extents(self, group: dict[str, Any], param: Tensor) -> list[Extent]:
        """Return the extents of a parameter (ranges of its elements, with the states of each
        range), in the order in which a store has them.
        """
        states = [(name, self._state_dtype(param)) for name in self._names(group)]
        if self._has_master(param):
            states.append((MASTER, torch.float32))
        return [whole_extent(param, states)]

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states with one value per element of a group's parameters."""
        return self._state_names

    def _beside(self, param: Tensor) -> dict[str, int]:
        """Return the states of a parameter that ``offload`` does not move, as a dict from the
        state's name to its number of bytes.
        """
        return {} if self._counter is None else {self._counter: 4}

    def _has_master(self, param: Tensor) -> bool:
        return self._store is not None and self._store.masters and param.dtype in NARROW

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        """Make the states that do not exist yet."""
        for param in found.params:
            if not self.state[param]:
                made = {name: self._zeros(param, name) for name in self._names(group)}
                self.state[param].update(step=step_counter(param), **made)

    def _before_step(self, members: list[Members], scaling: Scaling) -> None:
        """Exchange what a step needs from other ranks. All ranks call this method in every step."""

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        steps = self._counters(group, found.params)
        states = tuple(
            locals_of([self.state[param][name] for param in found.params])
            for name in self._names(group)
        )
        self._run(self._kind, self._rule(group, scaling), scaling, found, states, steps)

    def _counters(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Return the step counters of the parameters."""
        return [self.state[param]["step"] for param in params]

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        """Let ``worker`` step ``part``, a slice of a parameter. ``held``: the slice's states."""
        real = self.state[param]
        own = {name: state for name, state in held.items() if name in real}
        if "step" in real:
            own["step"] = real["step"] if ends.is_last else real["step"].clone()
        worker.state[part] = own

    def _communicates(self) -> bool:
        """Return True if a step without clipping communicates with other ranks. Local."""
        return False

    def _members(self, candidates: Sequence[Tensor]) -> Members:
        params, values, grads, copies = [], [], [], []
        for param in candidates:
            grad = param.grad
            if grad is None:
                continue
            value = param
            if type(grad) is not Tensor:
                value, grad = local_of(param), local_of(grad)
            if grad.is_sparse or value.device.type not in ("cpu", "cuda"):
                self._refuse(param)
            if not value.is_contiguous():
                value = value.contiguous()
                copies.append((local_of(param), value))
            params.append(param)
            values.append(value)
            grads.append(grad if grad.is_contiguous() else grad.contiguous())
        return Members(params, values, grads, copies)

    def _refuse(self, param: Tensor) -> None:
        name = type(self).__name__
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(f"{name} does not support sparse gradients")
        raise NotImplementedError(
            f"fsdpc.optim.{name} steps parameters in host memory and on CUDA GPUs; a parameter of "
            f"shape {tuple(param.shape)} is on {param.device}: use torch's optimizers there"
        )

    def _run(
        self,
        kind: Any,
        rule: Rule,
        scaling: Scaling,
        found: Members,
        states: tuple[list[Tensor], ...],
        steps: list[Tensor],
        places: tuple[tuple[int, int, int], ...] | None = None,
        edges: np.ndarray | None = None,
    ) -> None:
        """Call ``_C.optim_step`` once for each device, with the tensors of that device."""
        params, values, grads, _ = found
        wheres = self._ordinals(params)
        for where in dict.fromkeys(wheres):
            own = [i for i, each in enumerate(wheres) if each == where]

            def of(items: Any, own: list[int] = own) -> Any:
                return items if len(own) == len(params) else [items[i] for i in own]

            arguments = (
                of(values),
                of(grads),
                tuple(of(state) for state in states),
                of(steps),
                None if places is None else tuple(of(places)),
            )
            part = edges if edges is None or len(own) == len(params) else edges[own]
            if where is not None:
                step_on(where, kind, tuple(rule), scaling.control, *arguments, part)
            else:
                self._run_on_host(kind, rule, scaling.weight, of(params), arguments, part)
            if part is not edges and edges is not None and part is not None:
                edges[own] = part

    def _run_on_host(
        self,
        kind: Any,
        rule: Rule,
        weight: float | None,
        params: Sequence[Tensor],
        arguments: tuple[Any, ...],
        edges: np.ndarray | None,
    ) -> None:
        meter = self._measured if kind != "edges8" else None
        measures = None if meter is None else np.zeros((len(params), MEASURES))
        averages = None
        if weight is not None:
            averages = (weight, self._fsdpc_average._within(params, arguments[0]))
        _C.optim_step(
            kind,
            tuple(rule),
            *arguments,
            edges,
            threads=torch.get_num_threads(),
            measures=measures,
            averages=averages,
        )
        if averages is not None:
            moved = zip(params, averages[1], strict=True)
            self._fsdpc_average._took(param for param, own in moved if own is not None)
        for param, row in zip(params, () if measures is None else measures, strict=False):
            assert meter is not None
            meter.add(param, row)

    def _ordinals(self, params: Sequence[Tensor]) -> list[int | None]:
        """Return the GPU of each parameter, or None if the parameter is in host memory."""
        return ordinals_of(params) if self._where is None else [self._where] * len(params)

    def _finish(self, found: Members, grads_changed: bool) -> None:
        for param, copy in found.copies:
            param.copy_(copy)
        others = [v for p, v in zip(found.params, found.values, strict=True) if v is not p]
        increment_version([*found.params, *others])
        for param, value in zip(found.params, found.values, strict=True):
            if self._copies is not None and param in self._copies:
                self._copies[param].copy_(value)
        if not grads_changed:
            return
        changed = []
        for param, grad in zip(found.params, found.grads, strict=True):
            own = local_of(param.grad)
            if own is not grad:
                own.copy_(grad)
            changed.append(param.grad)
        increment_version(changed)

    # --- states ----------------------------------------------------------------------------------

    def state_memory(self, param: Tensor, name: str) -> Tensor | None:
        """Return the memory of an offloaded state, which a checkpoint then fills. Return None if
        the store has no place for this state. Local.
        """
        if self._store is None:
            return None
        self._place_states({id(param)})
        if not any(name in each for each in self._store.held.get(param, ())):
            return None
        self._store.zero.discard((param, name))
        return self._store.tensor(param, name)

    def settle_states(self, params: Sequence[Tensor]) -> None:
        """Move states to their places after a checkpoint has set them. Convert them to float32 if
        their parameters have masters. Local.
        """
        if self._store is None:
            return
        self._place_states({id(param) for param in params})
        for param in params:
            if self._has_master(param) and not self._store.takes(param):
                self._widen(param)

    def finish_states(self) -> None:
        """Wait until no transfer writes to states any more. Local."""
        if self._store is not None:
            self._store.finish()

    def __getstate__(self) -> dict[str, Any]:
        """Return the content from which a copy of the optimizer is made. A copy has its states in
        ordinary memory, even if this optimizer has them in a file.
        """
        name = type(self).__name__
        if isinstance(self._store, HostStore):
            raise NotImplementedError(
                f"{name} with offload=Host(...) cannot be copied: a copy would not know its "
                "states' places. "
                f"Copy the model, make {name}(..., offload=Host(...)) of the copy's "
                "parameters, and load this one's state_dict() there"
            )
        state = super().__getstate__()
        return state if self._copies is None else {**state, "_copies": self._copies}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or loaded optimizer. A group that lacks an option gets the default."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's class with the same rule.

        torch's method casts every state to its parameter's dtype. This method casts states directly
        to the dtype that this optimizer uses, so they are rounded at most once.
        """
        seen: list[dict[str, Any]] = []

        def keep(_: Any, given: dict[str, Any]) -> Any:
            seen.append(given)
            if self._store is None or self._store.ordinal is None:
                return None
            return {**given, "state": {}}  # otherwise torch would copy all states to the GPU

        handle = self.register_load_state_dict_pre_hook(keep)  # runs after all other hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        given = seen[0]
        if self._store is not None:
            self._place_states(set())
        ids = [i for group in given["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in zip(ids, params, strict=True):
            if number in given["state"]:
                self.state[param] = self._loaded(param, given["state"][number])
        self._table = None
        if self._store is not None:
            self.state = GuardedState(self.state, self._store)
            self._place_states({id(param) for param in self.state})
        self._after_load()

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter, made from its entry in a state dict."""
        state = dict(saved)
        offloaded = self._store is not None and self._store.takes(param)
        if "step" in state:
            step = state["step"]
            step = step if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
            state["step"] = step.detach().to(step_device(param), torch.float32, copy=True)
        for name in (*self._state_names, *([MASTER] if self._has_master(param) else [])):
            value = state.get(name)
            if isinstance(value, Tensor) and not offloaded:
                dtype = self._state_dtype(param)
                new = value.detach().to(param.device, dtype, copy=True)
                state[name] = new.contiguous()
        return state

    def _after_load(self) -> None:
        """Do a subclass's work after the states of all parameters were loaded."""

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self._has_master(param) else param.dtype

    def _zeros(self, param: Tensor, name: str) -> Tensor:
        """Return a state of a parameter, filled with zeros. The state is a DTensor if the parameter
        is a DTensor.
        """
        if self._store is not None and self._store.takes(param):
            return self._store.zeros(param, name)
        dtype = self._state_dtype(param)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)


def step_counter(param: Tensor) -> Tensor:
    """Return a new state ``step`` of a parameter: a 0-dim float32 tensor on the host or on the
    parameter's GPU.
    """
    return torch.zeros((), dtype=torch.float32, device=step_device(param))


def check_number(value: Any, what: str, low: float = 0.0, below: float = math.inf) -> None:
    """Raise ``ValueError``, with torch's text, unless ``low <= value < below``."""
    if not low <= value < below:
        raise ValueError(f"Invalid {what}: {value}")
