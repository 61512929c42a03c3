"""Tests of the codecs: every code, every bfloat16, and the values of coded rows are compared with
ml_dtypes and with formulas.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fsdpc import QuantizedPolicy, _probe

F8 = {
    "float8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 256),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 256),
    "mxfp8": (ml_dtypes.float8_e4m3fn, 448.0, 32),
}
BLOCKS = {name: block for name, block, *_ in _probe.CODECS}
BITS = {name: bits for name, _, bits, *_ in _probe.CODECS}
# Bounds of errors relative to the block's largest magnitude. mxfp8 saturates: values of up to 512
# times the scale become 448 times the scale.
BOUNDS = {
    "int8": 1 / 251,
    "float8_e4m3": 1 / 27,
    "float8_e5m2": 1 / 13,
    "mxfp8": 1 / 8,
    "nvfp4": 1 / 5.99,
    "nf4": 0.153,
    "int4": 1 / 13.99,
    "int4_stochastic": 1 / 6.99,
}
NF4 = np.float32([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def encode(codec, values, dtype="float32"):
    out = np.zeros(_probe.codec_bytes(codec, *values.shape), np.uint8)
    _probe.codec_encode(codec, np.ascontiguousarray(values), dtype, values.shape[1], out)
    return out


def decode(codec, coded, shape, dtype="float32"):
    out = np.zeros(shape, np.uint16 if dtype in ("bfloat16", "float16") else dtype)
    _probe.codec_decode(codec, out, dtype, shape[1], coded)
    return out


def rounded(codec, values, dtype="float32", out_dtype="float32"):
    out = np.zeros(values.shape, np.uint16 if out_dtype in ("bfloat16", "float16") else out_dtype)
    _probe.codec_round(codec, values, dtype, values.shape[1], out, out_dtype)
    return out


def scales_at(codec, rows, row):
    return -(-rows * -(-row * BITS[codec] // 8) // 16) * 16


def with_scale(codec, codes, scale):
    """Return the coded bytes of one row that consists of one block."""
    row = len(codes)
    out = np.zeros(_probe.codec_bytes(codec, 1, row), np.uint8)
    out[:row] = codes
    scale = np.uint8([scale]) if codec == "mxfp8" else np.float32([scale]).view(np.uint8)
    out[scales_at(codec, 1, row) :][: len(scale)] = scale
    return out


def same(a, b):
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


@pytest.fixture(params=["plain", "avx2", "avx512"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FSDPC_SIMD", request.param)
    try:
        encode("int8", np.ones((1, 1), np.float32))
    except Exception as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("codec", F8)
def test_every_code_has_the_value_of_its_format(codec, kernels):
    dtype, largest, block = F8[codec]
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(dtype).astype(np.float32)
    scale = 127 if codec == "mxfp8" else largest  # both mean a factor of 1
    found = [
        decode(codec, with_scale(codec, part, scale), (1, len(part)))[0]
        for part in np.split(codes, 256 // block)
    ]
    finite = np.isfinite(expected)
    found = np.concatenate(found)
    if codec == "mxfp8":
        assert same(found, expected)
    else:  # decoded values are value / largest * largest
        scaled = expected * np.float32(1 / largest) * np.float32(largest)
        assert np.array_equal(found[finite], scaled[finite])
        assert same(found[~finite], expected[~finite])


@pytest.mark.parametrize("codec", F8)
def test_every_bfloat16_is_rounded_to_its_format(codec, kernels):
    """Each block contains the format's largest number, so that its values are not scaled."""
    dtype, largest, block = F8[codec]
    every = np.arange(65536, dtype=np.uint16)
    values = every.view(ml_dtypes.bfloat16).astype(np.float32)
    inside = np.abs(values) <= largest  # leaves out NaN
    every, values = every[inside], values[inside]
    count = -(-len(values) // (block - 1)) * (block - 1)
    padded = np.pad(every, (0, count - len(every))).reshape(-1, block - 1)
    top = np.full((len(padded), 1), np.float32(largest).astype(ml_dtypes.bfloat16).view(np.uint16))
    rows = np.concatenate([top, padded], 1)
    coded = encode(codec, rows, "bfloat16")[: rows.size].reshape(rows.shape)[:, 1:].reshape(-1)
    expected = values.astype(dtype).view(np.uint8)
    assert np.array_equal(coded[: len(values)], expected)
    assert len(values) > 32768


def test_nf4_is_the_nearest_level(kernels):
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = every[np.abs(every) <= 1]
    values = np.pad(values, (0, -len(values) % 63)).reshape(-1, 63)
    rows = np.concatenate([np.ones((len(values), 1), np.float32), values], 1)
    found = decode("nf4", encode("nf4", rows), rows.shape)
    distance = np.abs(rows.astype(np.float64)[..., None] - NF4.astype(np.float64))
    chosen = np.abs(rows.astype(np.float64) - found)
    assert np.isin(found, NF4).all()
    assert (chosen <= distance.min(-1) + 1e-8).all()


def bitsandbytes(values):
    """Return the codes and scales of bitsandbytes' quantize_4bit (0.50.2) on processors."""
    blocks = values.reshape(-1, 64)
    most = np.abs(blocks).max(1)
    scaled = blocks * (np.float32(1) / np.maximum(most, np.float32(1e-38)))[:, None]
    levels = np.searchsorted((NF4[:-1] + NF4[1:]) / np.float32(2), np.clip(scaled, -1, 1).ravel())
    return (levels[::2] << 4 | levels[1::2]).astype(np.uint8), most


def test_nf4_has_the_codes_and_values_of_bitsandbytes(kernels):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((500, 256)).astype(np.float32)
    values *= np.float32(2.0) ** rng.integers(-100, 100, (500, 1)).astype(np.float32)
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    every = np.where(np.abs(every) < 1e-30, 0, every)[np.isfinite(every)]
    bounds = (NF4[:-1] + NF4[1:]) / np.float32(2)
    near = np.concatenate([[1], bounds, *(np.nextafter(bounds, np.float32(x)) for x in (-2, 2))])
    for more in (every, near.astype(np.float32)):
        padded = np.pad(more, (0, -len(more) % 256)).reshape(-1, 256)
        values = np.concatenate([values, padded])
    coded = encode("nf4", values)
    codes, scales = bitsandbytes(values)
    at = scales_at("nf4", *values.shape)
    assert np.array_equal(coded[:at], codes)
    assert np.array_equal(coded[at:].view(np.float32)[: len(scales)], scales)
    levels = np.stack([codes >> 4, codes & 15], -1).reshape(-1, 64)
    expected = (NF4[levels] * scales[:, None]).reshape(values.shape)
    found = decode("nf4", coded, values.shape)
    assert np.array_equal(found, expected)
    assert np.array_equal(encode("nf4", found), coded)  # encoded again, values keep their codes


def nvfp4_rows(parts):
    """Return rows that consist of ``parts``, which have 16 values each. Each row begins with an
    additional part that makes the row's float32 scale 1.
    """
    parts = np.pad(parts, ((0, -len(parts) % 31), (0, 0))).reshape(-1, 31, 16)
    return np.pad(parts, ((0, 0), (1, 0), (0, 0)), constant_values=2688).reshape(-1, 512)


def nvfp4_codes(rows):
    """Return the codes and scales of all parts except the first part of each row."""
    coded = encode("nvfp4", rows)
    at = scales_at("nvfp4", *rows.shape)
    codes = np.stack([coded[:at] >> 4, coded[:at] & 15], -1).reshape(len(rows), 32, 16)
    scales = coded[at : at + 36 * len(rows)].reshape(len(rows), 36)
    assert np.array_equal(
        np.ascontiguousarray(scales[:, :4]).view(np.float32)[:, 0] * 2688, rows[:, 0]
    )
    return codes[:, 1:].reshape(-1, 16), scales[:, 5:].reshape(-1)


def test_every_code_of_nvfp4_under_every_scale_has_its_value(kernels):
    codes = np.tile(np.arange(16, dtype=np.uint8), 32)
    for scales in np.split(np.arange(128, dtype=np.uint8), 4):
        coded = np.zeros(_probe.codec_bytes("nvfp4", 1, 512), np.uint8)
        coded[:256] = codes[::2] << 4 | codes[1::2]
        coded[256:260] = np.float32([3]).view(np.uint8)
        coded[260:292] = scales
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(32, 16)
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(3)
        found = decode("nvfp4", coded, (1, 512)).reshape(32, 16)
        same_ = same(found, values * factors[:, None])
        assert same_ or (scales[-1] == 127 and np.isnan(found[-1]).all())


def test_every_bfloat16_is_rounded_to_nvfp4(kernels):
    """Each bfloat16 is encoded as a value under a scale of 1, and as a scale."""
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = every[np.abs(every) <= 6]
    padded = np.pad(values, (0, -len(values) % 15)).reshape(-1, 15)
    rows = nvfp4_rows(np.pad(padded, ((0, 0), (1, 0)), constant_values=6))
    codes, scales = nvfp4_codes(rows)
    codes, scales = codes[: len(padded)], scales[: len(padded)]
    assert (scales == np.float32(1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codes[:, 1:].reshape(-1)[: len(values)], expected)
    ratios = every[~np.signbit(every) & (every <= 448)]
    codes, scales = nvfp4_codes(nvfp4_rows(np.repeat(ratios[:, None] * 6, 16, 1)))
    assert np.array_equal(
        scales[: len(ratios)], ratios.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    assert len(values) > 32768
    assert len(ratios) > 16384


def test_nvfp4_has_the_codes_and_values_of_torchao(kernels):
    """Values equal those of torchao's nvfp4_quantize (0.18), which has one float32 scale for the
    tensor. Here every row has that scale, because the largest magnitude in each row is 6.7.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200, 512)).astype(np.float32)
    rows *= np.float32(2.0) ** rng.integers(-8, 1, (200, 32, 1)).repeat(16, 2).reshape(200, 512)
    rows[:, 0] = np.float32(-6.7)
    parts = rows.reshape(-1, 16)
    scale = np.float32(6.7) / np.float32(2688)
    ratio = np.abs(parts).max(1) / np.float32(6) / scale
    expected = np.maximum(ratio, np.float32(2**-6)).astype(ml_dtypes.float8_e4m3fn)
    inverse = np.float32(1) / scale / expected.astype(np.float32)
    scaled = np.clip(parts * inverse[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    found = decode("nvfp4", encode("nvfp4", rows), rows.shape)
    total = expected.astype(np.float32) * scale
    assert ratio.min() > 2**-6
    assert same(found.reshape(-1, 16), scaled.astype(np.float32) * total[:, None])


def test_pages_know_every_codec():
    """docs/hosts.md and the docstring of QuantizedPolicy name each codec that ``codec_bits.h``
    lists.
    """
    page = (Path(__file__).parents[2] / "docs/hosts.md").read_text()
    for codec in BLOCKS:
        assert f"`{codec}`" in page
        assert f'"{codec}"' in QuantizedPolicy.__doc__


def test_int4_is_the_nearest_integer(kernels):
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = every[np.abs(every) <= 7]
    values = np.pad(values, (0, -len(values) % 127)).reshape(-1, 127)
    rows = np.concatenate([np.full((len(values), 1), 7, np.float32), values], 1)
    codes = encode("int4", rows)[: rows.size // 2].reshape(-1, 64)
    levels = np.stack([codes >> 4, codes & 15], -1).reshape(-1, 128).astype(np.int64) - 8
    assert np.array_equal(levels, np.rint(rows))
    np.testing.assert_allclose(decode("int4", encode("int4", rows), rows.shape), levels, 3e-7)


def test_rounding_at_random_is_right_on_average(kernels):
    rng = np.random.default_rng(0)
    rows = np.full((4000, 128), 0.3, np.float32)
    rows[:, 0] = rng.uniform(1, 2, 4000)  # blocks differ only in this value
    found = decode("int4_stochastic", encode("int4_stochastic", rows), rows.shape)[:, 1:]
    step = rows[:, :1] / 7
    below = np.floor(np.float32(0.3) / step)
    assert (np.isclose(found, below * step) | np.isclose(found, (below + 1) * step)).all()
    deviation = step.mean() / 2 / np.sqrt(found.size)  # an upper bound
    assert abs(found.mean() - 0.3) < 5 * deviation
    by_place = found.mean(0)  # at each index, some blocks must round up, others down
    assert np.abs(by_place - 0.3).max() < 5 * step.mean() / 2 / np.sqrt(len(rows))
    assert abs(decode("int4", encode("int4", rows), rows.shape)[:, 1:].mean() - 0.3) > deviation
    neighbours = np.corrcoef((found - 0.3)[:, :-1].ravel(), (found - 0.3)[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 0.02
    rows[:, 1:] = 0
    assert np.array_equal(rounded("int4_stochastic", rows), rows)


@pytest.mark.parametrize("codec", BLOCKS)
@pytest.mark.parametrize("row", [1, 31, 300, 4400])
def test_blocks_keep_their_largest_value_and_end_with_their_row(codec, row, kernels):
    rng = np.random.default_rng(row)
    values = rng.standard_normal((3, row)).astype(np.float32)
    values *= np.float32(2.0) ** rng.integers(-120, 100, (3, row)).astype(np.float32)
    found = decode(codec, encode(codec, values), values.shape)
    assert same(found, rounded(codec, values))
    for number in range(3):  # a row has the same values when it is coded alone
        alone = values[number : number + 1]
        assert same(decode(codec, encode(codec, alone), alone.shape)[0], found[number])
        for begin in range(0, row, BLOCKS[codec]):
            block = values[number, begin : begin + BLOCKS[codec]]
            back = found[number, begin : begin + BLOCKS[codec]]
            assert np.isfinite(back).all()
            at = np.abs(block).argmax()
            if codec == "nvfp4":  # the decoded value is a product of three factors
                np.testing.assert_allclose(back[at], block[at], 3e-7, 1e-40)
            assert codec in ("mxfp8", "nvfp4") or back[at] == block[at]
            assert (np.abs(back - block) <= np.abs(block[at]) * BOUNDS[codec]).all()


@pytest.mark.parametrize("codec", BLOCKS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_makes_its_block_nan(codec, bad, kernels):
    values = np.ones((2, 300), np.float32)
    values[1, 70] = bad
    block = BLOCKS[codec]
    expected = np.zeros((2, 300), bool)
    expected[1, 70 // block * block : (70 // block + 1) * block] = True
    assert np.array_equal(np.isnan(decode(codec, encode(codec, values), (2, 300))), expected)


@pytest.mark.parametrize("codec", BLOCKS)
def test_smallest_and_largest_numbers_and_zero(codec, kernels):
    top = np.finfo(np.float32).max
    for most in (0.0, 1e-45, 1e-40, float(np.finfo(np.float32).tiny), float(top)):
        values = np.full((1, 64), most, np.float32)
        found = decode(codec, encode(codec, values), (1, 64))
        assert np.isfinite(found).all()
        assert most < 1e-38 or (np.abs(found - values) <= values * BOUNDS[codec]).all()


@pytest.mark.parametrize("codec", BLOCKS)
def test_every_dtype_and_instruction_set_gives_the_same(codec, monkeypatch):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((5, 333)).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = {
        bytes(encode(codec, given, dtype))
        for given, dtype in (
            (wide, "float32"),
            (wide.astype(ml_dtypes.bfloat16).view(np.uint16), "bfloat16"),
            (wide.astype(np.float64), "float64"),
        )
    }
    for name in ("plain", "avx2"):
        monkeypatch.setenv("FSDPC_SIMD", name)
        codes.add(bytes(encode(codec, wide)))
    assert len(codes) == 1
    narrow = rounded(codec, wide, out_dtype="bfloat16")
    assert np.array_equal(narrow, rounded(codec, wide).astype(ml_dtypes.bfloat16).view(np.uint16))
