"""torch's extension interface of tensors, by which a tensor's own code runs before and after the
gather of a parameter.

``fsdp_pre_all_gather(mesh)`` returns the tensors that this rank sends, and metadata. The function
may also have the signature ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module,
mp_policy)``. ``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` returns the
gathered parameter and the tensors whose memory is freed between gathers. Later calls get the
gathered parameter as ``out`` and write into it.
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
    """Return whether a tensor, or the local tensor of a DTensor, has the interface. Raises torch's
    ``AssertionError`` if the tensor has only one of the two functions.
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
    """Return whether only the code of a tensor's class knows the layout of the tensor's memory. (A
    plain tensor on which the two functions were set as attributes has ordinary memory.)
    """
    return hasattr(type(tensor), _PRE)


class Extension(Gathered):
    """A parameter with the extension interface. ``arguments``: the mesh, size, strides, module and
    policy that ``fsdp_pre_all_gather`` gets.
    """

    def __init__(self, arguments: Sequence[Any], *options: Any) -> None:
        super().__init__(*options)
        self._arguments = arguments
        self._metadata: Any = None

    def send(self, local: Any) -> list[Tensor]:
        """Return what this rank sends, as ``Gathered.send`` does. torch's ``AssertionError``:
        ``fsdp_pre_all_gather`` has another signature, or does not return tensors of the padded size
        for an uneven shard.
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
        """Make the gathered tensor, as ``Gathered.finish`` does. ``TypeError``:
        ``fsdp_post_all_gather`` did not return a pair that begins with a tensor.
        """
        metadata, self._metadata = self._metadata, None
        if self.made:
            # The call writes the same values again. Autograd must not count these writes as changes
            # of saved tensors.
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
    """Return a tensor and all tensors that it wraps."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [tensor, *(part for name in names for part in _parts(getattr(tensor, name)))]
