"""What frameworks read and set on torch's flat-parameter handle, offered by a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdpc._interop import computes, over


class HandleFace:
    """Base of ``Unit``. ``on_storage_dtype`` is called when a framework sets the storage dtype."""

    infos: list[Any]
    flat: Any
    flat_params: list[nn.Parameter]
    dtypes: list[torch.dtype]
    trainable: list[bool]
    on_storage_dtype: Callable[[torch.dtype], None] | None = None

    def make_flat_param(self, segment: dict[str, Any], index: int) -> nn.Parameter:
        """This rank's part of one segment as torch's flat parameter: 1-D, with its ``_fqns``."""
        members = [i for i, p in enumerate(self.flat.layout()["params"]) if p["segment"] == index]
        dtype = self.dtypes[members[0]] if computes(self.dtypes[members[0]]) else torch.uint8
        shard = over(self.flat.shard_segment(index), dtype)
        param = nn.Parameter(shard, requires_grad=bool(segment["trainable"]))
        param._is_flat_param = True  # isinstance(p, torch.distributed.fsdp.FlatParameter)
        param._fsdp_flattened = True  # torch's mark of what FSDP manages; frameworks look for it
        param._fqns = tuple(self.infos[i].name for i in members)  # type: ignore[attr-defined]
        return param

    @property
    def flat_param(self) -> nn.Parameter | None:
        """The first flat parameter, trainable if one is. With ``use_orig_params`` nothing is
        registered under this name: it is a view of the shard, made for the question.
        """
        if self.flat_params:
            return self.flat_params[0]
        segments = self.flat.layout()["segments"]
        if not segments:
            return None
        first = min(range(len(segments)), key=lambda s: (not segments[s]["trainable"], s))
        return self.make_flat_param(segments[first], first)

    @property
    def _orig_param_dtype(self) -> torch.dtype | None:
        """Storage dtype of the (trainable) parameters; setting it converts them. Collective."""
        param = self.flat_param
        return None if param is None else param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if self.on_storage_dtype is not None:
            self.on_storage_dtype(dtype)
