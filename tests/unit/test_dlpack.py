"""Tests of how the extension reads tensors and arrays, and how it exports memory."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpc import _probe

COMPUTED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CARRIED = [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
WAYS = ["torch", "methods", "any"]


def expect(tensor: torch.Tensor) -> dict:
    name = str(tensor.dtype).removeprefix("torch.")
    return {
        "data": tensor.data_ptr(),
        "dtype": name if tensor.dtype in COMPUTED else "uint8",
        "itemsize": tensor.element_size(),
        "numel": tensor.numel(),
        "shape": tuple(tensor.shape),
        "strides": tuple(tensor.stride()),
        "contiguous": tensor.is_contiguous(),
        "readonly": False,
    }


def look(tensor, how: str) -> dict:
    info = _probe.tensor_info(tensor, how)
    assert info.pop("ns") >= 0
    return info


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", COMPUTED + CARRIED)
def test_view_agrees_with_torch(how, dtype):
    base = torch.arange(24).reshape(4, 6).to(dtype)
    for tensor in (base, base[1:, 2::2], base.t(), base[0, 0], base[:0], base[2:3, 1:2]):
        assert look(tensor, how) == expect(tensor)


@pytest.mark.parametrize("how", WAYS)
def test_parameters_and_gradients(how):
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    (parameter * 2).sum().backward()
    assert look(parameter, how) == expect(parameter)
    assert look(parameter.grad, how) == expect(parameter.grad)
    hidden = parameter * 2  # a tensor with an autograd graph
    assert look(hidden, how) == expect(hidden)


@pytest.mark.parametrize("how", WAYS)
def test_subclasses(how):
    class Marked(torch.Tensor):
        pass

    kinds = [type(f"Kind{i}", (torch.Tensor,), {}) for i in range(8)]  # more than the cache holds
    for kind in [Marked, *kinds, Marked]:
        tensor = torch.ones(2, 3).as_subclass(kind)
        assert look(tensor, how) == expect(tensor.as_subclass(torch.Tensor))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_views(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=5))
    base = torch.empty([2 * n + 1 for n in shape])
    index = tuple(
        slice(data.draw(st.integers(0, 1)), n + 1, data.draw(st.integers(1, 2))) for n in shape
    )
    tensor = base[index]
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for how in WAYS:
        seen = look(tensor, how)
        wanted = expect(tensor)
        if tensor.numel() == 0:
            seen["data"] = wanted["data"] = None
        assert seen == wanted


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: torch.empty(3, device="meta"), "host memory"),
        (lambda: torch.ones(3, 3).to_sparse(), "dense"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: torch.empty([1] * 17), "17 dimensions"),
    ],
)
def test_refused_tensors(how, make, text):
    with pytest.raises(BufferError, match=text):
        _probe.tensor_info(make(), how)


@pytest.mark.parametrize("how", WAYS)
def test_freed_storage_is_refused(how):
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BufferError, match="no memory"):
        _probe.tensor_info(tensor, how)


@pytest.mark.parametrize("how", ["torch", "methods"])
@pytest.mark.parametrize("thing", [None, 3, "text", [1.0], np.ones(3)])
def test_torch_only(how, thing):
    with pytest.raises(TypeError, match="expected a torch.Tensor, not"):
        _probe.tensor_info(thing, how)


@pytest.mark.parametrize("thing", [None, 3, "text", [1.0]])
def test_not_an_array(thing):
    with pytest.raises(TypeError, match="expected a tensor or an array"):
        _probe.tensor_info(thing)


@pytest.mark.parametrize(
    "dtype, name",
    [
        ("f4", "float32"),
        ("f8", "float64"),
        ("f2", "float16"),
        ("i4", "uint8"),
        (">f4", "uint8"),
        ("?", "uint8"),
        ("c8", "uint8"),
    ],
)
def test_numpy(dtype, name):
    base = np.zeros((4, 6), dtype)
    for array in (base, base[::-1, ::2], base.T, base[:0]):
        info = _probe.tensor_info(array)
        assert info["dtype"] == name
        assert info["itemsize"] == array.itemsize
        assert info["shape"] == array.shape
        assert info["strides"] == tuple(s // array.itemsize for s in array.strides)
        assert info["contiguous"] == (array.flags.c_contiguous or array.size == 0)
        assert info["data"] == array.ctypes.data
    base.flags.writeable = False
    assert _probe.tensor_info(base)["readonly"]


def test_bytes_like():
    assert _probe.tensor_info(b"abc")["readonly"]
    info = _probe.tensor_info(memoryview(bytearray(8)).cast("f"))
    assert (info["dtype"], info["numel"], info["readonly"]) == ("float32", 2, False)


def test_odd_strides_are_refused():
    packed = np.zeros(4, np.dtype([("flag", "i1"), ("value", "f4")]))
    with pytest.raises(BufferError, match="whole elements"):
        _probe.tensor_info(packed["value"])


class OnlyDlpack:
    """An array of another library that supports only the DLPack protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self):
        return torch.utils.dlpack.to_dlpack(self.tensor)


def test_foreign_dlpack():
    tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)[:, 1:]
    assert look(OnlyDlpack(tensor), "any") == expect(tensor)


def test_foreign_dlpack_is_released():
    tensor = torch.ones(4)
    count = tensor._use_count()
    for _ in range(50):
        _probe.tensor_info(OnlyDlpack(tensor), "any")
    assert tensor._use_count() == count


def test_bad_capsule():
    class Liar:
        def __dlpack__(self):
            return 7

    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        _probe.tensor_info(Liar())


# --- export ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", COMPUTED)
def test_export_shares_memory(dtype):
    source = torch.arange(6).reshape(2, 3).to(dtype)
    copy = torch.utils.dlpack.from_dlpack(_probe.export_dlpack(source))
    assert (copy.dtype, copy.shape, copy.data_ptr()) == (dtype, source.shape, source.data_ptr())
    copy.mul_(2)
    assert torch.equal(copy, source)


def test_export_of_other_types_is_bytes():
    source = torch.tensor([1, 2], dtype=torch.int32)
    shared = torch.utils.dlpack.from_dlpack(_probe.export_dlpack(source))
    assert shared.dtype == torch.uint8
    assert shared.view(torch.int32).tolist() == [1, 2]


def test_export_needs_contiguous():
    with pytest.raises(ValueError, match="not contiguous"):
        _probe.export_dlpack(torch.ones(3, 3).t())


def test_export_keeps_the_owner_alive():
    source = np.full(1000, 7.0, np.float32)
    gone = weakref.ref(source)
    shared = torch.utils.dlpack.from_dlpack(_probe.export_dlpack(source))
    part = shared[10:20]
    del source, shared
    gc.collect()
    assert gone() is not None and part.sum().item() == 70.0
    del part
    gc.collect()
    assert gone() is None


def test_unused_capsule_frees_the_owner():
    source = np.ones(4, np.float32)
    gone = weakref.ref(source)
    capsule = _probe.export_dlpack(source)
    del source
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None


def test_export_dropped_on_another_thread():
    source = np.ones(4, np.float32)
    gone = weakref.ref(source)
    held = [torch.utils.dlpack.from_dlpack(_probe.export_dlpack(source))]
    del source
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(10)
    gc.collect()
    assert gone() is None


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: _probe.tensor_info(),
            TypeError,
            r"tensor_info\(\) missing required argument 'tensor' \(pos 1\)",
        ),
        (
            lambda: _probe.tensor_info(1, 2, 3, 4),
            TypeError,
            r"tensor_info\(\) takes at most 3 positional arguments \(4 given\)",
        ),
        (
            lambda: _probe.tensor_info(b"", hwo=1),
            TypeError,
            r"tensor_info\(\) got an unexpected keyword argument 'hwo'",
        ),
        (
            lambda: _probe.tensor_info(b"", tensor=b""),
            TypeError,
            r"tensor_info\(\) got multiple values for argument 'tensor'",
        ),
        (
            lambda: _probe.tensor_info(b"", 5),
            TypeError,
            r"tensor_info\(\) argument 'how' must be str, not int",
        ),
        (lambda: _probe.tensor_info(b"", "a\0b"), ValueError, "embedded null character"),
        (
            lambda: _probe.tensor_info(b"", repeat=1.5),
            TypeError,
            r"tensor_info\(\) argument 'repeat' must be int, not float",
        ),
        (lambda: _probe.tensor_info(b"", repeat=2**63), OverflowError, "greater than maximum"),
        (lambda: _probe.tensor_info(b"", repeat=-(2**63) - 1), OverflowError, "less than minimum"),
        (lambda: _probe.tensor_info(b"", "nohow"), ValueError, "'nohow'"),
        (lambda: _probe.export_dlpack(), TypeError, "missing required argument 'array'"),
        (
            lambda: _probe.export_dlpack(b"", 1),
            TypeError,
            r"export_dlpack\(\) takes exactly 1 positional argument \(2 given\)",
        ),
    ],
)
def test_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_index_is_an_int():
    class Three:
        def __index__(self):
            return 3

    assert _probe.tensor_info(b"abc", repeat=Three())["numel"] == 3
