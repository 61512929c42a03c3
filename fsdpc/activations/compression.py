"""What autograd saves for backward, kept in fewer bits."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from fsdpc import _C
from fsdpc._companions.saved import BLOCK
from fsdpc._engine.device import kernel_ordinal
from fsdpc._engine.marks import hosts
from fsdpc._engine.released import ReleasedParameter
from fsdpc._engine.unit import UNITS
from fsdpc._engine.writeback import owner_of

MIN_BYTES = 4096
# Functions whose backward multiplies by what they saved, reads its sign, or puts it through a
# smooth function of bounded slope: gradients are off by as much as the values. Whatever else is
# saved stays exact, because its backward may compare it with a limit (clamp, maximum, max), divide
# by it (log, division, norms), put it through an exponential (attention, softmax), or compute again
# from it (checkpoint, functions of the user's own).
_PRODUCTS = (
    "linear bilinear matmul mm bmm mv dot inner outer addmm addbmm baddbmm addmv addr einsum "
    "tensordot grouped_mm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
_ELEMENTWISE = (
    "mul multiply addcmul lerp square pow var abs exp expm1 tanh sigmoid erf relu leaky_relu prelu "
    "elu selu celu gelu silu mish glu softplus logsigmoid dropout dropout1d dropout2d dropout3d "
    "alpha_dropout feature_alpha_dropout max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d"
)
_NORMS = "layer_norm rms_norm group_norm batch_norm instance_norm"


def _functions(names: str) -> set[Any]:
    """torch's functions, methods and operators of these names, and their in-place forms."""
    forms = [form for name in names.split() for form in (name, f"{name}_", f"__{name}__")]
    places = (torch, Tensor, torch.nn.functional)
    return {getattr(place, form) for place in places for form in forms if hasattr(place, form)}


_NORM_FUNCTIONS = _functions(_NORMS)
_FACTORS = _functions("mul multiply addcmul lerp")
_POWERS = _functions("pow")
_BOUNDED = _functions(f"{_PRODUCTS} {_ELEMENTWISE}") | _NORM_FUNCTIONS


@contextmanager
def compress(model: nn.Module, dtype: str = "int8", min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Compress the tensors that autograd saves inside the ``with`` block, for ``model``'s forward.

    ``dtype``: "int8", 1.016 bytes per element: one byte each and a float32 scale (absmax) per 256
    elements; a value comes back within absmax / 252 and one rounding to its dtype, with its sign,
    and only zero as zero. "bf16": 2 bytes for float32 tensors; others stay.

    Compressed are values of float32, bfloat16 and float16 on the host and on CUDA GPUs (by kernels
    on torch's current stream) that matrix products, convolutions, recurrent layers, products,
    smooth activations, ReLU and its like, dropout, pooling and norms save. Kept as they are:
    what all other functions save (attention, softmax, losses, clamp, division and so on), inputs of
    checkpointed blocks, from which they are computed again, what autograd functions of your own and
    compiled code save; integers, masks, factors without a gradient, tensors below ``min_bytes``,
    statistics of norms (a last dimension of 1), parameters and buffers, and gathered parameters of
    FSDP units.

    A tensor that is saved several times, also as a view, is compressed once, and memory is freed
    when nothing else holds the original.

    Gradients are those of the compressed values: see docs/activations.md for measured errors. A
    block with a value that is not finite comes back as NaN. Local. ``ValueError``: another dtype.
    ``RuntimeError`` in backward: a parameter was changed in place after it was saved.
    """
    if dtype not in ("int8", "bf16"):
        raise ValueError(f"dtype must be 'int8' or 'bf16', got {dtype!r}")
    table = _Compressed(model, dtype, min_bytes)
    with saved_tensors_hooks(table.pack, unpack), _Functions(table):
        yield


class _Functions(TorchFunctionMode):
    """Tells the table which function saves. Separate hooks around every other function would hide
    the function's tensors from a checkpoint around it.
    """

    def __init__(self, table: _Compressed) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _BOUNDED or _needs_exact(function, args, kwargs):
            return function(*args, **kwargs)
        table = self.table
        before, table.fewest = table.fewest, 0
        if function in _NORM_FUNCTIONS:  # tensors smaller than the input are statistics
            given = args[0] if args else kwargs.get("input")
            table.fewest = given.numel() if isinstance(given, Tensor) else 0
        try:
            return function(*args, **kwargs)
        finally:
            table.fewest = before


def _needs_exact(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True for factors without a gradient, which are masks and tables, and for powers below 1."""
    if function in _FACTORS:
        given = (*args, *kwargs.values())
        return any(isinstance(each, Tensor) and not each.requires_grad for each in given)
    if function in _POWERS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent", kwargs.get("other"))
        return not (isinstance(exponent, (int, float)) and exponent >= 1)
    return False


class Kept:
    """A tensor that stays as it is, with torch's check for changes in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


class _Packed:
    """The elements of a contiguous tensor, compressed."""

    def __init__(self, whole: Tensor, dtype: str) -> None:
        self.dtype = whole.dtype
        if dtype == "bf16":
            self.low = whole.to(torch.bfloat16)
            return
        self.low = torch.empty(whole.numel(), dtype=torch.int8, device=whole.device)
        self.scales = torch.empty(-(-whole.numel() // BLOCK), device=whole.device)
        _C.activation_pack(whole, self.low, self.scales, kernel_ordinal(whole))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed values and their scales."""
        return sum(t.nbytes for t in (self.low, getattr(self, "scales", None)) if t is not None)

    def unpack(self) -> Tensor:
        if self.low.dtype == torch.bfloat16:
            return self.low.to(self.dtype)
        whole = torch.empty(self.low.numel(), dtype=self.dtype, device=self.low.device)
        _C.activation_unpack(whole, self.low, self.scales, kernel_ordinal(whole))
        return whole


class View:
    """A saved tensor over elements that are held in another form."""

    def __init__(self, held: Any, shape: torch.Size, strides: tuple[int, ...]) -> None:
        self.held = held
        self.shape = shape
        self.strides = strides

    def unpack(self) -> Tensor:
        return self.held.unpack().as_strided(self.shape, self.strides)


def unpack(saved: Any) -> Tensor:
    """torch's unpack hook for what ``Table.pack`` has returned."""
    return saved.unpack()


class Table:
    """What is held in another form: by storage, place in it, dtype and version. A weak reference to
    a storage keeps its address from being another storage's.
    """

    view = View

    def __init__(self, model: nn.Module, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.known: dict[Any, tuple[StorageWeakRef, int, Any]] = {}
        self.model = model
        self.ranges, self.complete = own_ranges(model)

    def pack(self, tensor: Tensor) -> Any:
        """torch's pack hook."""
        if not self._is_wanted(tensor):
            return Kept(tensor)
        reference = StorageWeakRef(tensor.untyped_storage())
        dense = is_dense(tensor)
        place = tensor.numel() if dense else (tensor.shape, tensor.stride())
        key = (reference.cdata, tensor.dtype, tensor.storage_offset(), place)
        _, version, entry = self.known.get(key, (None, -1, lambda: None))
        held = entry()
        if held is None or version != tensor._version:
            held = self._hold(tensor, dense)
            if held is None:
                return Kept(tensor)
            self.known[key] = (reference, tensor._version, weakref.ref(held))
        return self.view(held, tensor.shape, tensor.stride() if dense else _row_major(tensor.shape))

    def _is_wanted(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not has_memory(tensor) or tensor.is_neg():
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self.min_bytes or nbytes > tensor.untyped_storage().nbytes():  # or expanded
            return False
        if not self.complete:
            self.ranges, self.complete = own_ranges(self.model)
        address = tensor.data_ptr()
        return not any(begin <= address < end for begin, end in self.ranges)

    def _hold(self, tensor: Tensor, dense: bool) -> Any:
        """The elements in the other form; None: autograd keeps the tensor as it is."""
        raise NotImplementedError


class _Compressed(Table):
    def __init__(self, model: nn.Module, dtype: str, min_bytes: int) -> None:
        super().__init__(model, min_bytes)
        self.fewest: int | None = None  # elements of a tensor to pack; None: pack none
        self.dtype = dtype

    def _is_wanted(self, tensor: Tensor) -> bool:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        if self.fewest is None or tensor.dtype not in floats:
            return False
        if self.dtype == "bf16" and tensor.dtype != torch.float32:
            return False
        if tensor.device.type not in ("cpu", "cuda") or tensor.shape[-1:] == (1,):
            return False
        return tensor.numel() >= self.fewest and super()._is_wanted(tensor)

    def _hold(self, tensor: Tensor, dense: bool) -> _Packed:
        return _Packed(flat(tensor, dense), self.dtype)


def own_ranges(model: nn.Module) -> tuple[list[tuple[int, int]], bool]:
    """Addresses of the model's parameters, gathered or not, and buffers, and whether they are
    final: on a GPU gathered parameters have no address before the first forward. ``model`` may be
    what a unit wraps, or a part of that.
    """
    placed = [each for module in model.modules() for each in vars(module).values()]
    own = [*model.parameters(), *model.buffers(), *placed]
    units = {*(host._unit for host in hosts(model)), *map(owner_of, model.parameters())}
    released = {id(each) for each in placed if isinstance(each, ReleasedParameter)}
    if released:
        of = ((unit, getattr(unit, "released", ())) for unit in UNITS)
        units |= {unit for unit, each in of if not released.isdisjoint(map(id, each))}
    units.discard(None)
    own += [full for unit in units for full in unit.full]
    ranges = sorted(_range(tensor) for tensor in own if has_memory(tensor))
    return ranges, all(unit.tree is not None for unit in units)


def is_dense(tensor: Tensor) -> bool:
    """True if the tensor's elements are a range of its storage, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor, dense: bool) -> Tensor:
    """The elements in the order of memory; row-major if other elements lie between them."""
    tensor = tensor.detach()
    if not dense:
        return tensor.contiguous().view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def has_memory(tensor: Any) -> bool:
    """True for a plain, strided tensor with elements."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _range(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
