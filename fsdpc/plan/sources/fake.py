"""Fake tensors for a user's program: shapes and dtypes without bytes, on one device.

A user's function that builds a model runs here without changes: conversions, other devices and the
meta device work. Small tensors whose values programs read (ids, sizes, schedules) have values. The
values of all other tensors are not known, and a read of them raises.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fsdpc._torch import TorchDispatchMode, TorchFunctionMode, fake_tensors, tree_leaves

aten = torch.ops.aten
SMALL = 1 << 16  # a tensor with more elements than this has no values
PROBED = 1 << 28  # rough limit of the bytes of real tensors when a kernel's workspace is measured
_COUNTING = {aten.arange, aten.linspace, aten.logspace, aten.scalar_tensor}
_FILLED = {aten.zeros, aten.ones, aten.full, aten.randint, aten.randperm, aten.empty}


@contextmanager
def faking() -> Iterator[None]:
    """Run the body on fake tensors, and on one device, whatever devices the program names."""
    log = logging.getLogger(fake_tensors().__name__)  # torch logs tracebacks of failures there
    level, moved = log.level, _Conversions()
    with ExitStack() as stack:
        stack.enter_context(fake_tensors().FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Values())
        stack.enter_context(_OneDevice())
        stack.enter_context(mock.patch.object(nn.Module, "_apply", moved.apply))
        stack.enter_context(mock.patch.object(nn.init, "trunc_normal_", lambda t, *a, **k: t))
        stack.enter_context(mock.patch.object(torch, "compile", _not_compiled))
        kind = fake_tensors().FakeTensor
        stack.enter_context(mock.patch.object(kind, "__new__", _made_anew(kind.__new__)))
        stack.callback(log.setLevel, level)
        log.setLevel(logging.CRITICAL + 1)
        yield


def _made_anew(new: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``__new__`` that also supports ``type(parameter)(values, **vars(parameter))``, with
    which libraries move a parameter to the meta device (accelerate's ``init_empty_weights``).
    """

    def __new__(cls: type, first: Any = None, *args: Any, **state: Any) -> Tensor:
        if isinstance(first, Tensor):
            return nn.Parameter(first, requires_grad=bool(state.get("requires_grad")))
        return new(cls, first, *args, **state)

    return __new__


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return (lambda found: found) if model is None else model


class _Conversions:
    """The implementation of ``Module.to`` and similar methods. Fake parameters cannot change in
    place, so new tensors replace them in modules. A parameter that several modules share is
    replaced by one new parameter.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def apply(self) -> Callable[..., nn.Module]:
        def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
            for child in module.children() if recurse else ():
                child._apply(fn)
            for entries in (module._parameters, module._buffers):
                for name, tensor in entries.items():
                    if tensor is not None:
                        entries[name] = self._converted(tensor, fn)  # type: ignore[assignment]
            return module

        return _apply

    def _converted(self, tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        now = self._latest.get(id(tensor), (tensor, tensor))[1]
        with torch.no_grad():
            new = fn(now)
        if new is not now:
            new = _like(now, new)
            self._latest[id(tensor)] = (
                tensor,
                new,
            )  # keep the old tensor alive, so that its id is not used again
        return new


def _like(old: Tensor, new: Tensor) -> Tensor:
    """Return ``new`` as a parameter if ``old`` is one, and with the attributes of ``old``."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    return new


def settle(module: nn.Module) -> None:
    """Replace parameters and buffers until each is a fake tensor with a storage that can be
    identified. Before this call, small parameters and buffers may be real tensors with values, and
    a copied fake tensor gives a new storage object at each read.
    """
    done: dict[int, Tensor] = {}
    for child in module.modules():
        for entries in (child._parameters, child._buffers):
            for name, tensor in entries.items():
                if tensor is not None and not _is_settled(tensor):
                    if id(tensor) not in done:
                        fresh = torch.empty_strided(
                            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                        )
                        done[id(tensor)] = _like(tensor, fresh)
                    entries[name] = done[id(tensor)]  # type: ignore[assignment]


def _is_settled(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    return is_fake(tensor) and tensor.untyped_storage() is tensor.detach().untyped_storage()


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, fake_tensors().FakeTensor)


class _OneDevice(TorchFunctionMode):
    """Replaces the devices that a program names by the CPU, so that all tensors are there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        # Only `to` takes a device by name or number. Elsewhere, texts and numbers are not devices.
        kinds = (str, int, torch.device) if func is Tensor.to else (torch.device,)
        devices = (isinstance(a, kinds) and not isinstance(a, bool) for a in args)
        args = [torch.device("cpu") if d else a for d, a in zip(devices, args, strict=True)]
        return func(*args, **kwargs)


class _Values(TorchDispatchMode):
    """Gives values to small results of the operators in ``_COUNTING``, to small new tensors of
    integers, and to small tensors that are computed from these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if self._has_values(func, tensors, args, kwargs):
            with fake_tensors().unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten.rand.default and torch.Size(args[0]).numel() == 1:
            args, kwargs = (args[0], 1 - 2**-24), {"dtype": torch.float32}
            with fake_tensors().unset_fake_temporarily():  # so that LayerDrop drops no layer
                return aten.full.default(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(func, args)
        special = _KERNELS.get(func)
        return special(self, func, args, kwargs) if special else func(*args, **kwargs)

    def _has_values(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        packet = func._overloadpacket
        if tensors:
            if not all(_is_known(t) for t in tensors):
                return False
            widest = torch.broadcast_shapes(*(t.shape for t in tensors)) if _grows(tensors) else ()
            return torch.Size(widest).numel() <= SMALL
        if packet in _COUNTING:
            return not args or not isinstance(args[0], int) or abs(args[0]) <= SMALL
        dtype = kwargs.get("dtype")
        if packet not in _FILLED or dtype is None or dtype.is_floating_point or dtype.is_complex:
            return False
        size = next((a for a in args if isinstance(a, (list, tuple))), ())
        return torch.Size(size).numel() <= SMALL

    def _forget(self, func: Any, args: Any) -> None:
        """Mark the real tensors that ``func`` writes to: their values are unknown from now on."""
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and not is_fake(value):
                value._fsdpc_unknown = True  # type: ignore[attr-defined]


def _is_known(tensor: Tensor) -> bool:
    small = tensor.numel() <= SMALL and not getattr(tensor, "_fsdpc_unknown", False)
    return small and not is_fake(tensor) and tensor.device.type == "cpu"


def _grows(tensors: list[Tensor]) -> bool:
    try:
        torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return False
    return len(tensors) > 1


# --- kernels of which torch's own shapes are not those of a run -----------------------------------


def _grouped_mm(values: _Values, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result's shape for every dtype; torch computes the shape for bfloat16 only."""
    a, b, offsets = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = a.shape[-2], b.shape[-1]
    shape = [rows, columns] if a.dim() != b.dim() else [a.shape[0], rows, columns]
    if a.dim() == b.dim() == 2:
        shape = [offsets.shape[0], rows, columns]
    per_16_bytes = 16 // a.element_size()
    padded = -(-columns // per_16_bytes) * per_16_bytes
    strides = [rows * padded, padded, 1][-len(shape) :]
    return torch.empty_strided(
        shape, strides, dtype=kwargs.get("out_dtype") or a.dtype, device=a.device
    )


def _rnn_layer(values: _Values, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results with a workspace of the right size. Only the kernel knows this size, so
    the kernel runs once for each shape. If the tensors would be large, the kernel runs with a part
    of the batch, because the workspace is proportional to the batch.
    """
    out = func(*args, **kwargs)
    x, hidden = args[0], args[9]
    batch = x.shape[1]
    part = max(1, min(batch, PROBED // (64 * max(1, x.shape[0] * hidden))))
    key = str((x.shape, x.dtype, args[8:]))
    if key not in values._workspaces:

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = [part if n == batch and value.dim() == 3 else n for n in value.shape]
            return torch.zeros(shape, dtype=value.dtype, device="cpu")

        with fake_tensors().unset_fake_temporarily():
            there = func(*[real(value) for value in args], **kwargs)[3]
        values._workspaces[key] = -(-there.untyped_storage().nbytes() * batch // part)
    return (*out[:3], torch.empty(values._workspaces[key], dtype=torch.uint8, device=x.device))


_KERNELS: dict[Any, Callable[..., Any]] = {
    getattr(aten, packet).default: kernel
    for packet, kernel in (("_grouped_mm", _grouped_mm), ("mkldnn_rnn_layer", _rnn_layer))
    if hasattr(aten, packet)
}


# --- errors ---------------------------------------------------------------------------------------


def sentence(error: BaseException) -> str:
    """Return an error of a user's program as one line of text, with the place in the program."""
    text = " ".join(str(error).split())[:200]
    reads = type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")
    if reads:
        text += ": the program reads values of a tensor, and a plan knows shapes alone"
    if "UninitializedParameter" in text:
        text = "a lazy module's parameters have no shapes before its first forward: give it sizes"
    said = f"{type(error).__name__}{': ' if text else ''}{text}"
    return f"{said} ({_line_of(error)})"


def _line_of(error: BaseException) -> str:
    """Return the last line of the traceback that is not in torch, Python or fsdpc. If there is
    none, return the last line in a library.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own, python = str(Path(__file__).parents[2]), str(Path(logging.__file__).parents[1])
    packages = str(Path(torch.__file__).parents[1])
    outside = [f for f in frames if not f.filename.startswith((own, python, packages, "<"))]
    library = [
        f for f in frames if not f.filename.startswith((own, str(Path(torch.__file__).parent)))
    ]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    found = (outside or library or frames)[-1:]
    return f"{Path(found[0].filename).name}:{found[0].lineno}" if found else sys.argv[0]
