"""A unit of FSDP: torch's parameters on one side, the engine's flat parameter on the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdpc import _C, _torch
from fsdpc._comm.bootstrap import Groups
from fsdpc._comm.rendezvous import agree_on_model
from fsdpc._comm.wire import default_dtype
from fsdpc._engine import asked as _asked
from fsdpc._engine import empties as _empties  # noqa: F401  wraps to_empty
from fsdpc._engine import lowbit as _lowbit
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.companions import registered
from fsdpc._engine.device import CPU, tensor_device
from fsdpc._engine.interop import (
    check_trains,
    computes,
    counted,
    dtype_name,
    over,
    put_grad,
    version_counter,
)
from fsdpc._engine.released import ReleasedParameter
from fsdpc._engine.whole import WholeValues
from fsdpc._spans import rows as _sharded

UNITS: weakref.WeakSet[Any] = weakref.WeakSet()  # all units that exist
# Functions that are called with every unit whose gradients were allocated or moved.
ON_GRADS: list[Callable[[Any], None]] = []


@dataclass
class ParamInfo:
    """A parameter of a unit, and all places where it is registered (several for tied weights)."""

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)

    def register(self, param: Any) -> None:
        """Register ``param`` as a Parameter at all sites. Local."""
        for module, attribute in self.sites:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = param


class Unit(WholeValues):
    """The parameters of one FSDP instance, sharded over ``groups.shard``.

    The constructor is collective over the shard group and the replicate group. It copies this
    rank's elements of the current values into the shard, frees the originals and installs the
    sharded parameters. With ``use_orig_params`` the original parameters become 1-D views of their
    elements in this rank's shard, which may be empty; in a group of one rank they keep their shapes
    and all elements. Otherwise ``flat_params`` replace the original parameters.

    With ``by_rows``, which needs ``use_orig_params``, this rank's elements of every parameter are
    the rows of ``torch.chunk(param, world, 0)[rank]``; a 0-dim parameter is one row. ``dims``: for
    each parameter, the dimension of the module's tensor that comes first in the unit's memory
    (default 0). ``codecs``: for each parameter, a tuple of three items. The first two are the codes
    (``csrc/codec``) with which the parameter's values and its gradients are sent; "" means no code.
    The third says whether error feedback adds the quantization errors of the parameter's gradients
    to its next gradients. ``MismatchError``: ranks differ in names, shapes, dtypes or options.
    ``TypeError``: a trainable parameter's dtype is not a floating-point type of 16, 32 or 64 bits.
    """

    readable_outside = "inside summon_full_params"
    dtensors = False  # True: sharded parameters are DTensors with this rank's rows
    released_class = ReleasedParameter
    foreign = False  # True: the gathered tensors are not in the engine's memory

    def __init__(
        self,
        name: str,
        infos: list[ParamInfo],
        groups: Groups,
        *,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        reshard_after_forward: bool,
        use_orig_params: bool,
        keep_low_precision_grads: bool = False,
        offload: bool = False,
        by_rows: bool = False,
        dims: Sequence[int] = (),
        codecs: Sequence[tuple[str, str, bool]] = (),
    ) -> None:
        if by_rows and not use_orig_params:
            raise ValueError(f"unit {name}: by_rows needs use_orig_params=True")
        self._name = name
        self.infos = infos
        self.groups = groups
        self.device = tensor_device(groups.shard.device)
        self.use_orig_params = use_orig_params
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.offload = offload
        self.by_rows = by_rows
        self.dims = list(dims) or [0] * len(infos)
        self.codecs = list(codecs) or [("", "", False)] * len(infos)
        self.shapes = [info.param.shape for info in infos]
        self.dtypes = [info.param.dtype for info in infos]
        # For each parameter: whether the engine sends the parameter's bytes without a cast.
        self.carried = [
            not computes(info.param.dtype) or _lowbit.holds_codes(info.param) for info in infos
        ]
        self.trainable = [self._trainable(info) for info in infos]
        self.summoned = False
        self.tree: Any = None
        UNITS.add(self)
        _asked.install()
        registered("watch")()
        self.stepper: Any = None  # the function that steps the unit's parameters in backward
        specs = [self._spec(i) for i in range(len(infos))]
        texts = [self._describe(specs, named) for named in (True, False)]
        names = [f"{name}.{info.name}" for info in infos]
        for comm in groups.comms:
            agree_on_model(comm, *texts, f"construction of unit {name}", names)
        self.flat = _C.FlatParameter(
            name,
            groups.shard,
            specs,
            replicate=groups.replicate,
            divide=groups.divide,
            reshard=reshard_after_forward,
            offload=offload,
            foreign=self.foreign,
        )
        # The device of the shard: the CPU if the shard is offloaded. Gathered parameters are on
        # `device` in any case.
        self.own_device = CPU if self.flat.offloaded else self.device
        self.scatter_full([info.param for info in infos])
        self._versions = version_counter(self.device)
        self.full = [self._make_full(i) for i in range(len(infos))]
        # Placeholders, which are in the modules while the unit is released or other units' forwards
        # run.
        self.released = [self._placeholder(i) for i in range(len(infos))]
        self.flat_params: list[nn.Parameter] = []
        self.flat_places: dict[int, tuple[dict[str, Any], str]] = {}
        # For each sharded parameter: the parameter, the tensor over its gradient (None: the
        # parameter is frozen), and the indices of the original parameters that it covers.
        self.optim_params: list[tuple[nn.Parameter, Tensor | None, tuple[int, ...]]] = []
        self.views: list[Tensor] = []  # tensors over the shard, one per entry of optim_params
        if use_orig_params:
            self._shard_originals()
        else:
            self._make_flat_params()
        self.install_sharded()
        self._bind()
        if keep_low_precision_grads and param_dtype is not None:
            self.flat.after_backward = self._lower_grads
        self.announce_grads()
        self.pre_forward_hook = self.flat.hook("pre_forward")
        self.post_forward_hook = self.flat.hook("post_forward")

    def announce_grads(self) -> None:
        """Call the functions in ``ON_GRADS``, after gradients were allocated or moved. Local."""
        for call in ON_GRADS:
            call(self)

    # --- construction ----------------------------------------------------------------------------

    def _trainable(self, info: ParamInfo) -> bool:
        if info.param.requires_grad:
            check_trains(f"unit {self.name}: parameter {info.name}", info.param.dtype)
        return info.param.requires_grad

    def _spec(self, i: int) -> tuple[str, int, str, str, str, bool, int, str, str, bool]:
        dtype, param = self.dtypes[i], self.infos[i].param
        row = _sharded.row_numel(self.shapes[i]) if self.by_rows else 0
        if self.carried[i]:
            size = param.element_size()
            nbytes = param.numel() * size
            name = self.infos[i].name
            return (name, nbytes, "uint8", "uint8", "uint8", False, row * size, "", "", False)
        compute = self.param_dtype or dtype
        reduce = self.reduce_dtype or default_dtype(compute, self.groups.shard)
        return (
            self.infos[i].name,
            param.numel(),
            dtype_name(dtype),
            dtype_name(compute),
            dtype_name(reduce),
            self.trainable[i],
            row,
            *self.codecs[i],
        )

    def _describe(self, specs: Sequence[tuple[Any, ...]], named: bool) -> str:
        lines = [
            f"unit {self.name or '(root)'}" if named else f"a unit of {len(specs)} parameters",
            f"reshard_after_forward {self.reshard_after_forward}",
            f"use_orig_params {self.use_orig_params}, parameters offloaded {self.offload}",
            f"gradients divided by {self.groups.divide}",
        ]
        if self.by_rows:
            lines.append("parameters cut between rows")
        for i, spec in enumerate(specs):
            name, _, storage, compute, reduce, trainable, _, codec, sent, kept = spec
            lines.append(
                f"parameter {name if named else i}: shape {tuple(self.shapes[i])}, "
                f"{self.dtypes[i]}, stored as {storage}, computed in {compute}, reduced in "
                f"{reduce}, "
                f"{'trainable' if trainable else 'frozen'}"
                + (f", cut along dimension {self.dims[i]}" if self.dims[i] else "")
                + (f", gathered as {codec}" if codec else "")
                + (f", gradients sent as {sent}" if sent else "")
                + (" with error feedback" if kept else "")
                + _lowbit.description(self.infos[i].param)
            )
        return "\n".join(lines)

    def _full_memory(self, i: int) -> Tensor:
        dtype, shape = self.dtypes[i], self.shapes[i]
        if self.carried[i]:
            return over(self.flat.full_param(i, (shape.numel() * dtype.itemsize,)), dtype, shape)
        return over(self.flat.full_param(i, tuple(shape)), self.param_dtype or dtype)

    def follow_memory(self) -> None:
        """Point the gathered parameters at the memory that the unit's tree has given them. On a GPU
        the gathered parameters have no address before this call. Local.
        """
        for i, full in enumerate(self.full):
            now, shown = self._full_memory(i), getattr(full, "_local_tensor", full)
            if shown.data_ptr() != now.data_ptr():
                shown.data = now.movedim(0, self.dims[i]) if self.dims[i] > 0 else now
        self.flat.note_full()

    def _make_full(self, i: int) -> Tensor:
        info = self.infos[i]
        tensor = counted(self._versions, self._full_memory(i))
        if self.use_orig_params or _lowbit.holds_codes(info.param):
            tensor = _lowbit.parameter(tensor, info.param, self.trainable[i])
            tensor.__dict__.update(info.param.__dict__)
        else:
            tensor.requires_grad_(self.trainable[i])
        return tensor

    def _placeholder(self, i: int) -> ReleasedParameter:
        full, info = self.full[i], self.infos[i]
        own = info.param if self.use_orig_params else None
        made = self.released_class(
            full.shape,
            full.dtype,
            full.device,
            self.trainable[i],
            info.name,
            self.name,
            own,
            self.readable_outside,
        )
        made.__dict__.update(_lowbit.attributes(info.param))
        return made

    def _watched(self) -> list[int]:
        """Return the indices of the first module's trainable parameters. Modules without trainable
        parameters do not count.

        These parameters usually get their gradients last in backward.
        """
        trainable = [i for i in range(len(self.infos)) if self.trainable[i]]
        owners = [self.infos[i].sites[0][0] for i in trainable]
        return [i for i, owner in zip(trainable, owners, strict=True) if owner is owners[0]]

    def _shard_originals(self) -> None:
        for i, info in enumerate(self.infos):
            info.param.grad = None
            info.param.data = self.shard_view(i)
            info.param._fsdp_flattened = True  # torch's mark of managed parameters
            self._add_optim_param(
                info.param, self.grad_view(i) if self.trainable[i] else None, (i,)
            )

    def shard_view(self, i: int) -> Tensor:
        """Return a tensor over this rank's elements of parameter ``i``. Local."""
        shape = None if self.is_sharded else self.shapes[i]
        return over(self.flat.shard_part(i), self.dtypes[i], shape)

    def grad_view(self, i: int) -> Tensor:
        """Return the tensor for ``.grad`` of the sharded parameter ``i``, over the shard gradient.

        Local.
        """
        shape = None if self.is_sharded else self.shapes[i]
        return over(self.flat.grad_part(i), self.dtypes[i], shape)

    def fresh_grad(self, index: int) -> Tensor:
        """Return a new tensor over the gradient of ``optim_params[index]``. Local."""
        param, _, covers = self.optim_params[index]
        if self.use_orig_params:
            return self.grad_view(covers[0])
        segment = self.flat.layout()["params"][covers[0]]["segment"]
        return over(self.flat.grad_segment(segment), param.dtype)

    def local(self, param: Tensor) -> Tensor:
        """Return the plain tensor with this rank's elements of a sharded parameter. Local."""
        return param

    def point_at_shard(self, index: int) -> None:
        """Point the parameter in ``optim_params[index]``, which may be new, at the shard. Local."""
        param = self.optim_params[index][0]
        self.show_shard(param, self.views[index])
        if self.use_orig_params:
            self.flat.replace_param(index, param)
            _writeback.set_owner(param, self)

    def show_shard(self, param: Tensor, view: Tensor) -> None:
        """Let the sharded parameter ``param`` have the memory of ``view``. Local."""
        param.data = view

    def replacement(self, index: int, param: Tensor, what: str) -> Tensor:
        """Return the object that becomes sharded parameter ``index`` after the user has put
        ``param`` in the place of that parameter. Local. ``ValueError``: the unit cannot use
        ``param`` there.
        """
        return param

    def adopt_in_pass(self) -> None:
        """Take over the user's changes of parameters when a forward begins. Raise an error if the
        forward cannot use a change. Local.
        """
        if not self.use_orig_params:
            _writeback.refuse_unread(self)
        _writeback.adopt_values(self)

    def _add_optim_param(
        self, param: nn.Parameter, grad: Tensor | None, covers: tuple[int, ...]
    ) -> None:
        self.optim_params.append((param, grad, covers))
        self.views.append(self.local(param).data)

    def place_flat_param(self, index: int, table: dict[str, Any], key: str) -> None:
        """Record ``table[key]``, an entry of a module's ``_parameters``, as the place of a flat
        parameter. Local.
        """
        self.flat_places[index] = table, key
        self.flat.place_param(index, table, key)

    def segments(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (number, layout) of the segments, trainable segments first. Local.

        The flat parameter of the first segment becomes ``_flat_param``, as in torch.
        """
        rows = enumerate(self.flat.layout()["segments"])
        return sorted(rows, key=lambda row: not row[1]["trainable"])

    def _make_flat_params(self) -> None:
        by_segment: dict[int, list[int]] = {}
        for i, row in enumerate(self.flat.layout()["params"]):
            by_segment.setdefault(row["segment"], []).append(i)
        for s, segment in self.segments():
            param = self.make_flat_param(s, segment)
            grad = over(self.flat.grad_segment(s), param.dtype) if param.requires_grad else None
            self.flat_params.append(param)
            _writeback.set_owner(param, self)
            self._add_optim_param(param, grad, tuple(by_segment[s]))
        for info in self.infos:
            info.param.grad = None
            info.param.data = torch.empty(0, dtype=info.param.dtype, device=self.own_device)

    def _bind(self) -> None:
        sites: list[tuple[Any, ...]] = []
        alone = not (self.is_sharded or self.groups.replicate or self.dtensors)
        for i, info in enumerate(self.infos):
            released = self.released[i]
            for module, attribute in info.sites:
                if self.use_orig_params:
                    placeholder = None if alone else released
                    sites.append((module._parameters, attribute, i, info.param, placeholder))
                else:
                    sites.append((module.__dict__, attribute, i, released))
        watched = self._watched()
        for i in watched:
            self.full[i].register_post_accumulate_grad_hook(self.flat.hook("grad", i))
        self.flat.bind(
            list(self.full),
            sites,
            list(self.optim_params),
            watched,
            versions=self._versions,
            by_gather=not self.use_orig_params,
            dtensors=self.dtensors,
            row_dims=bytes(self.dims) if any(self.dims) else None,
        )
        this = weakref.ref(self)

        def outside(call: Callable[[Any], None]) -> Callable[[], None]:
            """Return a function that runs ``call`` on the unit outside torch.func's transforms.

            Inside these transforms tensors have no addresses.
            """

            def run() -> None:
                with _torch.without_transforms():
                    call(this())

            return run

        self.flat.on_changed = outside(lambda unit: unit.adopt_in_pass())
        self.flat.on_kept = outside(_writeback.leave_kept)
        self.flat.on_moved = outside(_writeback.renew_grads)
        # Break the cycle full tensor -> torch's hook -> engine -> full tensor, which gc cannot see.
        weakref.finalize(self, self.flat.unbind)

    def _lower_grads(self) -> None:
        """Convert every ``.grad`` to the compute dtype, for ``keep_low_precision_grads``.

        The sums in the shard gradient stay as they are; the next backward adopts the values of
        ``.grad``.
        """
        for param, view, _ in self.optim_params:
            if view is not None and param.grad is view and view.dtype != self.param_dtype:
                low, values = view.detach(), view.to(self.param_dtype)
                param.grad = low
                low.data = values

    # --- what the wrapper reads ------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the unit's module in the model, which errors and trace entries contain."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = self.flat.name = value
        for released in self.released:
            released._fsdpc_unit = value

    @property
    def shard_params(self) -> list[nn.Parameter]:
        """The unit's sharded parameters, for an optimizer: original or flat parameters."""
        return [param for param, _, _ in self.optim_params]

    @property
    def is_sharded(self) -> bool:
        return self.groups.shard.world > 1

    @property
    def state(self) -> str:
        """The unit's phase: "idle", "forward", "backward" or "summoned"."""
        if self.summoned:
            return "summoned"
        return self.tree.training_state if self.tree is not None else "idle"

    # --- parameters in the modules ---------------------------------------------------------------

    def install_full(self, full: Sequence[Tensor]) -> None:
        """Register new Parameters over the full tensors in the modules. Local.

        ``full``: tensors with the original shapes and dtypes.
        """
        for i, info in enumerate(self.infos):
            info.register(_lowbit.parameter(full[i], info.param, self.trainable[i]))
        self.summoned = self.flat.shown = True

    def own_objects(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return data and gradient of each of the user's Parameters, for ``put_own_back``. Local.

        Only with ``use_orig_params=True``.
        """
        return [(param.data, param.grad) for param in self.shard_params]

    def show_own(self, full: Sequence[Tensor]) -> None:
        """Give the user's Parameters full tensors as data, and no gradients. Local."""
        for info, tensor in zip(self.infos, full, strict=True):
            info.param.grad = None
            info.param.data = tensor
            info.register(info.param)
        self.summoned = self.flat.shown = True

    def put_own_back(self, before: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Undo ``show_own``. Local."""
        for param, (data, grad) in zip(self.shard_params, before, strict=True):
            param.grad = None
            param.data = data
            put_grad(param, grad)

    def install_sharded(self) -> None:
        """Undo ``install_full`` or ``show_own`` in the modules. Local.

        With ``use_orig_params`` the modules get placeholders during a pass, and the sharded
        parameters at other times. Without ``use_orig_params`` the modules get the gathered
        parameters while these are readable, and placeholders at other times.
        """
        for i, info in enumerate(self.infos):
            for module, attribute in info.sites:
                if self.use_orig_params:
                    in_pass = self.flat.in_pass
                    module._parameters[attribute] = self.released[i] if in_pass else info.param
                else:
                    module._parameters.pop(attribute, None)
                    shown = self.full if self.flat.readable else self.released
                    module.__dict__[attribute] = shown[i]
        self.summoned = self.flat.shown = False

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def adopted_grads(self) -> Iterator[bytes]:
        """Copy all gradients into the shard gradient for the block, and yield the mask of the
        parameters that have a gradient. After the block, also after an exception, a unit with
        ``keep_low_precision_grads`` converts the gradients to low precision again. Local.
        """
        try:
            self.flat.adopt_grads()
            yield self._grad_mask()
        finally:
            if self.flat.after_backward is not None:
                self._lower_grads()

    def _grad_mask(self) -> bytes:
        mask = bytearray(len(self.infos))
        for param, view, covers in self.optim_params:
            for i in covers:
                mask[i] = view is not None and param.grad is not None
        return bytes(mask)

    def holds_nothing(self, param: nn.Parameter) -> bool:
        """Whether all elements of ``param`` are on other ranks; then ``.grad`` is None. Local."""
        if param.numel() > 0 or not self.is_sharded:
            return False
        covers = next((covers for one, _, covers in self.optim_params if one is param), ())
        return any(self.shapes[i].numel() > 0 for i in covers)

    def grad_norm_sums(self, mask: bytes, norm_type: float) -> float:
        """Return the sum of |g|^p over this rank's shard, or for p = inf max |g|. Local.

        Each element of a parameter counts on one rank of the shard group. ``mask``: the mask that
        ``adopted_grads`` yields.
        """
        if norm_type == float("inf"):
            return self.flat.grad_norm(mask, 2.0)[1]
        return self.flat.grad_norm(mask, float(norm_type))[0]
