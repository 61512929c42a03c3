"""What a module shows in a parameter's place while its unit is released and there is no sharded
parameter of the user's own to show (``use_orig_params=False``).
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpc import _C


class ReleasedParameter(torch.Tensor):
    """Shape, dtype, device and ``requires_grad`` of a parameter without its values.

    Everything that needs the values raises ``fsdpc.StateError``.
    """

    _fsdpc_refusal: str

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        unit: str,
    ) -> ReleasedParameter:
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._fsdpc_refusal = (
            f"parameter {name!r} of unit {unit!r} is not gathered here: its values can be read in "
            "the forward of its own unit and inside summon_full_params. Where another module uses "
            "it (tied weights), wrap both in one unit, or call the module that owns it"
        )
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _C.StateError(_find(args, kwargs)._fsdpc_refusal)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _C.StateError(self._fsdpc_refusal)

    tolist = numpy = data_ptr = untyped_storage = __array__ = __dlpack__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _C.StateError(self._fsdpc_refusal)

    def __deepcopy__(self, memo: Any) -> ReleasedParameter:
        return self

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def _find(args: Any, kwargs: Any) -> ReleasedParameter:
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, ReleasedParameter):
            return value
        if isinstance(value, list | tuple):
            pending.extend(value)
    raise AssertionError("a released parameter among the arguments was expected")
