"""A unit whose sharded parameters are DTensors: each rank has whole rows of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpc._engine import writeback as _writeback
from fsdpc._engine.interop import over
from fsdpc._engine.rows import rows_shape
from fsdpc._engine.unit import ParamInfo, Unit
from fsdpc._fsdp2.args import Place


class RowUnit(Unit):
    """The parameters of one call of ``fully_shard``. Collective over the groups of ``place``.

    Parameters on the meta device stay there until ``to_empty`` or a load replaces them; the memory
    of their shards exists from the start. ``adopted``: sharded parameters of an earlier unit that
    stand for this one's; the caller copies their values.
    """

    dtensors = True

    def __init__(
        self,
        name: str,
        infos: list[ParamInfo],
        place: Place,
        *,
        adopted: Sequence[nn.Parameter] = (),
        **options: Any,
    ) -> None:
        self.place = place
        self.adopted = adopted
        super().__init__(name, infos, place.groups, use_orig_params=True, by_rows=True, **options)

    # --- sharded parameters ----------------------------------------------------------------------

    def _shard_originals(self) -> None:
        for i, info in enumerate(self.infos):
            local = self.shard_view(i)
            meta = info.param.is_meta
            shown = torch.empty_like(local, device="meta") if meta else local
            if self.adopted:
                param: Any = self.adopted[i]
                param._local_tensor = local
            else:
                param = nn.Parameter(self.distributed(shown, i), requires_grad=self.trainable[i])
                param.__dict__.update(info.param.__dict__)
            info.param = param
            _writeback.set_owner(param, self)
            self.released[i]._fsdpc_sharded = param
            self._seen.append((param, self.grad_view(i) if self.trainable[i] else None, (i,)))
            self.views.append(local)

    def distributed(self, local: Tensor, i: int) -> DTensor:
        """A DTensor of parameter ``i`` around this rank's rows, without a copy. Local."""
        shape = self.shapes[i]
        tensor = DTensor.from_local(
            local,
            self.place.mesh,
            self.place.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        tensor._local_tensor = local  # not an alias of its own: counts writes with the view
        return tensor

    def _rows(self, i: int) -> torch.Size:
        shard = self.groups.shard
        return torch.Size(rows_shape(self.shapes[i], shard.world, shard.rank))

    def shard_view(self, i: int) -> Tensor:
        return over(self.flat.shard_part(i), self.dtypes[i], self._rows(i))

    def grad_view(self, i: int) -> Tensor:
        return self.distributed(over(self.flat.grad_part(i), self.dtypes[i], self._rows(i)), i)

    def local(self, param: Any) -> Tensor:
        return param._local_tensor

    def point_at_shard(self, index: int) -> None:
        param: Any = self.seen[index][0]
        param._local_tensor = self.views[index]
        self.flat.replace_param(index, param)
        _writeback.set_owner(param, self)

    def check_replacement(self, param: Tensor, what: str) -> None:
        wanted = (self.place.mesh, self.place.placements)
        if not isinstance(param, DTensor):
            raise ValueError(
                f"{what} was replaced by a plain tensor of shape {tuple(param.shape)}: assign a "
                "DTensor (torch.distributed.tensor.distribute_tensor), or copy values into the "
                "sharded parameter"
            )
        if (param.device_mesh, tuple(param.placements)) != wanted:
            raise ValueError(
                f"{what} was replaced by a DTensor with {param.placements} on {param.device_mesh}, "
                f"but its shard has {wanted[1]} on {wanted[0]}: redistribute() the new value first"
            )

    def holds_nothing(self, param: nn.Parameter) -> bool:
        """False: every rank sees its part of each gradient, also an empty one. Local."""
        return False

    def scatter_full(self, full: Sequence[Tensor]) -> None:
        """As ``WholeValues.scatter_full``, without tensors on the meta device. Local."""
        for i, tensor in enumerate(full):
            if not tensor.is_meta:
                self.flat.write(i, self._own(tensor, i))

    def announce_grads(self) -> None:
        """Nothing: torch's functions on DTensor gradients are collective by themselves."""
