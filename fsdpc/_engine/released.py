"""Placeholders for parameters whose values are not readable.

A placeholder stands for a parameter while the parameter's unit is released
(``use_orig_params=False``), or while other units' forwards run (``use_orig_params=True``). Without
placeholders, other units would compute with this rank's shard, or with values whose gradients are
not reduced over the ranks and whose changes reach only some ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _C


class ReleasedParameter(torch.Tensor):
    """A tensor with the shape, dtype, device and ``requires_grad`` of a parameter, but no values.

    Any use of the values raises ``fsdpc.StateError``. ``sharded``: the user's sharded parameter, or
    None. If ``sharded`` is given, the placeholder's flags, hooks and gradient are those of
    ``sharded``. ``outside``: the text that says in errors where else the values are readable.
    """

    _fsdpc_name: str
    _fsdpc_unit: str  # updated when the unit's name changes
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
    """A placeholder for a parameter that is sharded as a DTensor.

    For ``isinstance`` the placeholder is a DTensor, too, and it has the DTensor's mesh and
    placements. ``full_tensor`` works if no gradient can flow through the result. This rank's rows
    are not readable, because changes of the rows would reach only some ranks' gathers.
    """

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return DTensor

    def full_tensor(self, **options: Any) -> Any:
        """Return the parameter's full values, as torch's ``full_tensor`` does. Collective over the
        ranks of the mesh.

        ``StateError`` if the parameter requires a gradient and gradients are enabled: no rank would
        get the gradient of all ranks.
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
    """Let the attribute or method ``name`` of the placeholder class ``to`` act on the user's
    sharded parameter if the placeholder has one.
    """
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
