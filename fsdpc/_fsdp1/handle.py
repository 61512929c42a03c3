"""A unit that has those attributes of torch's flat-parameter handle that frameworks use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdpc._clip.torch_utils import watch
from fsdpc._engine.interop import over
from fsdpc._engine.unit import ON_GRADS, Unit
from fsdpc._torch import ShardParamInfo


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _with_padding(params: list[dict[str, Any]]) -> tuple[tuple[int, ...], list[bool]]:
    """Return the lengths of the parameters and of the padding between them. The second list says
    for each length whether the length belongs to padding.
    """
    numels: list[int] = []
    padding: list[bool] = []
    at = 0
    for param in params:
        if param["offset"] > at:
            numels.append(param["offset"] - at)
            padding.append(True)
        numels.append(param["numel"])
        padding.append(False)
        at = param["offset"] + param["numel"]
    return tuple(numels), padding


def _shard_info(span: tuple[int, int, int]) -> ShardParamInfo:
    begin, piece_begin, length = span
    if length == 0:
        return ShardParamInfo(False, None, None, None, None)
    return ShardParamInfo(True, piece_begin, length, begin, begin + length - 1)


def _padding_of(
    layout: dict[str, Any], members: list[int], rank: int, segment: dict[str, Any]
) -> int:
    """Return the number of padding elements at the end of a rank's shard of the segment."""
    ends = [begin + length for _, begin, length in (layout["spans"][i][rank] for i in members)]
    return segment["piece_numel"] - max(ends, default=0)


class HandledUnit(Unit):
    """A unit of ``FullyShardedDataParallel``. Frameworks change the storage dtype by setting
    ``_orig_param_dtype``, which calls ``on_storage_dtype``.
    """

    on_storage_dtype: Callable[[torch.dtype], None] | None = None

    def __init__(self, *args: Any, former: Sequence[nn.Parameter] = (), **options: Any) -> None:
        """``former``: the flat parameters of the unit that this unit replaces. Their objects are
        used again, because optimizers may refer to them.
        """
        self.former: dict[Any, nn.Parameter] = {vars(flat)["_fqns"]: flat for flat in former}
        super().__init__(*args, **options)

    def make_flat_param(self, index: int, segment: dict[str, Any]) -> nn.Parameter:
        """Return this rank's shard of one segment as torch's flat parameter, a 1-D tensor with
        ``_fqns``. If ``former`` has an object for the same parameters, that object is used again.
        """
        layout = self.flat.layout()
        members = [i for i, p in enumerate(layout["params"]) if p["segment"] == index]
        dtype = torch.uint8 if self.carried[members[0]] else self.dtypes[members[0]]
        shard = over(self.flat.shard_segment(index), dtype)
        param = self.former.pop(tuple(self.infos[i].name for i in members), None)
        if param is None:
            param = nn.Parameter(shard, requires_grad=bool(segment["trainable"]))
        else:
            param.grad = None
            param.data = shard
            param.requires_grad_(bool(segment["trainable"]))
        param._is_flat_param = True  # isinstance(p, torch.distributed.fsdp.FlatParameter)
        param._fsdp_flattened = True  # torch's mark of managed parameters, read by frameworks
        for name, value in self._metadata(layout, index, members).items():
            setattr(param, name, value)
        param._local_shard = param.detach()  # type: ignore[attr-defined]
        return param

    def _metadata(self, layout: dict[str, Any], index: int, members: list[int]) -> dict[str, Any]:
        """Return the attributes of torch's flat parameters, except ``_param_infos`` and
        ``_modules``. These two refer to modules, so an optimizer would keep a deleted model alive.
        """
        rank, world = self.groups.shard.rank, self.groups.shard.world
        segment = layout["segments"][index]
        whole = torch.Size([segment["piece_numel"] * world])
        numels, padding = _with_padding([layout["params"][i] for i in members])
        own = [self.infos[i].param for i in members] if self.use_orig_params else None
        return {
            "_fqns": tuple(self.infos[i].name for i in members),
            "_num_params": len(members),
            "_shapes": tuple(self.shapes[i] for i in members),
            "_strides": tuple(_strides(self.shapes[i]) for i in members),
            "_contiguities": (True,) * len(members),
            "_param_extensions": (None,) * len(members),
            "_numels": tuple(self.shapes[i].numel() for i in members),
            "_numels_with_padding": numels,
            "_is_padding_mask": padding,
            "_shard_param_infos": tuple(_shard_info(layout["spans"][i][rank]) for i in members),
            "_unpadded_unsharded_size": torch.Size([segment["numel"]]),
            "_padded_unsharded_size": whole,
            "_sharded_size": torch.Size([segment["piece_numel"]]),
            "_shard_numel_padded": _padding_of(layout, members, rank, segment),
            "_params": own,
            "_shared_params": None if own is None else [],
            "_tensors": None,
            "_is_grad_none_mask": None,
        }

    @property
    def flat_param(self) -> nn.Parameter | None:
        """The first flat parameter. Trainable flat parameters come first. With ``use_orig_params``
        no flat parameter is registered, and each read makes a new view of the shard.
        """
        if self.flat_params:
            return self.flat_params[0]
        first = next(iter(self.segments()), None)
        return None if first is None else self.make_flat_param(*first)

    @property
    def _orig_param_dtype(self) -> torch.dtype | None:
        """The dtype of ``flat_param``. Setting this property changes the storage dtype of the
        parameters, which is collective.
        """
        param = self.flat_param
        return None if param is None else param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if self.on_storage_dtype is not None:
            self.on_storage_dtype(dtype)


ON_GRADS.append(watch)
