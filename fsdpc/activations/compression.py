"""Compression of the tensors that autograd saves for backward."""

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
# Functions whose backward multiplies by the saved values, reads their signs, or puts them through a
# smooth function of bounded slope. The errors of their gradients are as small as the errors of the
# saved values. What other functions save stays exact, because their backward may compare the values
# with a limit (clamp, maximum, max), divide by them (log, division, norms), put them through an
# exponential (attention, softmax), or compute again from them (checkpoint, custom functions).
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
    """Return torch's functions, methods and operators of these names and their in-place forms."""
    forms = [form for name in names.split() for form in (name, f"{name}_", f"__{name}__")]
    places = (torch, Tensor, torch.nn.functional)
    return {getattr(place, form) for place in places for form in forms if hasattr(place, form)}


_NORM_FUNCTIONS = _functions(_NORMS)
_FACTORS = _functions("mul multiply addcmul lerp")
_POWERS = _functions("pow")
_BOUNDED = _functions(f"{_PRODUCTS} {_ELEMENTWISE}") | _NORM_FUNCTIONS


@contextmanager
def compress(model: nn.Module, dtype: str = "int8", min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Compress what autograd saves for backward while ``model`` runs in the ``with`` block.

    ``dtype="int8"`` stores 1.016 bytes per element: one byte for each element and a float32 scale
    (absmax) for each block of 256 elements. A value comes back within absmax / 252 plus one
    rounding to its dtype. It keeps its sign, and only zero comes back as zero. ``dtype="bf16"``
    stores 2 bytes per element of a float32 tensor and does not compress tensors of other dtypes.

    Tensors of float32, bfloat16 and float16, on the host and on CUDA GPUs, are compressed (by
    kernels on torch's current stream) if matrix products, convolutions, recurrent layers,
    elementwise products, smooth activations, ReLU and similar activations, dropout, pooling or
    norms save them. These tensors are not compressed: what all other functions save (attention,
    softmax, losses, clamp, division and so on); inputs of checkpointed blocks, from which the
    blocks are computed again; what custom autograd functions and compiled code save; integers,
    masks, factors without a gradient, tensors below ``min_bytes``, statistics of norms (tensors
    whose last dimension is 1), parameters, buffers, and gathered parameters of FSDP units.

    A tensor that is saved several times, also as a view, is compressed once. The memory of the
    original is freed when nothing else refers to the original.

    Gradients are computed from the compressed values; docs/activations.md has measured errors. With
    "int8", a block that contains a value that is not finite comes back as NaN. Local. Raises
    ``ValueError`` if ``dtype`` is neither of the two, and ``RuntimeError`` in backward if a saved
    tensor that is not compressed, such as a parameter, was changed in place.
    """
    if dtype not in ("int8", "bf16"):
        raise ValueError(f"dtype must be 'int8' or 'bf16', got {dtype!r}")
    table = _Compressed(model, dtype, min_bytes)
    with saved_tensors_hooks(table.pack, unpack), _Functions(table):
        yield


class _Functions(TorchFunctionMode):
    """A function mode that lets the table compress tensors only while a function of ``_BOUNDED``
    runs. The mode does not set separate hooks around the other functions, because such hooks would
    hide the tensors of a function from a checkpoint around the function.
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
        if function in _NORM_FUNCTIONS:
            # A norm also saves statistics, which are smaller than its input. They stay exact.
            given = args[0] if args else kwargs.get("input")
            table.fewest = given.numel() if isinstance(given, Tensor) else 0
        try:
            return function(*args, **kwargs)
        finally:
            table.fewest = before


def _needs_exact(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True for a product with a factor that needs no gradient (a mask or a table), and for a
    power whose exponent is not a number of at least 1.
    """
    if function in _FACTORS:
        given = (*args, *kwargs.values())
        return any(isinstance(each, Tensor) and not each.requires_grad for each in given)
    if function in _POWERS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent", kwargs.get("other"))
        return not (isinstance(exponent, (int, float)) and exponent >= 1)
    return False


class Kept:
    """A saved tensor that stays as it is. ``unpack`` raises, as torch does, if the tensor was
    changed in place.
    """

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
    """The compressed elements of a contiguous tensor."""

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
        """Return the number of bytes of the packed values and their scales."""
        return sum(t.nbytes for t in (self.low, getattr(self, "scales", None)) if t is not None)

    def unpack(self) -> Tensor:
        if self.low.dtype == torch.bfloat16:
            return self.low.to(self.dtype)
        whole = torch.empty(self.low.numel(), dtype=self.dtype, device=self.low.device)
        _C.activation_unpack(whole, self.low, self.scales, kernel_ordinal(whole))
        return whole


class View:
    """A saved tensor whose elements are stored in another form: compressed or offloaded."""

    def __init__(self, held: Any, shape: torch.Size, strides: tuple[int, ...]) -> None:
        self.held = held
        self.shape = shape
        self.strides = strides

    def unpack(self) -> Tensor:
        return self.held.unpack().as_strided(self.shape, self.strides)


def unpack(saved: Any) -> Tensor:
    """Return the tensor whose packed form is ``saved``. torch calls this as the unpack hook."""
    return saved.unpack()


class Table:
    """A table of the saved tensors that are compressed or offloaded. An entry is found by the
    tensor's storage, position in the storage, dtype and version. The table has a weak reference to
    each storage, so that no other storage gets the same address.
    """

    view = View

    def __init__(self, model: nn.Module, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.known: dict[Any, tuple[StorageWeakRef, int, Any]] = {}
        self.model = model
        self.ranges, self.complete = own_ranges(model)

    def pack(self, tensor: Tensor) -> Any:
        """Return the packed form of ``tensor``. torch calls this as the pack hook."""
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
        """Return the tensor's elements, compressed or offloaded. Return None if autograd keeps the
        tensor as it is.
        """
        raise NotImplementedError


class _Compressed(Table):
    def __init__(self, model: nn.Module, dtype: str, min_bytes: int) -> None:
        super().__init__(model, min_bytes)
        # Tensors with at least this many elements are compressed. None: no tensor is compressed.
        self.fewest: int | None = None
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
    """Return the address ranges of the model's buffers and parameters (sharded and gathered), and
    whether the ranges are final: on a GPU, gathered parameters have no address before the first
    forward. ``model`` may be the module that a unit wraps, or a submodule of that module.
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
    """Return True if the elements fill one range of the storage, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor, dense: bool) -> Tensor:
    """Return the elements as a 1-D tensor. This is a view in memory order if the tensor is
    ``dense``, else a copy in row-major order.
    """
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
    """Return True for a plain, strided tensor that has elements and is not on the meta device."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _range(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
