"""Tests of the kernels against torch and NumPy, bit for bit, with every kernel table that this
processor can run.

Values of bfloat16 and float16 are passed in uint16 arrays. A NaN only has to stay a NaN with the
same sign, because torch's own conversions differ from each other in the payloads of NaNs.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fsdpc import _probe

TABLES = _probe.kernel_names()
FLOATS = ["float32", "bfloat16", "float16", "float64"]
STORAGE = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float64": np.float64,
}
ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float64": 64}
SIZES = [0, 1, 7, 16, 33, 1000, 4099]
BIG = (1 << 16) + 5
STREAMED = (1 << 23) + 5  # with so many elements of any type, stores bypass the caches


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Keeps torch's helper threads from spinning between torch's small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor of the named dtype in the memory of an array."""
    tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return tensor.view(getattr(torch, dtype))


def numbers(n: int, dtype: str, seed: int = 0, finite: bool = False) -> np.ndarray:
    """Return ordinary numbers. Unless `finite`, two thirds of them become random bit patterns and
    special values."""
    return fixed_numbers(n, dtype, seed, finite).copy()


@functools.lru_cache(maxsize=64)
def fixed_numbers(n: int, dtype: str, seed: int, finite: bool) -> np.ndarray:
    """The values of `numbers`, made once for all callers."""
    rng = np.random.default_rng(seed)
    ordinary = rng.standard_normal(n, dtype=np.float32)
    values = torch.from_numpy(ordinary).to(getattr(torch, dtype))
    bits = values.view(torch.int16) if ITEM_BITS[dtype] == 16 else values
    array = bits.numpy().view(STORAGE[dtype]).copy()
    if finite:
        return array
    patterns = np.frombuffer(rng.bytes(array.nbytes), dtype=array.dtype)
    array[1::3] = patterns[1::3]
    specials = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504, 65519.9, 65520, 2**-24, 2**-25]
        + [2**-133, -(2**-149), 3.39e38, -3.4e38],
        dtype=torch.float64,
    ).to(getattr(torch, dtype))
    specials = specials.view(torch.int16) if ITEM_BITS[dtype] == 16 else specials
    array[2::3] = np.resize(specials.numpy().view(STORAGE[dtype]), array[2::3].shape)
    return array


def assert_same(got: np.ndarray, want: torch.Tensor, dtype: str) -> None:
    """Compare bit patterns. Where `want` is a NaN, `got` must be a NaN, too."""
    tensor = as_torch(got, dtype)
    nan = want.isnan()
    assert torch.equal(tensor.isnan(), nan)
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[ITEM_BITS[dtype]]
    assert torch.equal(tensor.view(kind)[~nan], want.contiguous().view(kind)[~nan])


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(FLOATS, FLOATS)))
def test_cast_is_torchs(src: str, dst: str, kernels: str) -> None:
    for n in [*SIZES, BIG]:
        array = numbers(n, src, seed=n)
        out = np.empty(n, STORAGE[dst])
        _probe.kernel_cast(out, dst, array, src, 1.0, kernels)
        assert_same(out, as_torch(array, src).to(getattr(torch, dst)), dst)


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("dst", FLOATS)
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_cast_of_every_16_bit_pattern(src: str, dst: str, kernels: str) -> None:
    array = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, STORAGE[dst])
    _probe.kernel_cast(out, dst, array, src, 1.0, kernels)
    assert_same(out, as_torch(array, src).to(getattr(torch, dst)), dst)


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_cast_of_millions_of_patterns(dst: str, kernels: str) -> None:
    rng = np.random.default_rng(5)
    array = rng.integers(0, 2**32, 3_000_000, dtype=np.uint32)
    array[::2] &= 0xFFFF8000  # a bfloat16 value, or halfway between two of them
    array[1::4] &= 0xFFFFF000  # the same for float16
    array = array.view(np.float32)
    out = np.empty(array.size, np.uint16)
    _probe.kernel_cast(out, dst, array, "float32", 1.0, kernels)
    assert_same(out, torch.from_numpy(array).to(getattr(torch, dst)), dst)


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_nan_keeps_its_sign_and_becomes_quiet(dst: str, kernels: str) -> None:
    quiet = {"bfloat16": 0x7FC0, "float16": 0x7E00}[dst]
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000] * 5, dtype=np.uint32)
    out = np.empty(bits.size, np.uint16)
    _probe.kernel_cast(out, dst, bits.view(np.float32), "float32", 1.0, kernels)
    assert np.all(out & quiet == quiet)
    assert np.array_equal(out >> 15, bits >> 31)


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(FLOATS[:3], FLOATS[:3])))
def test_cast_scales_in_float32(src: str, dst: str, kernels: str) -> None:
    array = numbers(1003, src, seed=3)
    out = np.empty(1003, STORAGE[dst])
    for scale in (0.5, 1 / 3, -65536.0):
        _probe.kernel_cast(out, dst, array, src, scale, kernels)
        scaled = as_torch(array, src).float() * torch.tensor(scale, dtype=torch.float32)
        assert_same(out, scaled.to(getattr(torch, dst)), dst)


@pytest.mark.parametrize("kernels", TABLES)
def test_copy_keeps_every_bit(kernels: str) -> None:
    for n in (5, 4099, 4 * STREAMED):
        data = np.frombuffer(np.random.default_rng(n).bytes(n), np.uint8)
        out = np.zeros(n + 3, np.uint8)
        _probe.kernel_cast(out[2:-1], "uint8", data, "uint8", 1.0, kernels)
        assert np.array_equal(out[2:-1], data)
        assert out[:2].tolist() == [0, 0] and out[-1] == 0


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("acc", ["float32", "float64"])
def test_accumulate_is_torchs(acc: str, src: str, kernels: str) -> None:
    wide = getattr(torch, acc)
    for n, scale in itertools.product([*SIZES, BIG], (1.0, 0.3)):
        array = numbers(n, src, seed=n + 1)
        out = numbers(n, acc, seed=n + 2)
        term = as_torch(array, src).to(wide) * torch.tensor(scale, dtype=wide)
        want = torch.from_numpy(out.copy()) + term
        _probe.kernel_accumulate(out, acc, array, src, scale, kernels)
        assert_same(out, want, acc)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
def test_reduce_is_torchs_sum_in_list_order(count: int, src: str, kernels: str, add: bool) -> None:
    acc = "float64" if src == "float64" else "float32"
    wide = getattr(torch, acc)
    for n, scale in [(0, 1.0), (33, 1.0), (4099, 0.3), (BIG, 0.5)]:
        arrays = [numbers(n, src, seed=s) for s in range(count)]
        out = numbers(n, acc, seed=77)
        want = torch.zeros(n, dtype=wide)
        for s, array in enumerate(arrays):
            term = as_torch(array, src).to(wide)
            want = want + term if s else term
        want = want * torch.tensor(scale, dtype=wide)
        want = torch.from_numpy(out.copy()) + want if add else want
        sources = [arrays[0], None, *arrays[1:]] if count else [None]
        _probe.kernel_reduce(out, acc, sources, src, scale, add, kernels)
        assert_same(out, want, acc)


@pytest.mark.long
@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_destinations_beyond_the_caches(narrow: str, kernels: str) -> None:
    kind = getattr(torch, narrow)
    wide, other = (numbers(STREAMED, "float32", seed=s) for s in (1, 2))
    out = np.empty(STREAMED + 1, np.uint16)[1:]
    _probe.kernel_cast(out, narrow, wide, "float32", 1.0, kernels)
    assert_same(out, torch.from_numpy(wide).to(kind), narrow)
    back = np.empty(STREAMED + 3, np.float32)[3:]
    _probe.kernel_cast(back, "float32", out, narrow, 1.0, kernels)
    assert_same(back, as_torch(out, narrow).float(), "float32")
    want = (torch.from_numpy(wide) + torch.from_numpy(other)) * 0.5
    _probe.kernel_reduce(back, "float32", [wide, other], "float32", 0.5, False, kernels)
    assert_same(back, want, "float32")
    _probe.kernel_reduce(other, "float32", [wide, other], "float32", 0.5, False, kernels)
    assert_same(other, want, "float32")


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm(dtype: str, kernels: str) -> None:
    for n in [*SIZES, BIG]:
        array = numbers(n, dtype, seed=n, finite=True)
        wide = as_torch(array, dtype).double()
        total, largest, nonfinite = _probe.kernel_norm2(array, dtype, kernels)
        assert total == pytest.approx((wide * wide).sum().item(), rel=1e-10)
        assert largest == (wide.abs().max().item() if n else 0.0)
        assert nonfinite is False


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, 17, 1002])
def test_norm_reports_what_is_not_finite(at: int, dtype: str, kernels: str) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        array = numbers(1003, dtype, finite=True)
        as_torch(array, dtype)[at] = bad
        total, largest, nonfinite = _probe.kernel_norm2(array, dtype, kernels)
        assert nonfinite is True
        assert str(total) == str(largest) == ("nan" if bad != bad else "inf")


@pytest.mark.parametrize("kernels", TABLES)
def test_norm_does_not_overflow(kernels: str) -> None:
    array = np.full(100, 3e38, np.float32)
    total, _, nonfinite = _probe.kernel_norm2(array, "float32", kernels)
    assert total == pytest.approx(100 * float(np.float32(3e38)) ** 2, rel=1e-12)
    assert nonfinite is False


def test_threads_change_no_bit() -> None:
    before = _probe.get_num_threads()
    sources = [numbers(BIG, "bfloat16", seed=s) for s in range(3)]
    plain = numbers(BIG, "float32", seed=9, finite=True)
    results = []
    try:
        for threads in (1, 2, 4):
            _probe.set_num_threads(threads)
            assert _probe.get_num_threads() == threads
            out, narrow = np.empty(BIG, np.float32), np.empty(BIG, np.uint16)
            _probe.kernel_reduce(out, "float32", sources, "bfloat16", 0.3)
            _probe.kernel_cast(narrow, "float16", plain, "float32", 3.0)
            norm = _probe.kernel_norm2(plain, "float32")
            results.append((out.tobytes(), narrow.tobytes(), norm))
    finally:
        _probe.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_tensors_are_taken_as_they_are() -> None:
    src = torch.randn(1000)
    dst = torch.empty(1000, dtype=torch.bfloat16)
    _probe.kernel_cast(dst, "bfloat16", src, "float32")
    assert torch.equal(dst, src.bfloat16())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: _probe.kernel_cast(x, "float31", x, "float32"), ValueError, "float31"),
        (lambda x: _probe.kernel_cast(x, "float32", x[:3], "float32"), ValueError, "4 and 3"),
        (lambda x: _probe.kernel_cast(x, "uint8", x, "float64"), ValueError, "16 and 2"),
        (lambda x: _probe.kernel_cast(x[:1], "uint8", x, "float32"), ValueError, "uint8"),
        (lambda x: _probe.kernel_cast(x, "float32", x[::2], "float32"), BufferError, "contiguous"),
        (lambda x: _probe.kernel_cast(x, "float32", x[:3], "float64"), BufferError, "float64"),
        (lambda x: _probe.kernel_cast(x, "float32", x, "float32", 1.0, "sse"), ValueError, "avx2"),
        (lambda x: _probe.kernel_accumulate(x, "float16", x, "float16"), ValueError, "float16"),
        (
            lambda x: _probe.kernel_reduce(x, "float32", [x, x[:1]], "float32"),
            ValueError,
            "1 and 4",
        ),
        (lambda x: _probe.kernel_reduce(x, "float32", 3, "float32"), TypeError, "iterable"),
        (lambda x: _probe.kernel_norm2(x, "uint8"), ValueError, "uint8"),
        (lambda x: _probe.set_num_threads(0), ValueError, "1 to 256"),
        (lambda x: _probe.set_num_threads(1 << 40), ValueError, "1 to 256"),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(np.zeros(4, np.float32))


def choose(**settings: str) -> subprocess.CompletedProcess[str]:
    """Run a cast in a new process in which the environment variables `settings` are set."""
    code = (
        "import numpy as np; from fsdpc import _probe; x = np.ones(3, np.float32);"
        "_probe.kernel_cast(x, 'float32', x, 'float32'); print(_probe.get_num_threads())"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_settings_from_the_environment() -> None:
    good = choose(FSDPC_SIMD="plain", FSDPC_NUM_THREADS="3")
    assert good.returncode == 0 and good.stdout.strip() == "3", good.stderr
    bad = choose(FSDPC_SIMD="sse9")
    assert bad.returncode != 0 and "plain, avx2, avx512" in bad.stderr
    bad = choose(FSDPC_NUM_THREADS="many")
    assert bad.returncode != 0 and "FSDPC_NUM_THREADS=many" in bad.stderr
