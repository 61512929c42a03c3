"""Tests of the CUDA kernels against the plain C kernels, bit for bit: types, sizes, addresses,
strides, NaNs.

Both kernels get the same bits. Where one kernel's arithmetic makes a NaN, the other kernel must
make a NaN too, but its bits may differ. The two kernels add sums of squares in different orders, so
these sums only agree within a bound.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from gpu import machine

from fsdpc import _probe
from fsdpc._fsdp2.quantized import REDUCE_CODECS

FLOATS = ["float32", "bfloat16", "float16", "float64"]
SIZES = [1, 7, 33, 1000, 4099, (1 << 18) + 5]
OFFSETS = [(0, 0), (1, 1), (3, 3), (0, 1), (5, 2), (7, 8)]  # `before` of placed(), for two tensors
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
GPU = "cuda:0"
LARGE = 2**31 + 4096 + 3  # a number of elements that does not fit in an int


@pytest.fixture(scope="module")
def place(device) -> torch.device:
    """Return the device on which the kernels' tensors are."""
    machine.prepare_probe(device)
    return device.device


def of(name: str) -> torch.dtype:
    return getattr(torch, name)


def numbers(n: int, dtype: str, seed: int = 0, wild: bool = True) -> torch.Tensor:
    """Return a CPU tensor of ordinary numbers. With `wild`, it also has random bit patterns and
    special values."""
    return fixed_numbers(n, dtype, seed, wild).clone()


@functools.lru_cache(maxsize=256)
def fixed_numbers(n: int, dtype: str, seed: int, wild: bool) -> torch.Tensor:
    """The values of `numbers`, made once for all callers."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=rng).to(of(dtype))
    if not wild:
        return values
    item = values.element_size()
    noise = torch.randint(0, 256, (n * item,), generator=rng, dtype=torch.uint8)
    patterns = noise.view(BITS[item]).view(of(dtype))
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504, 65519.9, 65520, 2**-24, 2**-25]
        + [2**-133, -(2**-149), 3.39e38, -3.4e38],
        dtype=torch.float64,
    ).to(of(dtype))
    values[1::3] = patterns[1::3]
    count = values[2::3].numel()
    values[2::3] = special.repeat(count // special.numel() + 1)[:count]
    return values


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check that all bits are equal, except that NaNs only have to be NaNs on both sides."""
    got = got.cpu()
    different = (bits(got) != bits(want)) & ~(got.isnan() & want.isnan())
    assert not different.any(), (
        f"{int(different.sum())} of {want.numel()} elements, first at "
        f"{int(different.nonzero()[0])}: {got[different][0]} instead of {want[different][0]}"
    )


def placed(tensor: torch.Tensor, place: torch.device, before: int) -> torch.Tensor:
    """Return a copy on the GPU that begins `before` elements after an aligned address. Guard
    elements lie before and after the copy."""
    room = torch.full((before + tensor.numel() + 64,), 77.0, dtype=tensor.dtype, device=place)
    inside = room[before : before + tensor.numel()]
    inside.copy_(tensor)
    return inside


def guards_stand(inside: torch.Tensor, before: int) -> None:
    room = torch.as_strided(inside, (before + inside.numel() + 64,), (1,), 0)
    outside = torch.cat([room[:before], room[before + inside.numel() :]])
    assert (outside == 77).all(), "written beyond the tensor"


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dst", FLOATS)
@pytest.mark.parametrize("src", FLOATS)
def test_cast(place, src, dst, scale):
    for n, (first, second) in itertools.product(SIZES, OFFSETS):
        source, want = numbers(n, src, seed=n), torch.zeros(n, dtype=of(dst))
        _probe.kernel_cast(want, dst, source, src, scale, "plain")
        got = placed(torch.zeros(n, dtype=of(dst)), place, first)
        _probe.kernel_cast(got, dst, placed(source, place, second), src, scale, GPU)
        same(got, want)
        if src == dst and scale == 1:
            assert torch.equal(bits(got.cpu()), bits(source)), "a copy changed a NaN"
        guards_stand(got, first)


def test_cast_in_place(place):
    want = numbers(4099, "bfloat16")
    got = placed(want, place, 1)
    _probe.kernel_cast(got, "bfloat16", got, "bfloat16", -0.5, GPU)
    _probe.kernel_cast(want, "bfloat16", want, "bfloat16", -0.5, "plain")
    same(got, want)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("acc", ["float32", "float64"])
@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_reduce(place, src, acc, add, count):
    for n, (first, second) in itertools.product(SIZES, OFFSETS):
        sources = [numbers(n, src, seed=n + 7 * s) for s in range(count)]
        sources = [None if count == 5 and s == 2 else one for s, one in enumerate(sources)]
        want = numbers(n, acc, seed=5)
        got = placed(want, place, first)
        _probe.kernel_reduce(want, acc, sources, src, 0.25, add, "plain")
        there = [None if one is None else placed(one, place, second) for one in sources]
        _probe.kernel_reduce(got, acc, there, src, 0.25, add, GPU)
        same(got, want)
        guards_stand(got, first)


@pytest.mark.parametrize("src", FLOATS)
def test_accumulate(place, src):
    for n, (first, second) in itertools.product(SIZES, OFFSETS):
        source, want = numbers(n, src, seed=n), numbers(n, "float32", seed=3)
        got = placed(want, place, first)
        _probe.kernel_accumulate(want, "float32", source, src, 0.3, "plain")
        _probe.kernel_accumulate(got, "float32", placed(source, place, second), src, 0.3, GPU)
        same(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm(place, dtype):
    for n in SIZES:
        source = numbers(n, dtype, seed=n, wild=False)
        squares, largest, nonfinite = _probe.kernel_norm2(placed(source, place, 1), dtype, GPU)
        exact = source.double()
        assert squares == pytest.approx(float(exact.square().sum()), rel=1e-12)
        assert largest == float(exact.abs().max())
        assert nonfinite is False
        for bad in (torch.inf, -torch.inf, torch.nan):
            source[n // 2] = bad
            assert _probe.kernel_norm2(placed(source, place, 0), dtype, GPU)[2] is True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_scale_by_a_number_on_the_device(place, dtype, factor):
    want = numbers(4099, dtype)
    got = placed(want, place, 3)
    number = torch.tensor([factor], dtype=torch.float64, device=place)
    _probe.kernel_scale_by(got, dtype, number, GPU)
    if factor != 1:
        _probe.kernel_cast(want, dtype, want, dtype, factor, "plain")
    same(got, want)


# --- pack -----------------------------------------------------------------------------------------


def views(place: torch.device, dtype: str) -> list[torch.Tensor | None]:
    """Return contiguous, transposed, sliced and permuted tensors, a tensor of one element, and None
    for missing tensors."""

    def made(*shape: int, seed: int) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return numbers(count, dtype, seed).reshape(shape).to(place)

    return [
        made(1000, seed=1),
        made(33, 65, seed=2).t(),
        None,
        made(9, 8, 7, seed=3)[:, ::2, 1:6],
        made(4, 5, 6, 7, seed=4).permute(3, 1, 0, 2),
        made(1, seed=5),
        made(300, 257, seed=6)[3:, 1:],
    ]


@pytest.mark.parametrize("dst", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_pack(place, src, dst, scale):
    """A pack writes the elements of each tensor in contiguous order, scaled and cast. It writes
    zeros for missing tensors and between tensors."""
    tensors, item = views(place, src), of(dst).itemsize
    counts = [77 if one is None else one.numel() for one in tensors]
    offsets, at = [], 0
    for count in counts:
        offsets.append(at)
        at += -(-count * item // 64) * 64 + 64
    targets = [(n, offset, dst) for n, offset in zip(counts, offsets, strict=True)]
    want = torch.zeros(at // item, dtype=of(dst))
    for (n, offset, _), tensor in zip(targets, tensors, strict=True):
        if tensor is not None:
            slot = want[offset // item : offset // item + n]
            _probe.kernel_cast(slot, dst, tensor.cpu().contiguous(), src, scale, "plain")
    got = torch.full((at // item,), 77.0, dtype=of(dst), device=place)
    plan = _probe.kernel_pack_plan(targets, at, GPU)
    _probe.kernel_pack(plan, got, tensors, scale)
    same(got, want)


def test_pack_of_many_small_tensors(place):
    """A pack may have more tensors than fit the parameters of one launch."""
    tensors = [numbers(n % 13 + 1, "float32", seed=n).to(place) for n in range(1000)]
    offsets = list(itertools.accumulate([0, *(4 * one.numel() for one in tensors)]))
    plan = _probe.kernel_pack_plan(
        [(t.numel(), o, "float32") for t, o in zip(tensors, offsets, strict=False)],
        offsets[-1],
        GPU,
    )
    got = torch.zeros(offsets[-1] // 4, device=place)
    for _ in range(3):
        _probe.kernel_pack(plan, got, tensors)
    same(got, torch.cat(tensors).cpu())


# --- sizes and streams ----------------------------------------------------------------------------


@pytest.mark.real_gpu
def test_more_elements_than_an_int_counts(place):
    """Casts, sums and packs of more than 2**31 elements are correct at the ends and around element
    2**31."""
    if torch.cuda.mem_get_info(place)[0] < 32e9:
        pytest.skip("needs 32 GB of the GPU's memory")
    probes = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, LARGE - 1]
    source = torch.empty(LARGE, dtype=torch.bfloat16, device=place).fill_(0.5)
    at = torch.tensor(probes, device=place)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=place)
    source[at] = values.bfloat16()
    half = torch.empty(LARGE, dtype=torch.float16, device=place)
    _probe.kernel_cast(half, "float16", source, "bfloat16", 2.0, GPU)
    assert torch.equal(half[at].float(), 2 * values)
    assert int((half == 1).sum()) == LARGE - len(probes)
    plan = _probe.kernel_pack_plan([(LARGE, 0, "bfloat16")], 2 * LARGE, GPU)
    _probe.kernel_pack(plan, half.view(torch.bfloat16), [source], 2.0)
    packed = half.view(torch.bfloat16)
    assert torch.equal(packed[at].float(), 2 * values)
    assert int((packed == 1).sum()) == LARGE - len(probes)
    del half, packed
    total = torch.zeros(LARGE, device=place)
    _probe.kernel_reduce(total, "float32", [source, source], "bfloat16", 1.0, True, GPU)
    assert torch.equal(total[at], 2 * values)
    assert int((total == 1).sum()) == LARGE - len(probes)


def test_work_goes_on_the_current_stream(place, device):
    """A kernel comes after what torch has queued before, and before what torch queues later."""
    source = torch.zeros(1 << 22, device=place)
    target = torch.zeros(1 << 22, dtype=torch.bfloat16, device=place)
    device.synchronize()
    with device.side_stream():
        for step in range(1, 20):
            source.fill_(step)
            _probe.kernel_cast(target, "bfloat16", source, "float32", 1.0, GPU)
            assert float(target.float().mean()) == step
    device.synchronize()


def test_refusals(place, device):
    tensor = torch.zeros(8, device=place)
    with pytest.raises(NotImplementedError):
        _probe.kernel_cast(tensor, "float32", tensor, "float32", 2.0, "cuda:4711")
    with pytest.raises(ValueError, match="7 and 8"):
        _probe.kernel_cast(tensor[1:], "float32", tensor, "float32", 2.0, GPU)
    with pytest.raises(BufferError):
        _probe.kernel_cast(tensor[::2], "float32", tensor[::2], "float32", 2.0, GPU)
    if not device.dry:
        with pytest.raises(BufferError, match="host memory"):
            _probe.kernel_cast(tensor, "float32", tensor.cpu(), "float32", 2.0, GPU)
        with pytest.raises(BufferError, match="cuda:0"):
            _probe.kernel_cast(tensor, "float32", tensor, "float32", 2.0, "plain")


def test_device(place):
    """The description of the GPU is the same at each call. Other device numbers raise an error."""
    info = _probe.cuda_device(0)
    assert info["device"] == "cuda:0" or info["device"].startswith("cuda")
    assert info == _probe.cuda_device(0)
    for number in (-1, 4711):
        with pytest.raises(NotImplementedError):
            _probe.cuda_device(number)


@pytest.mark.parametrize("codec", REDUCE_CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_codes(place, codec, dtype):
    """The coded gradients of other ranks are summed with this rank's own gradients. The length of a
    row is not a multiple of the codec's block, so the last block of a row is not full.
    """
    rows, row, senders, own = 65, 333, 3, 1
    values = numbers(senders * rows * row, dtype, wild=False).view(senders, rows, row)
    values[0, 3, 5] = torch.inf
    bytes_ = _probe.codec_bytes(codec, rows, row)
    coded = torch.empty((senders - 1) * bytes_, dtype=torch.uint8, device=place)
    before = numbers(rows * row, "float32", 1, wild=False).view(rows, row)
    sums, total = before.clone().to(place), None
    _probe.codec_sum(
        codec, values.to(place), dtype, row, own, coded, sums, "float32", GPU, 0.25, True
    )
    for rank in range(senders):
        piece = torch.empty(rows, row)
        if rank == own:
            piece.copy_(values[rank])
        else:
            flat = values[rank].float().numpy()
            _probe.codec_round(codec, flat, "float32", row, piece.numpy(), "float32")
        total = piece if total is None else total + piece
    same(sums.flatten(), (before + total * 0.25).flatten())
