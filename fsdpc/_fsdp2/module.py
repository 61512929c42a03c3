"""``fully_shard`` and ``FSDPModule``: torch's names, arguments and behaviour over the engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register

from fsdpc._clip import torch_utils as _clip
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.companions import explained
from fsdpc._engine.compiled import not_traced
from fsdpc._engine.root import forget_lost, release
from fsdpc._engine.writeback import refuse_sharing
from fsdpc._fsdp2 import args as _args
from fsdpc._fsdp2 import assigned as _assigned
from fsdpc._fsdp2 import draws as _draws
from fsdpc._fsdp2 import stepping as _stepping
from fsdpc._fsdp2.collect import collect_infos, managed_modules, move_to, roots_of, state_of
from fsdpc._fsdp2.state import State, states_below
from fsdpc._torch import REGISTRY_KEY, STATE_KEY, GradientReductionHandle

M = TypeVar("M", bound=nn.Module | list[Any])
_CLASSES: dict[type, type] = {}
_TORCH_KEY = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
# Functions that the planner (fsdpc.plan) adds. If there are some, ``fully_shard`` calls the last
# one and does not shard. The arguments are the modules, their parameters, reshard_after_forward and
# the mixed-precision policy.
PLANNERS: list[Callable[[list[nn.Module], list[Any], Any, MixedPrecisionPolicy], None]] = []
_FULL_PRECISION, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


class UnshardHandle(TorchUnshardHandle):
    """Returned by ``unshard(async_op=True)``."""

    def wait(self) -> None:
        """A no-op: the unsharded parameters are already usable on the current stream. Local."""


class FSDPModule:
    """The class that ``fully_shard`` adds to the bases of a module's class. The methods are those
    of ``torch.distributed.fsdp.FSDPModule``, of which sharded modules are instances too. Setters,
    ``parameters`` and ``zero_grad`` are local; a setter must be called on every rank.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, so that slices of a sharded ``nn.Sequential`` are
        not sharded modules.
        """
        plain = cls.__mro__[2]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    _fsdpc_host = property(lambda self: self._get_fsdp_state())

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        output = state.call(super().__call__, *args, **kwargs)  # type: ignore[misc]
        if self._backward_hooks or self._backward_pre_hooks:  # type: ignore[attr-defined]
            state.gather_before_hooks(output)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded {type(self).__mro__[2].__name__} cannot be pickled: save its state_dict()"
        )

    def _get_fsdp_state(self) -> State:
        state = self.__dict__.get("_fsdpc_state")
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self).__name__}")
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply ``fn`` to the sharded parameters, for ``to``, ``to_empty``, ``half`` and the like.
        The shards then get the new values.
        """
        unit = self._get_fsdp_state()._unit
        if unit is not None:
            refuse_sharing(fn, unit.name)
        self.reshard()
        result = super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        self._get_fsdp_state().adopt_values()
        return result

    # --- parameters ---

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Do what ``nn.Module.parameters`` does. ``NotImplementedError``: the caller is a pipeline
        stage that computes gradients of weights separately from gradients of inputs.
        """
        caller = sys._getframe(1)
        pipeline = caller.f_globals.get("__name__") == "torch.distributed.pipelining.stage"
        if pipeline and caller.f_code.co_name == "<lambda>":
            raise NotImplementedError(
                "a pipeline schedule that computes gradients of weights apart from those of inputs "
                "(zero bubble) looks for the weights in the graph, where a sharded module has "
                "gathered ones: use GPipe, 1F1B or Interleaved1F1B with fsdpc.fully_shard"
            )
        return super().parameters(recurse)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the sharded parameters as ``nn.Module.zero_grad`` does, even if a
        forward has left full parameters in the modules.
        """
        for state in states_below(self):  # type: ignore[arg-type]
            if state._unit is not None and not state._unit.flat.unsharded:
                state.reshard_now()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reshard(self) -> None:
        """Put the sharded parameters back into the modules if a forward or ``unshard`` has left
        full parameters there. Local.
        """
        self._get_fsdp_state().reshard_now()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Put the full parameters of this module's unit into the modules until ``reshard`` is
        called or the next pass begins. Collective outside of a pass.
        """
        self._get_fsdp_state().unshard()
        return UnshardHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Clean up after an exception in forward or backward. Raises ``RuntimeError`` if this
        module is not the root. fsdpc also cleans up by itself when the next pass begins; this
        method detaches the units from their tree, too. With torch >= 2.15 all gradients are
        dropped, as in torch. Local.
        """
        state = self._get_fsdp_state()
        if state._is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        state._open = 0
        release(state)
        if GradientReductionHandle is not None:
            for each in states_below(self):  # type: ignore[arg-type]
                each.drop_gradients()

    # --- when gradients are reduced ---

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether a backward reduces this unit's gradients. With False, a backward leaves the
        full gradients on this rank, in fp32, and the next backward with True reduces their sum.
        Until then ``.grad`` is zero, and clearing ``.grad`` discards these gradients. Every rank
        must set the same value (``MismatchError`` if the ranks share memory).
        """
        for state in self._states(recurse):
            state.set_sync(gradients=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether a backward sums this unit's gradients over replicas (HSDP). With False,
        gradients stay on this rank until a backward with True, which sums over shards and replicas
        at once.
        """
        for state in self._states(recurse):
            state.set_sync(replicas=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, without effect: each backward waits for its own reductions."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepted, without effect: each backward waits for its own reductions."""

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Sum the gradients that earlier backwards have left on this rank because of
        ``set_requires_gradient_sync(False)``. Before the first forward this does nothing. With
        ``async_op``, return torch's handle, whose ``wait`` returns at once; this needs torch >=
        2.15 (``NotImplementedError``). Collective over the mesh.
        """
        if async_op and GradientReductionHandle is None:
            raise NotImplementedError(
                "finalize_backward(async_op=True) returns a class of torch >= 2.15, and this is "
                f"torch {torch.__version__}: leave async_op out"
            )
        self._get_fsdp_state()._root_post_backward_final_callback()
        return GradientReductionHandle() if async_op else None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Override ``reshard_after_forward``, also for a root. Call this method between steps.
        ``ValueError``: the value is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse):
            state.reshard, state.automatic = reshard_after_forward, False
            state.keeps = False
            release(state)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: a backward always releases its units."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accepted, without effect: gathered parameters have fixed addresses in any case."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks."""
        state = self._get_fsdp_state()
        for one in (state, *state._others):
            if one._unit is not None:
                one._unit.flat.divide = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does, under the old name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted, without effect: fsdpc always sums, and divides the sum once."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: ranks may use different parameters in any case."""

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None
    ) -> None:
        """Call ``hook(gradients)`` in each backward that sums this unit's gradients. ``gradients``
        is this rank's shard of the sum over shards and replicas, after the division and before the
        addition to ``.grad``. ``gradients`` is a contiguous 1-D tensor in the dtype in which
        gradients are accumulated. The hook changes this tensor in place and may use collectives,
        because all ranks call the hook for the same units in the same order. The hook is not called
        for a unit of which no rank has gradients. If there are gradients of several dtypes, the
        hook is called once for each dtype. ``stream``: a CUDA stream on which the hook runs; not
        allowed if the mesh has replicas (``ValueError``). ``hook=None`` removes the hook.

        The change takes effect at the next forward. Call this method between steps and on every
        rank.
        """
        self._get_fsdp_state().set_all_reduce_hook(hook, stream)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the gathers of the next forward wait for ``event``. torch allows this call only on
        the root.
        """
        if event is not None and self._get_fsdp_state().compute_device.type == "cuda":
            torch.cuda.current_stream().wait_event(event)

    # --- hints ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Accepted, without effect. In forward, CPU ranks on several hosts begin the gathers of the
        next two units in any case; other ranks begin no gather ahead of a unit's forward.
        """
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Accepted, without effect: the engine prefetches in the reverse order of the forward."""
        _check_modules(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted, without effect: the unit is gathered in backward if a gradient reaches the
        outputs.
        """

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: ``FSDPC_REDUCE_SLOTS`` limits the number of reductions in
        flight.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers)}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: on GPUs gathers and reductions have separate communicators in
        any case.
        """

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted, without effect: gathers and reductions use the engine's slots, without staging
        buffers.
        """

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not supported (``NotImplementedError``): the engine gathers in place."""
        raise NotImplementedError(_custom("set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not supported (``NotImplementedError``): the engine reduces in its slots."""
        raise NotImplementedError(_custom("set_custom_reduce_scatter"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported (``NotImplementedError``). Slots are registered with NCCL where that is
        possible.
        """
        raise NotImplementedError(_custom("set_symm_mem_for_comm"))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted, without effect."""

    def _states(self, recurse: bool) -> list[State]:
        assert isinstance(self, nn.Module)
        state = self._get_fsdp_state()
        return states_below(self) if recurse else [state, *state._others]


def _custom(name: str) -> str:
    return (
        f"{name}: fsdpc's collectives work in place on slots that the engine owns, so a caller's "
        "collective has no buffers to fill"
    )


def _check_modules(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shard the parameters of ``module``, or of a list of modules as one unit, in place, and return
    ``module``. This is ``torch.distributed.fsdp.fully_shard`` over fsdpc's engine, with torch's
    arguments and exceptions.

    Parameters that an earlier call manages are left out, so call ``fully_shard`` on the inner
    modules first. The others become ``DTensor``s: rank r of the mesh's sharding dimension has the
    rows ``torch.chunk(param, world, 0)[r]``. A 1-D ``mesh`` shards; a 2-D ``mesh``, which must have
    dimension names, replicates over its first dimension and shards over its second. Collective over
    the mesh: every rank must make the call with an equal module and equal options
    (``MismatchError`` names the difference).

    Trainable parameters of several dtypes in one unit are allowed. A parameter that tensor
    parallelism has made a DTensor is sharded once more; ``mesh`` and the parameter's own mesh must
    be parts of one mesh with names (``ValueError``). ``shard_placement_fn`` returns ``Shard(dim)``
    or None for each parameter. If ``dim`` is not 0, the size of this dimension must be a multiple
    of the number of ranks (``NotImplementedError``), and the full parameter is a view with this
    dimension first in memory. The function may also return torch's ``ShardPlacementResult``:
    parameters on another mesh then form a unit of their own, which is gathered together with the
    call's modules. ``dp_mesh_dims``: the names of the data-parallel dimensions of ``mesh``. If
    these are given, every parameter must be a DTensor on ``mesh``, and the full parameters and
    their gradients are DTensors on ``mesh`` as well. ``NotImplementedError``:
    ``reshard_after_forward`` is an int although ``dp_mesh_dims`` is given.
    """
    _args.check_policies(mp_policy, offload_policy)
    modules = roots_of(module if isinstance(module, list) else [module])
    for one in modules:
        _args.check_module(one, alone=not isinstance(module, list))
        if state_of(one) is not None or isinstance(one, TorchFSDPModule):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to {type(one).__name__}"
            )
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    ignored = {id(param) for param in ignored_params or ()}
    managed = managed_modules(modules)
    what = ", ".join(type(one).__name__ for one in modules)
    if PLANNERS:
        infos = collect_infos(managed, ignored, what, None)
        PLANNERS[-1](modules, infos, reshard_after_forward, mp_policy)
        return module
    mesh = _args.default_mesh() if mesh is None else mesh
    if dp_mesh_dims is None:
        _args.check_mesh(mesh)
    elif type(reshard_after_forward) is int:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    data_mesh = _args.data_mesh_of(mesh, dp_mesh_dims)
    infos = collect_infos(managed, ignored, what, data_mesh)
    placed = _args.placed(shard_placement_fn, infos, data_mesh)

    def make_state(mesh: _args.DataMesh, leader: State | None = None) -> State:
        return State(
            modules,
            mesh,
            reshard=_args.reshards(reshard_after_forward, mesh.shard_world),
            keeps=_args.keeps(reshard_after_forward, mesh.groups.shard),
            automatic=reshard_after_forward is None,
            precision=mp_policy,
            offload=offload_policy,
            ignored=ignored_params or (),
            leader=leader,
        )

    state = make_state(data_mesh)
    state._others = tuple(make_state(mesh, state) for mesh, _, _ in placed[1:])
    _assigned.install()
    _stepping.install()
    _clip.install()
    with explained("wrapping", what):
        move_to(data_mesh.device, managed, ignored)
        if data_mesh.device.type == "cpu":
            _draws.install()
        for each, (_, members, dims) in zip((state, *state._others), placed, strict=True):
            if members:
                each.make_unit(members, dims)
    state.watch_hooks(one for _, one in managed)
    for _, one in managed:
        if one._parameters:
            one.register_state_dict_pre_hook(_show_shards)
            one.register_load_state_dict_pre_hook(_show_shards)
        one._is_fsdp_managed_module = True  # type: ignore[assignment]
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    for one in modules:
        _become_sharded(one, state)
    return module


def _become_sharded(module: nn.Module, state: State) -> None:
    """Swap the module's class and register its hooks."""
    plain = type(module)
    sharded = _CLASSES.get(plain)
    if sharded is None:
        names = {"__deepcopy__": _no_deepcopy, "__module__": plain.__module__}
        # The compiler's guards expect the original class at index 2 of the method resolution order.
        bases = (FSDPModule, plain, TorchFSDPModule)
        sharded = _CLASSES[plain] = type(f"FSDP{plain.__name__}", bases, names)
    module.__class__ = sharded
    module.__dict__["_fsdpc_state"] = state
    # torch's pipelines look up the state by torch's fully_shard.state.
    module.__dict__.setdefault(STATE_KEY, {})[_TORCH_KEY] = state
    # torch's replicate skips modules that have this mark.
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = state
    module.register_forward_pre_hook(state.pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.post_forward, with_kwargs=True)
    module.register_load_state_dict_post_hook(_after_load)


def _no_deepcopy(self: Any, memo: Any) -> Any:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _show_shards(module: nn.Module, *unused: Any) -> None:
    for param in module._parameters.values():
        found = _writeback.gathered_of(param)
        if found is not None:
            found[0].flat.reshard()
            return


def _after_load(module: Any, incompatible_keys: Any) -> None:
    state_of(module).adopt_values()
    forget_lost(module)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather and release the parameters of ``module`` around calls of the method ``method_name``,
    as around ``forward``. Local. For modules without fsdpc's ``fully_shard``, torch's function is
    called. ``ValueError``: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        torch_register(module, method_name)
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    plain = getattr(module, method_name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        args, kwargs = state.pre_forward(self, args, kwargs)
        return state.post_forward(self, args, kwargs, plain(*args, **kwargs))

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._get_fsdp_state().call(run, self, *args, **kwargs)

    setattr(module, method_name, method.__get__(module, type(module)))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted, without effect: streams belong to the communicators of the process, which all roots
    share in any case. Local. ``ValueError``: an element is not an FSDPModule.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


def _state(module: nn.Module) -> Any:
    state = state_of(module)
    return torch_fully_shard.state(module) if state is None else state  # type: ignore[attr-defined]


fully_shard.state = _state  # type: ignore[attr-defined]
__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
