"""A unit that is gathered in Python, because some parameters have gather functions of their own
(``extension.py``).

The engine keeps and releases the unit and sums its gradients as for any other unit. The tensors
that the parameters send are concatenated into one buffer of bytes, one collective gathers the
buffers of all ranks, and the gathered tensors are made from these buffers. The other parameters of
the unit are sent in the same buffer, in the compute dtype. As with torch, the gathers of such units
are matched by their order, so all ranks must make the same gathers in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdpc import _C
from fsdpc._comm.channel import this_rank
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.interop import around, computes
from fsdpc._engine.outputs import copy_within
from fsdpc._engine.unit import ParamInfo
from fsdpc._fsdp2.args import DataMesh
from fsdpc._fsdp2.extension import Extension, extends
from fsdpc._fsdp2.gathered import Gathered
from fsdpc._fsdp2.unit import RowUnit
from fsdpc._spans.rows import rows_shape
from fsdpc._torch import without_transforms

_ALIGN = 16  # alignment in bytes of each tensor in the buffer that a rank sends


class ExtendedUnit(RowUnit):
    """A ``RowUnit`` that is gathered in Python. ``policy``: the policy that ``fsdp_pre_all_gather``
    gets. ``NotImplementedError``: a parameter with a gather of its own is cut along another
    dimension than the first.
    """

    foreign = True

    def __init__(
        self,
        name: str,
        infos: list[ParamInfo],
        data_mesh: DataMesh,
        *,
        policy: MixedPrecisionPolicy,
        dims: Sequence[int] = (),
        adopted: Sequence[nn.Parameter] = (),
        **options: Any,
    ) -> None:
        sources = adopted or [info.param for info in infos]
        self.extended = [extends(param) for param in sources]
        for info, dim, extended in zip(infos, dims or [0] * len(infos), self.extended, strict=True):
            if extended and dim > 0:
                raise NotImplementedError(
                    f"parameter {info.name!r} of unit {name!r} has fsdp_pre_all_gather and is cut "
                    f"along dimension {dim}: let shard_placement_fn return Shard(0) for it"
                )
        self.policy = policy
        mesh = data_mesh.mesh
        self.shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        self._forward_versions: list[int] = []
        super().__init__(
            name, infos, data_mesh, dims=dims, adopted=adopted, policy=policy, **options
        )
        self.gathered = [self._gathered(i) for i in range(len(infos))]
        this = weakref.ref(self)

        def on_values(gathered: bool) -> None:
            unit = this()
            assert unit is not None  # only the unit itself makes this call
            with without_transforms(), torch.inference_mode(False), torch.no_grad():
                unit.on_values(gathered)

        self.flat.on_values = on_values
        release = self.post_forward_hook

        def post_forward(*inputs_and_output: Any) -> Any:
            """Replace outputs that lie in the gathered memory by copies, because this memory is
            freed.
            """
            *inputs, output = inputs_and_output
            unit = this()
            assert unit is not None
            kept = copy_within(output, [each for g in unit.gathered for each in g.ranges()])
            copied = release(*inputs, kept)
            return kept if copied is None else copied

        self.post_forward_hook = post_forward

    def _gathered(self, i: int) -> Gathered:
        padded = torch.Size(rows_shape(self.shapes[i], self.groups.shard.world, 0))
        options = padded, self._compute_dtype(i), self.device
        if not self.extended[i]:
            return Gathered(*options)
        size, module = self.shapes[i], self.infos[i].sites[0][0]
        stride = torch.empty(size, device="meta").stride()
        return Extension((self.shard_mesh, size, stride, module, self.policy), *options)

    # --- parameters ------------------------------------------------------------------------------

    def scatter_full(self, full: Sequence[Tensor]) -> None:
        """Write full values as ``RowUnit.scatter_full`` does, except for parameters with a gather
        of their own, whose shards are not in the engine's memory. Local.
        """
        for i, tensor in enumerate(full):
            if not tensor.is_meta and not self.extended[i]:
                self.flat.write(i, self._own(tensor, i))

    def _first_local(self, i: int) -> tuple[Tensor, Tensor]:
        if not self.extended[i]:
            return super()._first_local(i)
        if self.adopted:
            own = self.local(self.adopted[i])
        else:
            own = self._cut(self.infos[i].param)
        return own, own

    def _shard_originals(self) -> None:
        super()._shard_originals()
        for param, view, extended in zip(self.shard_params, self.views, self.extended, strict=True):
            if extended:
                # nn.Parameter has detached the view, which not every tensor class supports. So put
                # the view itself into the parameter.
                self.show_shard(param, view)

    @torch.no_grad()
    def _cut(self, param: Tensor) -> Tensor:
        """Return this rank's rows, made only by the operations that torch's documentation requires
        of such a tensor.
        """
        shard = self.groups.shard
        chunks = torch.chunk(param, shard.world)
        rows = rows_shape(param.shape, shard.world, shard.rank)[0]
        part = param.new_zeros(chunks[0].size()).narrow(0, 0, rows)
        if rows:
            part.copy_(chunks[shard.rank])
        return part

    def _make_full(self, i: int) -> Tensor:
        dtype = self._compute_dtype(i)
        empty = torch.empty(self.shapes[i], dtype=dtype, device=self.device)
        param = nn.Parameter(empty.movedim(0, self.dims[i]), requires_grad=self.trainable[i])
        if not self.extended[i]:
            param.__dict__.update(self.infos[i].param.__dict__)
        _writeback.set_gathered(param, self, self.infos[i].name)
        empty.untyped_storage().resize_(0)
        return param

    def follow_memory(self) -> None:
        """Do nothing, because this class makes the gathered tensors itself. Local."""

    def adopt_own(self, index: int) -> bool:
        """Record the current local tensor of a parameter with a gather of its own and return True;
        return False for other parameters. Local. ``TypeError``: the local tensor has no gather of
        its own any more. ``RuntimeError``: the shape has changed.
        """
        if not self.extended[index]:
            return False
        param = self.optim_params[index][0]
        now: Any = self.local(param)
        if not extends(now):
            raise TypeError(
                f"parameter {self.infos[index].name!r} of unit {self.name!r} had "
                f"fsdp_pre_all_gather and was replaced by a {type(now).__name__} without: copy "
                "values into it (copy_()) instead"
            )
        if now.shape != self.views[index].shape:
            raise RuntimeError(
                "Cannot writeback when the parameter shape changes\n"
                f"Expects {self.views[index].shape} but got {now.shape}: parameter "
                f"{self.infos[index].name!r} of unit {self.name!r}"
            )
        self.views[index] = now
        _writeback.set_owner(param, self)
        return True

    def _compute_dtype(self, i: int) -> torch.dtype:
        dtype = self.dtypes[i]
        if self.carried[i] and not self.extended[i]:
            return dtype
        return self.param_dtype or dtype if dtype.is_floating_point else dtype

    # --- a gather --------------------------------------------------------------------------------

    def on_values(self, gathered: bool) -> None:
        """Call ``gather_values`` if ``gathered``, else ``drop_values``. If a tensor cannot be made,
        the values are dropped too.
        """
        try:
            if gathered:
                self.gather_values()
                return
        except BaseException:
            self.drop_values()
            raise
        self.drop_values()

    def gather_values(self) -> None:
        """Make the gathered tensors. Collective over the shard group. If a rank cannot make the
        tensors that it sends, it raises the error, and the other ranks raise ``MismatchError``.
        """
        shard, what = self.groups.shard, f"gather of unit {self.name!r}"
        self.tree.core.before_hook(self.tree.units.index(self), what)
        sent, error = self._sent()
        self._agree(sent, error)
        places, total = _places(sent)
        rows = torch.empty((shard.world, total), dtype=torch.uint8, device=self.device)
        for tensors, starts in zip(sent, places, strict=True):
            for tensor, start in zip(tensors, starts, strict=True):
                nbytes = tensor.numel() * tensor.dtype.itemsize
                own = rows[shard.rank, start : start + nbytes].view(tensor.dtype)
                own.view(tensor.size()).copy_(tensor)
        if total:
            shard.all_gather(rows, what=what)
        for i, gathered in enumerate(self.gathered):
            made = gathered.fill(rows, places[i], self._rows_of(i), self.full[i])
            if made is not None:
                self._show(i, made)

    def _rows_of(self, i: int) -> Any:
        """Return this rank's part of parameter ``i``, with the sharded dimension first."""
        local = self.local(self.infos[i].param)
        return local if self.extended[i] else local.movedim(self.dims[i], 0)

    def _sent(self) -> tuple[list[list[Tensor]], Exception | None]:
        sent: list[list[Tensor]] = []
        try:
            self._check_versions()
            for i, gathered in enumerate(self.gathered):
                tensors = gathered.send(self._rows_of(i))
                gathered.check(tensors)
                sent.append(tensors)
        except Exception as error:  # other ranks must learn of the error before they wait
            error.add_note(f"(gather of unit {self.name!r} on rank {this_rank(self.groups.shard)})")
            return sent, error
        return sent, None

    def _check_versions(self) -> None:
        """Raise ``StateError`` if parameters were written to between a forward and its backward."""
        now = [param._version + self.local(param)._version for param in self.shard_params]
        if self.tree.training_state != "backward":
            self._forward_versions = now
        elif now != self._forward_versions:
            raise _C.StateError(
                f"parameters of unit {self.name!r} were changed on rank "
                f"{this_rank(self.groups.shard)} between their forward and this backward, which "
                "would compute with old and new weights: change weights after backward, or before "
                "forward"
            )

    def _agree(self, sent: list[list[Tensor]], error: Exception | None) -> None:
        """Check that all ranks send tensors of the same shapes and dtypes, so that no rank waits
        for data that another rank does not send.
        """
        lines = [
            f"parameter {info.name} sends "
            + ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in tensors)
            for info, tensors in zip(self.infos, sent, strict=False)
        ]
        if error is not None:
            lines.append(f"{type(error).__name__}: {error}")
        try:
            self.groups.shard.agree("\n".join(lines), what=f"gather of unit {self.name!r}")
        except _C.MismatchError:
            if error is None:
                raise
        if error is not None:
            raise error

    # --- the gathered tensors --------------------------------------------------------------------

    def _show(self, i: int, made: Tensor) -> None:
        """Use ``made`` as the gathered parameter ``i`` in the modules from now on."""
        before: Any = self.full[i]
        stride = torch.empty(self.shapes[i], device="meta").stride()
        whole = torch.as_strided(made, self.shapes[i], stride, 0)
        if self.dims[i] > 0:
            whole = whole.movedim(0, self.dims[i])
        spec = self.parallel[i]
        param: Any = nn.Parameter(whole if spec is None else around(whole, spec), False)
        if param.is_floating_point():  # so that a frozen parameter can get the hook, too
            param.requires_grad_(True)
            param.register_hook(partial(_as_plain, self.grad_of_parallel(i)))
            param.requires_grad_(before.requires_grad)
        for key, value in before.__dict__.items():
            param.__dict__.setdefault(key, value)
        self.full[i] = param
        self.flat.replace_full(i, param)

    def drop_values(self) -> None:
        """Free the memory of the gathered tensors. Local."""
        for gathered in self.gathered:
            gathered.drop()


def _as_plain(place: Any, grad: Any) -> Any:
    """Return a gradient as a plain tensor of a dtype that the engine can sum. ``place``: None, or a
    function that brings a tensor-parallel gradient to the placements of its parameter.
    """
    if place is not None:
        return place(grad)
    if type(grad) is Tensor and computes(grad.dtype):
        return grad
    dtype = grad.dtype if computes(grad.dtype) else torch.float32
    with torch.no_grad():
        return torch.empty(grad.size(), dtype=dtype, device=grad.device).copy_(grad)


def _places(sent: list[list[Tensor]]) -> tuple[list[list[int]], int]:
    """Return where each tensor begins among the bytes that a rank sends, and the total number of
    bytes.
    """
    places: list[list[int]] = []
    end = 0
    for tensors in sent:
        places.append([])
        for tensor in tensors:
            places[-1].append(end)
            nbytes = tensor.numel() * tensor.dtype.itemsize
            end += (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
    return places, end
