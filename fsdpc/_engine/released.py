"""Placeholders for parameters without readable values: while their unit is released
(``use_orig_params=False``), or while other units' forwards run (``use_orig_params=True``). Without
placeholders other units would compute with this rank's shard, or with values whose gradient is not
reduced over the ranks and whose changes reach some ranks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _C


class ReleasedParameter(torch.Tensor):
    """Shape, dtype, device and ``requires_grad`` of a parameter without its values.

    Any use of the values raises ``fsdpc.StateError``. Flags, hooks and the gradient are those of
    ``sharded``, the user's sharded parameter, if given. ``outside``: where else values are
    readable.
    """

    _fsdpc_name: str
    _fsdpc_unit: str  # follows the unit's name
    _fsdpc_outside: str
    _fsdpc_sharded: nn.Parameter | None

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        unit: str,
        sharded: nn.Parameter | None = None,
        outside: str = "inside summon_full_params",
    ) -> ReleasedParameter:
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._fsdpc_sharded = sharded
        self._is_param = sharded is not None  # for isinstance(..., nn.Parameter)
        self._fsdpc_name, self._fsdpc_unit, self._fsdpc_outside = name, unit, outside
        return self

    @property
    def _fsdpc_which(self) -> str:
        return f"parameter {self._fsdpc_name!r} of unit {self._fsdpc_unit!r}"

    @property
    def _fsdpc_refusal(self) -> str:
        return (
            f"{self._fsdpc_which} is not gathered here: its values are readable in the forward of "
            f"its own unit and {self._fsdpc_outside}. If another module uses the parameter (tied "
            "weights), wrap both modules in one unit, or call the owning module"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _C.StateError(_find(args, kwargs)._fsdpc_refusal)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _C.StateError(self._fsdpc_refusal)

    data = property(_refuse, _refuse)
    tolist = numpy = data_ptr = untyped_storage = __array__ = __dlpack__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _C.StateError(self._fsdpc_refusal)

    def __deepcopy__(self, memo: Any) -> ReleasedParameter:
        return self

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


class ReleasedDTensor(ReleasedParameter):
    """Stands for a parameter whose sharded form is a DTensor, also for ``isinstance``: it has the
    DTensor's mesh and placements, and its full tensor where no gradient goes through that.

    A rank's rows are not readable: changes of them would reach the gathers of some ranks.
    """

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return DTensor

    def full_tensor(self, **options: Any) -> Any:
        """torch's ``full_tensor``, collective over the ranks of the mesh. ``StateError`` where the
        parameter trains: no rank would have the gradient of all ranks.
        """
        own: Any = self._fsdpc_sharded
        if own is None or (own.requires_grad and torch.is_grad_enabled()):
            raise _C.StateError(
                f"{self._fsdpc_which} is not gathered here, and no rank would have the gradient of "
                "all ranks through full_tensor(): wrap the module that reads the parameter and its "
                "own in one unit, or call the owning module"
            )
        return own.full_tensor(**options)

    def _refuse_part(self, *args: Any, **kwargs: Any) -> Any:
        raise _C.StateError(
            f"{self._fsdpc_which} is not gathered here: call to_local() or redistribute() of it "
            "before the model's forward, and pass the result in"
        )

    to_local = redistribute = _refuse_part


def _pass_on(name: str, kind: type = torch.Tensor, to: type = ReleasedParameter) -> None:
    """Forward an attribute or method to the user's sharded parameter, if there is one."""
    plain = getattr(kind, name)

    def method(self: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
        own = self._fsdpc_sharded
        result = plain(self if own is None else own, *args, **kwargs)
        return self if result is own else result

    def get(self: ReleasedParameter) -> Any:
        own = self._fsdpc_sharded
        return plain.__get__(self if own is None else own)

    def put(self: ReleasedParameter, value: Any) -> None:
        own = self._fsdpc_sharded
        plain.__set__(self if own is None else own, value)

    setattr(to, name, method if callable(plain) else property(get, put))


for _name in (
    "grad",
    "requires_grad",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
):
    _pass_on(_name)
for _name in ("device_mesh", "placements"):
    _pass_on(_name, DTensor, ReleasedDTensor)


def _find(args: Any, kwargs: Any) -> ReleasedParameter:
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, ReleasedParameter):
            return value
        if isinstance(value, list | tuple):
            pending.extend(value)
    raise AssertionError("no released parameter among the arguments")
