"""The wrapper class, which has the name, argument order and behaviour of torch's
FullyShardedDataParallel and uses fsdpc's engine.

The methods are short and delegate to ``_fsdp1``: ``args`` checks and resolves arguments,
``collect`` finds parameters, ``materialize`` and ``wrap`` prepare the module, ``root`` sets up a
tree of units; ``summon`` shows full parameters, ``convert`` changes dtypes and devices, ``state``
and ``optim`` make and load state dicts. A step runs in C: the hooks that ``_shard`` registers are C
callables, and ``forward`` adds one Python frame per unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdpc import state_dict as _state_dict
from fsdpc._clip import clip as _clip
from fsdpc._comm.bootstrap import make_groups
from fsdpc._comm.channel import this_rank
from fsdpc._engine.companions import explain, explained
from fsdpc._engine.compiled import not_traced
from fsdpc._engine.device import engine_device
from fsdpc._engine.interop import autocasts
from fsdpc._engine.listeners import check_listeners
from fsdpc._engine.modules import check_apart
from fsdpc._engine.root import lazy_init, no_sync, start_at_first_use
from fsdpc._engine.unit import ParamInfo
from fsdpc._engine.writeback import refuse_lending
from fsdpc._fsdp1 import args as _args
from fsdpc._fsdp1 import comm_hooks as _comm_hooks
from fsdpc._fsdp1 import convert as _convert
from fsdpc._fsdp1 import copy as _copy
from fsdpc._fsdp1 import elementwise as _elementwise
from fsdpc._fsdp1 import eval as _eval
from fsdpc._fsdp1 import root as _root
from fsdpc._fsdp1 import summon as _summon
from fsdpc._fsdp1.collect import claim, collect_infos, find_ignored, sync_states, unit_modules
from fsdpc._fsdp1.face import Face
from fsdpc._fsdp1.handle import HandledUnit
from fsdpc._fsdp1.materialize import materialize
from fsdpc._fsdp1.names import CHECKPOINT_WRAPPED, FSDP_PREFIX, FSDP_WRAPPED, take_announced
from fsdpc._fsdp1.optim.methods import OptimStateDicts
from fsdpc._fsdp1.placement import asked_device, default_device, move_module
from fsdpc._fsdp1.state import dcp as _dcp
from fsdpc._fsdp1.wrap import auto_wrap
from fsdpc.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
    TrainingState,
)

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


class FullyShardedDataParallel(OptimStateDicts, Face):
    """Shard ``module``'s parameters, gradients and optimizer state over the ranks of a process
    group.

    The arguments, defaults and exceptions are those of
    ``torch.distributed.fsdp.FullyShardedDataParallel``. Collective: every rank of the group must
    construct the instance with an equal module and equal options (``MismatchError`` names the
    difference).

    In addition to torch's class, fsdpc permits training on the CPU (a CPU module without
    ``device_id``), also with ``sync_module_states``. With both values of ``use_orig_params``, one
    unit may have 0-dim parameters, parameters of several dtypes, and frozen and trainable
    parameters. ``cpu_offload`` on a CPU device has no effect.
    """

    _fsdpc_is_unit = True
    _fsdpc_host = property(lambda self: self)
    _front = _root.FRONT
    _summing = property(_comm_hooks.summing_of)
    _others = ()  # further units besides _unit; this class never has any

    # Initial values of attributes; the constructor and _init_state set the other attributes.
    _unit: HandledUnit | None = None
    _pass_unit: HandledUnit | None = None  # the unit that a root without parameters uses
    _tree: Any = None
    _root: weakref.ref[FullyShardedDataParallel] | None = None
    _is_root: bool | None = None  # None: not known before the first pass
    _prepare_inputs: Callable[..., Any] | None = None
    _summoned = _summoned_on_rank_0 = _exposed = False
    _load_errors: list[str] | None = None
    _fill_ties = False
    _comm_hook: Callable[..., Any] | None = None
    _comm_hook_state: Any = None
    _state_dict_type = StateDictType.FULL_STATE_DICT
    precision_line = ""

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._name = take_announced(type(module).__name__)
        options = _args.Options(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            device_mesh=device_mesh,
        )
        _args.check_module(module)
        options.check()
        _args.check_policy(auto_wrap_policy)
        self._ignored = find_ignored(module, ignored_modules, ignored_states)
        chosen = _args.resolve_groups(
            process_group, sharding_strategy, auto_wrap_policy, device_mesh
        )
        device = asked_device(device_id)
        if auto_wrap_policy is not None:
            inherited = options.for_children(chosen, self._ignored.params)
            check_apart(self._ignored.others(module), self._name)
            auto_wrap(module, auto_wrap_policy, self._ignored, inherited, FullyShardedDataParallel)
        self.sharding_strategy = _args.resolve_strategy(sharding_strategy, chosen)
        self._show_options(options)
        with explained("wrapping", self._name):
            self._move(module, param_init_fn, device, chosen.shard.rank())
            self._init_groups(chosen)
            self._init_state()
            self._fsdp_wrapped_module = module
            self._init_unit()
        _state_dict.register_hooks(self)
        _dcp.attach()

    def _show_options(self, options: _args.Options) -> None:
        """Store the options, and set the attributes that torch's class has for them."""
        # param_init_fn is not stored, because the user's function may keep other objects alive.
        self._options = replace(options, param_init_fn=None)
        self.cpu_offload = options.cpu_offload or CPUOffload()
        self.mixed_precision = options.mixed_precision or MixedPrecision()
        self.backward_prefetch = options.backward_prefetch
        self.forward_prefetch = options.forward_prefetch
        self.limit_all_gathers = options.limit_all_gathers
        self._use_orig_params = options.use_orig_params
        self._device_mesh = options.device_mesh

    def _move(
        self,
        module: nn.Module,
        param_init_fn: Callable[[nn.Module], None] | None,
        asked: torch.device | None,
        rank: int,
    ) -> None:
        """Materialise the unit's own modules and move them to the compute device."""
        materialize(
            module,
            self._ignored,
            param_init_fn,
            asked or default_device(),
            warn_unwritten=not (self._options.sync_module_states and rank != 0),
        )
        self.compute_device = move_module(module, self._ignored, asked, self._name)

    def _init_groups(self, chosen: _args.GroupChoice) -> None:
        self.process_group = chosen.shard
        self._inter_node_pg = chosen.replicate
        self.rank = chosen.shard.rank()
        self.world_size = chosen.shard.size()
        if self.world_size == 1 and chosen.replicate is not None:
            chosen = _args.GroupChoice(
                chosen.replicate, None
            )  # HYBRID with one rank per host only replicates
        self._groups = make_groups(
            self.sharding_strategy,
            chosen.shard,
            chosen.replicate,
            device=engine_device(self.compute_device),
        )

    def _init_state(self) -> None:
        """Set the attributes whose initial values may not be shared by instances."""
        self._mark_handles: list[Any] = []
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        self._full_precision_eval = _eval.asked()
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()
        self.forget_unit_hooks()

    def _init_unit(self) -> None:
        module = self._fsdp_wrapped_module
        infos = collect_infos(module, self._ignored, self._name)
        for info in infos:
            check_listeners(info.name, self._name, info.param, self._use_orig_params)
        _convert.check_formats(self, infos)
        if self._options.sync_module_states:
            sync_states(module, infos, self._groups, self.compute_device)
        if infos:
            self._shard(infos)

    def forget_unit_hooks(self) -> None:
        """Set the functions that run before and after ``forward`` to those of an instance without a
        unit. Local.
        """
        self._enter: Callable[..., Any] = _root.enter_without_unit
        self._leave: Callable[..., Any] = _leave_without_unit

    def _shard(self, infos: list[ParamInfo]) -> None:
        """Make the engine's unit from full parameters and register the unit's hooks. Collective."""
        options = self._options.for_unit(self.sharding_strategy)
        _elementwise.install()
        former = () if self._unit is None else self._unit.flat_params
        unit = HandledUnit(self._name, infos, self._groups, former=former, **options)
        claim(infos, unit)
        start_at_first_use(unit, self)
        this = weakref.ref(self)
        unit.on_storage_dtype = lambda dtype: _convert.convert_storage(this(), dtype)
        self._unit = unit
        self._enter, self._leave = unit.pre_forward_hook, unit.post_forward_hook
        _summon.show_flat_params(self)

    # --- the step ---

    @not_traced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module on full parameters. The root's input tensors are moved to the
        compute device. With mixed precision, floating-point inputs are cast to ``param_dtype``.
        Collective, except for units that run on some ranks only.
        """
        if self._full_precision_eval and not self.training and _eval.applies(self):
            return _eval.forward(self, args, kwargs)
        if self._summoned and (self._unit is None or self._unit.summoned):
            return _summon.forward(self, args, kwargs)
        try:
            prepared = self._enter(self, args, kwargs)
        except BaseException as error:
            explain(error, "forward", host=self)
            raise
        if prepared is not None:  # the arguments as views that have the engine's hooks
            args, kwargs = prepared
        try:
            if self._prepare_inputs is not None:
                args, kwargs = self._prepare_inputs(args, kwargs)
            output = self._modules[FSDP_WRAPPED](*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            explain(error, "forward", host=self)
            unit = self._unit or self._pass_unit
            if unit is not None:
                unit.flat.forward_failed()
            raise
        copied = self._leave(kwargs, args, output)
        # If an output shares memory with gathered parameters, the hook replaces the output by a
        # copy. If ``forward`` returns inputs and no new output that requires a gradient, the hook
        # may replace the inputs by views.
        if copied is not None:
            output = copied
        if autocasts():
            # Autocast caches low-precision copies of weights. Without this call, the cache would
            # have copies of all weights of the model when forward ends.
            torch.clear_autocast_cache()
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates unsharded gradients in fp32 without
        reducing them. The first backward after the context reduces the sum.

        Call this method on the root (else ``RuntimeError``) and between steps (else
        ``ValueError``). Local, but every rank must enter the context.
        """
        lazy_init(self)
        if not self._is_root:
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        self._assert_state(TrainingState.IDLE)
        return no_sync(_root.tree_units(self))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model to ``max_norm`` by their global norm. Collective
        over the units' sharding groups.

        ``norm_type`` may be any p or ``inf``. Returns the norm before clipping, a 0-dim tensor in
        the promoted dtype of all gradients. If there is no gradient, the dtype is fp32 and a
        warning is given. Gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))`` in place.
        On a GPU there is no host sync. ``RuntimeError``: ``self`` is not the root. ``ValueError``:
        called during a step.
        """
        lazy_init(self)
        if not self._is_root:
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance"
            )
        self._assert_state(TrainingState.IDLE)
        return _clip.clip_grad_norm(self, _root.tree_units(self), max_norm, norm_type)

    register_comm_hook = _comm_hooks.register_comm_hook

    # --- full parameters ---

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which the units in ``module`` show full parameters in storage dtype,
        under their names in the unwrapped model.

        ``module`` may be a plain module that contains units. The values are private copies in the
        original shapes. With ``writeback``, the parameters that the modules have when the context
        ends are written to the shards; without ``writeback`` changes are dropped (except in
        unsharded units). With ``rank0_only``, the group's other ranks keep their shards. With
        ``with_grads``, ``.grad`` is also full. Buffers do not change. Collective on entry.
        ``NotImplementedError``: ``rank0_only`` with ``writeback``. ``AssertionError``: called
        during forward or backward, or a unit is summoned already.
        """
        _args.check_model("summon_full_params", module)
        return _summon.summon_full_params(
            module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``nn.Module.apply`` on full parameters, one unit at a time, and write changes back
        to the shards. Collective.

        Raises ``ValueError`` inside ``summon_full_params`` and during a step.
        """
        self._assert_state(TrainingState.IDLE)
        with _summon.summon_one(self, writeback=True, rank0_only=False, with_grads=False):
            return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Implement ``to``, ``half``, ``double`` and similar; see ``fsdpc/_fsdp1/convert.py``."""
        plain = super()._apply
        _convert.convert(self, fn, lambda: plain(fn, recurse))
        return self

    # --- state dicts ---

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict, of the type that ``state_dict_type`` has set. The names
        are those of the unwrapped model. Collective: every rank must call this method.

        FULL (default): tensors with the unsharded model's shapes and storage dtypes. With
        ``FullStateDictConfig(rank0_only=True)`` ranks other than 0 get unmanaged parameters only.
        SHARDED: this rank's rows of each parameter, as ``ShardedTensor``, or as ``DTensor`` with
        ``device_mesh``. LOCAL: this rank's flat parameters (``RuntimeError`` with ``device_mesh``).
        ``AssertionError``: called during forward or backward.
        """
        try:
            return super().state_dict(*args, **kwargs)
        except BaseException:
            _state_dict.abandon(self)
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the type set by ``state_dict_type``, as torch's method does.
        Collective: every rank must call this method. Warns if no key of ``state_dict`` names a
        tensor of the model, which ``strict=False`` would hide.
        """
        found = super().load_state_dict(state_dict, *args, **kwargs)
        _state_dict.warn_if_nothing_was_loaded(list(state_dict), found)
        return found

    set_state_dict_type = staticmethod(_state_dict.set_state_dict_type)
    get_state_dict_type = staticmethod(_state_dict.get_state_dict_type)
    state_dict_type = staticmethod(_state_dict.state_dict_type)

    # --- nn.Module's interface ---

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation wrapper directly around it."""
        wrapped: Any = self._modules[FSDP_WRAPPED]
        return wrapped._modules.get(CHECKPOINT_WRAPPED, wrapped)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED or FSDP_WRAPPED not in self.__dict__.get("_modules", ()):
                raise
            if name == "__deepcopy__":
                raise  # otherwise deepcopy would copy only the wrapped module
            return getattr(self._modules[FSDP_WRAPPED], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute. A tensor that replaces a tensor of the wrapped module is set in the
        wrapped module, from which ``__getattr__`` reads it.
        """
        if isinstance(value, torch.Tensor) and not self._has_own(name):
            module = self.module
            if isinstance(getattr(module, name, None), torch.Tensor):
                if name not in module._buffers:
                    refuse_lending(f"parameter {name!r} of unit {self._name!r}")
                setattr(module, name, value)
                return
        super().__setattr__(name, value)

    def _has_own(self, name: str) -> bool:
        tables = (self.__dict__, self._parameters, self._buffers)
        return FSDP_WRAPPED not in self._modules or any(name in table for table in tables)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters as ``nn.Module.named_parameters`` does. Inside
        ``summon_full_params`` the names are those of the unwrapped model. Local.
        """
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._shown_name(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers as ``nn.Module.named_buffers`` does. Inside
        ``summon_full_params`` the names are those of the unwrapped model. Local.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._shown_name(name), buffer

    def _shown_name(self, name: str) -> str:
        return name.replace(FSDP_PREFIX, "") if self._summoned else name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support ``copy.deepcopy``, which makes an independent sharded copy without gradients, for
        averaged weights, target networks and teachers. Collective, and only between steps (else
        ``RuntimeError``). Pickling and shallow copies raise ``TypeError``.
        """
        return _copy.copied, (_copy.Copying(self),)

    def extra_repr(self) -> str:
        elements = 0 if self._unit is None else sum(shape.numel() for shape in self._unit.shapes)
        return f"{self.sharding_strategy.name}, world_size={self.world_size}, elements={elements}"

    # --- inspection ---

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the FSDP instances in ``module``, depth first, including ``module`` itself. Local.
        With ``root_only``, the call forces lazy initialisation and is collective.
        """
        _args.check_model("fsdp_modules", module)
        members = unit_modules(module)
        return [member for member in members if member.check_is_root()] if root_only else members

    def check_is_root(self) -> bool:
        """Return True if this instance is the outermost FSDP instance of its tree. The call forces
        lazy initialisation, and is collective if lazy initialisation has not run before.
        """
        lazy_init(self)
        return bool(self._is_root)

    @property
    def training_state(self) -> TrainingState:
        """The phase of the step, as torch's enum. Local."""
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        busy = self._unit is not None and self._unit.state in ("forward", "backward")
        if busy or (self._tree is not None and self._tree.training_state != "idle"):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    def _assert_state(self, expected: TrainingState | list[TrainingState]) -> None:
        allowed = [expected] if isinstance(expected, TrainingState) else expected
        if self.training_state not in allowed:
            raise ValueError(
                f"expected to be in states {allowed} but current state is {self.training_state} "
                f"on rank {this_rank()}"
            )

    @property
    def params(self) -> list[nn.Parameter]:
        """This unit's sharded parameters, for an optimizer. The list is empty if the unit manages
        no parameters.
        """
        return [] if self._unit is None else list(self._unit.shard_params)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names of sharded parameters. DistributedDataParallel reads this attribute of a module
        that it wraps, and skips these parameters.
        """
        managed = {p for member in unit_modules(self) for p in member.params}
        return [name for name, param in self.named_parameters() if param in managed]

    @property
    def _handle(self) -> HandledUnit | None:
        return self._unit

    @property
    def _has_params(self) -> bool:
        return self._unit is not None

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return None if self._unit is None else self._unit.flat_param


def _leave_without_unit(kwargs: dict[str, Any], args: tuple[Any, ...], output: Any) -> None:
    """The post-forward hook of an instance without parameters, which does nothing."""


FSDP = FullyShardedDataParallel
