"""The state of one call of ``fully_shard``: its modules, its unit, its options and its hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdpc._engine import lowbit as _lowbit
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.companions import explain
from fsdpc._engine.compiled import call_untraced, hook, not_traced
from fsdpc._engine.hooked import Summing
from fsdpc._engine.host import FrontEnd, TreeOptions
from fsdpc._engine.inputs import cast_tree, preparation
from fsdpc._engine.interop import autocasts
from fsdpc._engine.marks import enter_marked
from fsdpc._engine.root import lazy_init, release, start_at_first_use
from fsdpc._engine.unit import ParamInfo
from fsdpc._fsdp2 import tied as _tied
from fsdpc._fsdp2.all_reduce_hook import sum_and_call
from fsdpc._fsdp2.args import DataMesh
from fsdpc._fsdp2.collect import state_of
from fsdpc._fsdp2.extended import ExtendedUnit
from fsdpc._fsdp2.extension import extends
from fsdpc._fsdp2.unit import RowUnit, check_materialized
from fsdpc._torch import global_backward_hooks, tree_leaves


class State:
    """The state of one call, which hosts one unit (``fsdpc._engine.host.UnitHost``). ``modules``:
    the call's modules.

    ``keeps``: whether the ranks of each machine keep a gathered copy when the unit is released
    (``args.keeps``). ``automatic``: whether ``reshard_after_forward`` was None. If so, a root keeps
    its parameters gathered after its forward. ``_others``: the states of further meshes on which
    the call has parameters. This state is then the ``leader`` of ``_others``, and methods such as
    ``reshard_now`` act on ``_others``, too. In the tree, ``_others`` come after their leader, as if
    their modules were nested in the leader's modules.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        data_mesh: DataMesh,
        *,
        reshard: bool,
        keeps: bool,
        automatic: bool,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        ignored: Iterable[nn.Parameter],
        leader: State | None = None,
    ) -> None:
        self._front = FRONT
        self._others: tuple[State, ...] = ()
        self._leader = None if leader is None else weakref.ref(leader)
        self.modules = modules
        self.data_mesh = data_mesh
        self.reshard, self.keeps, self.automatic = reshard, keeps, automatic
        self.precision = precision
        self.offload = offload
        self.ignored = list(ignored)
        self.divide: float | None = None
        self.compute_device = data_mesh.device
        self.rank = torch.distributed.get_rank()
        self.world_size = data_mesh.shard_world
        self.precision_line = ""
        self._name = ", ".join(type(module).__name__ for module in modules)
        self._groups = data_mesh.groups
        self._unit: RowUnit | None = None
        self._pass_unit: RowUnit | None = None
        self._tree: Any = None
        self._root: weakref.ref[Any] | None = None
        self._is_root: bool | None = None
        self._mark_handles: list[Any] = []
        self._prepare_inputs: Callable[..., Any] | None = None
        self._to_run: set[nn.Module] = set()
        self._open = 0  # number of forwards that have begun and not ended
        self._sync_gradients = self._sync_replicas = True
        # The function that sums the gradients and calls the user's all-reduce hook, or None.
        self._summing: Summing | None = None
        # The dicts in which torch keeps the backward hooks of the modules.
        self._hooks: list[dict[int, Any]] = []

    @property
    def leader(self) -> State:
        """The state that the call's modules refer to: this state, or the one whose ``_others``
        include it.
        """
        leader = self if self._leader is None else self._leader()
        assert leader is not None  # the modules keep the leader alive, too
        return leader

    def make_unit(self, infos: list[ParamInfo], dims: Sequence[int]) -> None:
        """Shard the call's parameters along ``dims``. Collective over the mesh."""
        plain = [info.param for info in infos]
        self._unit = self._new_unit(infos, dims)
        if self.leader is not self:
            self._name = self._unit.name = self.name_in(self._name)
        for param in plain:  # a module outside of the unit may still have a tied parameter
            _writeback.set_owner(param, self._unit)

    def name_in(self, module: str) -> str:
        """Return the unit's name, which is made from the module's name ``module``. If this state is
        for a further mesh of the call, the unit's name includes the mesh.
        """
        if self.leader is self:
            return module
        names = "_".join(self.data_mesh.mesh.mesh_dim_names or ())
        number = self.leader._others.index(self) + 1 if self in self.leader._others else 0
        return f"{module} on mesh {names or number}".lstrip()

    def _new_unit(
        self,
        infos: list[ParamInfo],
        dims: Sequence[int] = (),
        adopted: Sequence[nn.Parameter] = (),
        parallel: Sequence[Any] = (),
    ) -> RowUnit:
        make: Any = RowUnit
        params = list(adopted) or [info.param for info in infos]
        if any(map(extends, params)):
            make = ExtendedUnit
        unit: RowUnit = make(
            self._name,
            infos,
            self.data_mesh,
            dims=dims,
            adopted=adopted,
            parallel=parallel,
            policy=self.precision,
            param_dtype=self.precision.param_dtype,
            reduce_dtype=self.precision.reduce_dtype,
            reshard_after_forward=self.reshard,
            offload=isinstance(self.offload, CPUOffloadPolicy),
        )
        start_at_first_use(unit, self.leader)
        return unit

    # --- what the user sets ----------------------------------------------------------------------

    def set_sync(self, *, gradients: bool | None = None, replicas: bool | None = None) -> None:
        """Set whether backwards sum the unit's gradients. ``gradients=False`` keeps the gradients
        on this rank, and so does ``replicas=False`` if the mesh has replicas. None changes nothing.
        Local.
        """
        if gradients is not None:
            self._sync_gradients = bool(gradients)
        if replicas is not None:
            self._sync_replicas = bool(replicas)
        for other in self._others:
            other.set_sync(gradients=gradients, replicas=replicas)
        if self._unit is not None:
            waits = self.data_mesh.replicates and not self._sync_replicas
            self._unit.flat.sync = self._sync_gradients and not waits

    def set_all_reduce_hook(self, hook: Callable[..., Any] | None, stream: Any) -> None:
        """See ``FSDPModule.set_all_reduce_hook``."""
        if self._others:
            raise ValueError(
                f"set_all_reduce_hook: {self._name} has parameters on several meshes "
                "(shard_placement_fn), so the hook would not know over which to sum: call "
                "fully_shard with each mesh on a module of its own"
            )
        if stream is not None and self.data_mesh.replicates:
            raise ValueError("stream cannot be set when using native HSDP")
        if stream is not None and hook is None:
            raise AssertionError("all reduce hook stream is specified but hook itself is missing")
        release(self)
        self._summing = None if hook is None else partial(sum_and_call, hook, stream)

    def watch_hooks(self, modules: Iterable[nn.Module]) -> None:
        """Let each forward check whether these modules have backward hooks, or whether there are
        global ones. If so, the unit stays gathered in backward as long as these hooks may run.
        """
        modules = list(modules)
        for other in self._others:
            other.watch_hooks(modules)
        self._hooks = [global_backward_hooks, *(module._backward_hooks for module in modules)]

    def gather_before_hooks(self, output: Any) -> None:
        """Gather the unit in backward before the module's own backward hooks run. Called with the
        module's ``output``, to which torch has added the autograd nodes of these hooks.
        """
        for other in self._others:
            other.gather_before_hooks(output)
        unit = self._unit
        if unit is not None and torch.is_grad_enabled():
            gather = unit.flat.hook("pre_backward")
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(lambda grad: gather(grad))

    # --- the step --------------------------------------------------------------------------------

    @hook
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit, then cast the inputs. Registered as a forward pre-hook."""
        first = self._is_root is None
        if first:  # before _enter, because lazy_init may replace the unit
            call_untraced(lazy_init, self)
        args, kwargs = self._enter(module, args, kwargs)
        for other in self._others:
            args, kwargs = other._enter(module, args, kwargs)
        if first:
            call_untraced(enter_marked, module)
        if self._prepare_inputs is not None:
            return self._prepare_inputs(args, kwargs)
        return args, kwargs

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = self._unit or self._pass_unit
        if unit is None:
            return args, kwargs
        if any(self._hooks) != unit.flat.observed:
            unit.flat.observed = not unit.flat.observed
        prepared = unit.pre_forward_hook(module, args, kwargs)
        self._open += 1
        if len(self.modules) > 1:
            self._note_member(unit, module)
        return (args, kwargs) if prepared is None else prepared

    def _note_member(self, unit: RowUnit, module: nn.Module) -> None:
        """Keep the unit gathered until all of ``self.modules`` have run, or the pass ends."""
        if unit.state == "backward":  # a recomputation
            return
        if unit.flat.members_left == 0:
            self._to_run = set(self.modules)
        self._to_run.discard(module)
        unit.flat.members_left = len(self._to_run)

    @hook
    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Release the unit, then cast the output. Registered as a forward hook."""
        for other in reversed(self._others):
            output = other._leave(args, kwargs, output)
        output = self._leave(args, kwargs, output)
        if self.precision.output_dtype is not None:
            output = cast_tree(self.precision.output_dtype, output)
        if autocasts():
            # Autocast caches low-precision copies of weights. Without this call the cache would
            # contain copies of all weights of the model in the end.
            torch.clear_autocast_cache()
        return output

    def _leave(self, args: Any, kwargs: Any, output: Any) -> Any:
        unit = self._unit or self._pass_unit
        if unit is None or self._open == 0:
            return output
        self._open -= 1
        copied = unit.post_forward_hook(kwargs, args, output)
        return output if copied is None else copied

    @not_traced
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)``. If ``function`` raises, undo the forwards that
        have begun in the call and not ended.
        """
        before = self._open
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            explain(error, "forward", host=self)
            for state in (*reversed(self._others), self):
                state._undo_forwards(before)
            raise

    def _undo_forwards(self, before: int) -> None:
        unit = self._unit or self._pass_unit
        while unit is not None and self._open > before:
            self._open -= 1
            unit.flat.forward_failed()

    # --- what torch's pipelines call behind their last backward ----------------------------------

    _fsdp_param_groups = ()
    _fsdp_param_group = None  # torch 2.11

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=(self, *self._others))

    @property
    def _comm_ctx(self) -> Any:
        """The context of this state alone. torch 2.15's pipelines compare the contexts of their
        stages, and fsdpc's stages share nothing.
        """
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Sum the gradients that no backward has summed yet. For this, run a backward that adds no
        gradients. Collective over the mesh.
        """
        unit = self._unit or self._pass_unit
        if unit is None or unit.tree is None:
            return
        with torch.enable_grad():
            start = torch.zeros((), requires_grad=True, device="cpu")
            end = start.clone()
            gather = unit.flat.hook("pre_backward")
            end.register_hook(lambda grad: gather(grad))
            end.backward()

    # --- parameters ------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Put full parameters into the modules. Collective outside of a pass."""
        if self._unit is not None or self._others:
            lazy_init(self)
        for state in (self, *self._others):
            state._unshard()

    def _unshard(self) -> None:
        if self._unit is None:
            return
        outside = self._unit.flat.unshard()
        if outside:  # no rank may change its shard before all ranks have read it
            self._unit.groups.shard.agree("", what=f"unshard of unit {self._name}")

    def reshard_now(self) -> None:
        """Put the sharded parameters back into the modules. Local."""
        for other in self._others:
            other.reshard_now()
        if self._unit is not None:
            self._unit.flat.reshard()

    def drop_gradients(self) -> None:
        """Drop this module's gradients, including those that wait for a backward to sum them.
        Local.
        """
        self.reshard_now()
        for state in (self, *self._others):
            for param in () if state._unit is None else state._unit.shard_params:
                param.grad = None

    def adopt_values(self) -> None:
        """Copy the values that the user has put into the parameters to the shards. Local, but
        collective over the mesh if the dtypes have changed (``model.to(dtype)``).
        """
        for other in self._others:
            other.adopt_values()
        unit = self._unit
        if unit is None:
            return
        _writeback.adopt_objects(unit)
        for param, full in zip(unit.shard_params, unit.full, strict=True):
            _lowbit.mark_again(param, full)
        local = [unit.local(param) for param in unit.shard_params]
        for info, tensor in zip(unit.infos, local, strict=True):
            if not tensor.is_meta and tensor.device != unit.own_device:
                raise NotImplementedError(
                    f"parameter {info.name!r} of unit {unit.name!r} was moved to {tensor.device}, "
                    f"but its shard is on {unit.own_device}: move the model before fully_shard, or "
                    "pass a mesh of that device type"
                )
        patched = not unit.foreign and any(map(extends, local))
        if [tensor.dtype for tensor in local] == unit.dtypes and not patched:
            _writeback.adopt_values(unit)
        else:
            self.remake()

    def remake(
        self, *, without: int = -1, sites: Mapping[int, list[tuple[nn.Module, str]]] | None = None
    ) -> None:
        """Shard the parameters anew, in the dtypes of their local tensors; the Parameter objects
        stay. ``without``: the index of a parameter that the unit no longer manages, or -1.
        ``sites``: new registration sites of parameters, by the parameter's index. Collective over
        the mesh.
        """
        release(self)
        unit: Any = self._unit
        kept = [i for i in range(len(unit.infos)) if i != without]
        adopted = [unit.shard_params[i] for i in kept]
        local = [unit.local(param) for param in adopted]
        infos = []
        for i, tensor in zip(kept, local, strict=True):
            info = unit.infos[i]
            blank = torch.empty(unit.shapes[i], dtype=tensor.dtype, device="meta")
            blank = blank.movedim(0, unit.dims[i])
            like, what = unit.full[i], f"parameter {info.name!r} of unit {unit.name!r}"
            _lowbit.check_is_kept(like, what, tensor.dtype)
            param = _lowbit.parameter(blank, like, info.param.requires_grad)
            infos.append(ParamInfo(info.name, param, (sites or {}).get(i, info.sites)))
        if not infos:
            self._unit = None
        else:
            dims, parallel = [unit.dims[i] for i in kept], [unit.parallel[i] for i in kept]
            new = self._unit = self._new_unit(infos, dims, adopted, parallel)
            for param, view, tensor in zip(adopted, new.views, local, strict=True):
                if tensor.is_meta:
                    param._local_tensor = tensor
                elif view is not tensor:
                    view.copy_(tensor)
            new.flat.sync = unit.flat.sync
            new.flat.divide = unit.flat.divide
            new.flat.adopt_grads()
        unit.flat.unbind()


def states_of(module: nn.Module) -> tuple[State, ...]:
    """Return the states of the call that has ``module`` as an argument. Local."""
    state = state_of(module)
    return () if state is None else (state, *state._others)


def states_below(module: nn.Module) -> list[State]:
    """Return the states of all calls at or below ``module``, in module order."""
    return list(dict.fromkeys(state for child in module.modules() for state in states_of(child)))


def _prepare(state: State, name: str) -> None:
    unit = state._unit
    dtype = state.precision.param_dtype if state.precision.cast_forward_inputs else None
    if state.leader is state:
        state._prepare_inputs = preparation(state.compute_device if state._is_root else None, dtype)
    if unit is None:
        return
    unit.name = state.name_in(name) if name or state.leader is not state else unit.name
    check_materialized(unit, _names_in_root(state, unit.meta_names()))
    reshard = state.reshard and not (state.automatic and state.leader._is_root)
    if unit.flat.reshards != reshard:
        unit.flat.reshards = reshard
    if unit.flat.keeps != state.keeps:
        unit.flat.keeps = state.keeps


def _names_in_root(state: State, names: list[str]) -> list[str]:
    """Return, for the parameters that the unit calls ``names``, their names in the root."""
    unit, root = state._unit, None if state._root is None else state._root()
    if not names or unit is None or root is None:
        return names
    wanted = {id(info.param) for info in unit.infos if info.name in names}
    return [n for module in root.modules for n, p in module.named_parameters() if id(p) in wanted]


def _adopt_all(states: list[State]) -> None:
    _tied.join(states)
    for state in states:
        state.adopt_values()


def _pass_unit(root: State) -> RowUnit:
    if root._pass_unit is None:
        root._pass_unit = root._new_unit([])
    return root._pass_unit


FRONT: FrontEnd = FrontEnd(
    hosts=states_of,
    describe=lambda root: root._name,
    check=_adopt_all,
    prepare=_prepare,
    pass_unit=_pass_unit,
    forget_pass_unit=lambda root: None,
    options=lambda root: TreeOptions(),
    modules=lambda root: root.modules,
    ignored=lambda root: [
        param for _, _, state in FRONT.placed(root.modules) for param in state.ignored
    ],
    clean=lambda name: name,
    one_device="pass a mesh of the same device type to every call of fully_shard",
)
