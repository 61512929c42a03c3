"""torch's extension interface of a tensor: its own code before and after the gather of a parameter.

``fsdp_pre_all_gather(mesh)``, or with ``outer_size, outer_stride, module, mp_policy`` behind the
mesh, returns the tensors that this rank sends, and metadata. ``fsdp_post_all_gather(outputs,
metadata, param_dtype, *, out=None)`` returns the gathered parameter and the tensors whose memory is
given back between gathers; later calls get that parameter as ``out`` and write into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdpc._fsdp2.gathered import Gathered
from fsdpc._torch import preserved_versions

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def extends(tensor: Any) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, has the interface. torch's
    ``AssertionError``: the tensor has only one of the two functions.
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    pre, post = hasattr(tensor, _PRE), hasattr(tensor, _POST)
    if pre != post:
        raise AssertionError(
            f"Both {_PRE} and {_POST} should be defined if using all-gather extensions: a "
            f"{type(tensor).__name__} has only {_PRE if pre else _POST}"
        )
    return pre


def is_opaque(tensor: Any) -> bool:
    """Whether only the code of a tensor's class knows the tensor's memory. (A plain tensor on which
    the functions were set has plain memory.)
    """
    return hasattr(type(tensor), _PRE)


class Extension(Gathered):
    """A parameter with the interface. ``arguments``: mesh, size, strides, module, policy."""

    def __init__(self, arguments: Sequence[Any], *options: Any) -> None:
        super().__init__(*options)
        self._arguments = arguments
        self._metadata: Any = None

    def send(self, local: Any) -> list[Tensor]:
        """As ``Gathered.send``. torch's ``AssertionError``: ``fsdp_pre_all_gather`` has another
        signature, or returns a size that an uneven shard must not have.
        """
        if local.device != self.device:
            local = local.to(self.device, non_blocking=True)
        signature = inspect.signature(local.fsdp_pre_all_gather)
        count = len(signature.parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid {_PRE}: {signature}\nExpects {_PRE}(self, mesh: DeviceMesh, outer_size: "
                "torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: "
                "MixedPrecisionPolicy)"
            )
        sent, self._metadata = local.fsdp_pre_all_gather(*self._arguments[:count])
        tensors = [sent] if isinstance(sent, Tensor) else list(sent)
        sizes = [tensor.size() for tensor in tensors]
        uneven = local.size() != self.padded
        if count == 5 and uneven and any(size != self.padded for size in sizes):
            raise AssertionError(
                f"When a parameter is unevenly sharded by FSDP (orig size={self._arguments[1]}, "
                f"FSDP world size={self._arguments[0].size()}), {_PRE} must return all-gather "
                f"inputs with the padded sharded size {self.padded} but got {sizes}"
            )
        return tensors

    def finish(self, local: Any, out: Any) -> Tensor | None:
        """As ``Gathered.finish``. ``TypeError``: ``fsdp_post_all_gather`` returned no pair."""
        metadata, self._metadata = self._metadata, None
        if self.made:
            # The call writes the saved values anew: autograd must not count that as a change.
            with preserved_versions(tuple(_parts(getattr(out, "_local_tensor", out)))):
                local.fsdp_post_all_gather(self.shaped(), metadata, self.dtype, out=out)
            return None
        made = local.fsdp_post_all_gather(self.shaped(), metadata, self.dtype)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Tensor):
            raise TypeError(
                f"{_POST} without out= must return the gathered tensor and a tuple of the tensors "
                f"to free, but returned a {type(made).__name__}"
            )
        value, self.inner = made[0], tuple(made[1])
        return value


def _parts(tensor: Any) -> list[Tensor]:
    """A tensor and the tensors that it wraps."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [tensor, *(part for name in names for part in _parts(getattr(tensor, name)))]
