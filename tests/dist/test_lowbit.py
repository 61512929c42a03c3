"""Tests of frozen 4-bit codes beside trained adapters. The codes are those of bitsandbytes or
fsdpc's own (``fsdpc.lowbit``). Classes with the same attributes stand for bitsandbytes'
``Params4bit`` and ``Linear4bit``; ``clients/test_low_bit.py`` uses the library itself.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import env
import pytest
import torch
from harness import ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from toys import by_door

import fsdpc
import fsdpc.checkpoint
from fsdpc import _C, lowbit
from fsdpc._engine.device import kernel_ordinal
from fsdpc.checkpoint import manifest, write
from fsdpc.checkpoint.convert import convert
from fsdpc.checkpoint.entries import Coding
from fsdpc.checkpoint.verify import verify

WIDTH = 64
LOW = torch.bfloat16
every_door = pytest.mark.parametrize("door", ["original", "flat", "fully_shard"])


class State:
    quant_type, blocksize, dtype, nested, offset, state2 = "nf4", WIDTH, LOW, False, None, None

    def __init__(self, absmax, shape):
        self.absmax, self.shape = absmax, shape
        self.bitsandbytes__nf4 = torch.tensor(shape)

    @classmethod
    def from_dict(cls, given, device):
        found = {key.rpartition(".")[2]: value for key, value in given.items()}
        return cls(found["absmax"], torch.Size(found["bitsandbytes__nf4"].tolist()))


class Params4bit(nn.Parameter):
    def __new__(cls, data=None, quant_state=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, False)
        self.quant_state = quant_state
        return self

    @property
    def absmax(self):
        return self.quant_state.absmax


class Linear4bit(nn.Module):
    def __init__(self, storage):
        super().__init__()
        codes = torch.randint(256, (WIDTH * WIDTH // 2,), dtype=torch.uint8)
        scales = State(torch.rand(WIDTH), torch.Size([WIDTH, WIDTH]))
        self.weight = Params4bit(codes.view(storage).view(-1, 1), scales)
        self.support_avx512bf16_for_cpu = True

    def forward(self, x):
        assert type(self.weight) is Params4bit
        codes = self.weight.detach().reshape(-1).view(torch.uint8)
        values = torch.stack([codes >> 4, codes & 15], -1).view(WIDTH, WIDTH) / 8.0 - 1
        return nn.functional.linear(x, (values * self.weight.absmax[:, None]).to(x.dtype))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        destination[f"{prefix}weight.absmax"] = state.absmax
        name = f"{prefix}weight.quant_state.bitsandbytes__nf4"
        destination[name] = state.bitsandbytes__nf4


class Block(nn.Module):
    def __init__(self, storage, width=WIDTH):
        super().__init__()
        self.base = Linear4bit(storage) if storage is not None else nn.Linear(width, width, False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, storage=torch.uint8, seed=0, width=WIDTH):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(storage, width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, of, steps=2):
    """Train on the batches of the ranks in ``of``. Return the losses of the last rank in ``of``."""
    optimizer, seen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), []
    for step in range(steps):
        for rank in of:
            loss = model(batch(rank, step)).float().square().mean()
            (loss / len(of)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def low_precision(door):
    kind = MixedPrecisionPolicy if door == "fully_shard" else MixedPrecision
    name = "mp_policy" if door == "fully_shard" else "mixed_precision"
    return {name: kind(param_dtype=LOW, reduce_dtype=torch.float32)}


def base(state):
    """Return the codes and scales of a state dict, as bytes."""
    named = {k: v for k, v in state.items() if ".base." in k}
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in named.items()}
    return {k: bytes(v.contiguous().view(-1).view(torch.uint8).tolist()) for k, v in whole.items()}


@ranks(2, 3)
@every_door
def test_trains_as_unsharded(rank, world, door):
    """Training equals that of the unsharded model for any storage dtype of the codes. Mixed
    precision does not cast the codes.
    """
    expected = train(Model(), [r for r in range(world) if r != rank] + [rank])
    low = []
    for storage in (torch.uint8, torch.float16, torch.float32):
        model = by_door(door, Model(storage))
        assert train(model, [rank]) == pytest.approx(expected, rel=1e-6)
        assert base(model.state_dict()) == base(Model(storage).state_dict())
        model = by_door(door, Model(storage), **low_precision(door))
        low.append(train(model, [rank]))
        assert base(model.state_dict()) == base(Model(storage).state_dict())
        assert not any(b.base.support_avx512bf16_for_cpu for b in model.blocks)
    assert low[0] == low[1] == low[2] == pytest.approx(expected, rel=0.02)


@ranks(2)
@every_door
def test_states_hold_codes_and_scales(rank, world, door, tmp_path):
    storage = torch.float16
    model = by_door(door, Model(storage))
    own, state = base(Model(storage).state_dict()), model.state_dict()
    assert list(state) == list(Model(storage).state_dict())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert base(whole) == base(state) == own
    other = by_door(door, Model(storage, seed=1))
    assert base(other.state_dict()) != own
    other.load_state_dict(state)
    assert base(other.state_dict()) == own and torch.equal(other(batch(0, 0)), model(batch(0, 0)))
    wrong = {**state, "blocks.0.base.weight.quant_state.bitsandbytes__nf4": torch.tensor([9, 9])}
    with pytest.raises(RuntimeError, match=r"blocks\.0\.base\.weight\.\*: ValueError: codes of an"):
        other.load_state_dict(wrong)
    fsdpc.checkpoint.save(tmp_path / "low", model, dtype=LOW)
    other = by_door(door, Model(storage, seed=1))
    fsdpc.checkpoint.load(tmp_path / "low", other, cast=True)
    assert base(other.state_dict()) == own
    if rank == 0:
        convert(tmp_path / "low", tmp_path / "wide", "float32", "safetensors")
    torch.distributed.barrier()
    other = by_door(door, Model(storage, seed=1))
    fsdpc.checkpoint.load(tmp_path / "wide", other)
    assert base(other.state_dict()) == own
    streamed = dict(fsdpc.checkpoint.stream(model, dtype=torch.float32))
    assert streamed["blocks.1.base.weight"].dtype == storage
    assert torch.equal(
        streamed["blocks.1.base.weight.absmax"], Model().blocks[1].base.weight.absmax
    )
    if door != "fully_shard":
        copied = copy.deepcopy(model)
        assert base(copied.state_dict()) == own


@ranks(2)
@every_door
def test_refusals(rank, world, door):
    def refused(kind, text, prepare=lambda model: None, storage=torch.float16, seed=0, **options):
        model = Model(storage, seed)
        prepare(model.blocks[0].base)
        with pytest.raises(kind, match=text):
            by_door(door, model, **options)

    refused(fsdpc.MismatchError, "base.weight.*nf4 in blocks of 64, checksums", seed=rank)
    refused(ValueError, "not quantised yet", lambda m: setattr(m.weight, "quant_state", None))
    packed = SimpleNamespace(packing_format_for_cpu=True)
    refused(ValueError, "order for AVX-512", lambda m: setattr(m.weight, "quant_state", packed))
    refused(TypeError, "holds 4-bit codes, which no", lambda m: m.weight.requires_grad_())
    refused(TypeError, "codes elsewhere", lambda m: setattr(m.weight, "has_fp16_weights", False))
    model = by_door(door, Model(torch.float16))
    with pytest.raises(TypeError, match="holds 4-bit codes in memory of torch.float16"):
        model.to(LOW)
        model(batch(rank, 0))
    model = by_door(door, Model(torch.float16))
    if door != "flat":
        model.requires_grad_(True)
        with pytest.raises(TypeError, match="holds 4-bit codes, which no optimizer can step"):
            train(model, [rank])
        return
    with (
        pytest.raises(ValueError, match="was quantised anew"),
        fsdpc.FSDP.summon_full_params(model),
    ):
        weight = model.blocks[0].base.weight
        weight.quant_state = copy.copy(weight.quant_state)
    synced = by_door(door, Model(seed=rank), sync_module_states=True)
    assert base(synced.state_dict()) == base(Model().state_dict())


class Around(torch.Tensor):
    """A tensor subclass whose memory is that of an inner tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(function(*(getattr(a, "inner", a) for a in args), **(kwargs or {})))


@ranks(1)
@every_door
def test_classes_around_tensors_are_refused_by_name(rank, world, door):
    model = Model()
    model.head.weight = nn.Parameter(Around(torch.randn(3, WIDTH)), requires_grad=False)
    with pytest.raises(TypeError, match=r"'head.weight' of .* class Around .*every rank keeps it"):
        by_door(door, model)


# --- fsdpc's own codes ----------------------------------------------------------------------------


def plain(seed=0, width=WIDTH):
    """Return a model whose frozen base consists of torch's layers, beside trainable adapters."""
    model = Model(None, seed, width)
    for block in model.blocks:
        block.base.requires_grad_(False)
    return model


def own(seed=0):
    return lowbit.quantize(plain(seed))


@ranks(1, 2, 3)
@every_door
def test_own_codes_train_as_unsharded(rank, world, door):
    """The first loss equals that of unsharded training to the bit. Later losses differ only by the
    rounding of sums over ranks. The codes equal those of the unsharded model.
    """
    unsharded = own()
    with torch.no_grad():
        first = unsharded(batch(rank, 0)).square().mean().item()
    expected = train(unsharded, [r for r in range(world) if r != rank] + [rank])
    model = by_door(door, own())
    losses = train(model, [rank])
    assert losses[0] == first and losses == pytest.approx(expected, rel=1e-6)
    state = own().state_dict()
    assert base(model.state_dict()) == base(state)
    low = by_door(door, own(), **low_precision(door))
    assert train(low, [rank]) == pytest.approx(expected, rel=0.02)
    assert base(low.state_dict()) == base(state)


@ranks(2)
@every_door
def test_own_codes_are_saved_and_loaded(rank, world, door, tmp_path):
    """Codes are saved as codes, without a second rounding.
    Values in files are quantized while the files are read.
    """
    model, codes = by_door(door, own()), base(own().state_dict())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert base(whole) == codes
    other = by_door(door, own(1))
    assert base(other.state_dict()) != codes
    other.load_state_dict(model.state_dict())
    assert base(other.state_dict()) == codes
    fsdpc.checkpoint.save(tmp_path / "codes", model, dtype=LOW)
    other = by_door(door, own(1))
    fsdpc.checkpoint.load(tmp_path / "codes", other, cast=True)
    assert base(other.state_dict()) == codes
    fsdpc.checkpoint.save(tmp_path / "values", by_door(door, plain()))
    for folder in ("values", "codes"):
        other = by_door(door, own(1))
        found = fsdpc.checkpoint.load_pretrained(other, tmp_path / folder)
        assert not found.initialized and base(other.state_dict()) == codes
    plainly = plain(1)
    plainly.load_state_dict(lowbit.values(model, whole))
    expected = lowbit.dequantize(own())
    assert torch.equal(plainly(batch(0, 0)), expected(batch(0, 0)))
    if rank == 0:
        torch.save(Model(torch.uint8).state_dict(), tmp_path / "pytorch_model.bin")
        small = {k: v.to(torch.float8_e4m3fn) for k, v in plain().state_dict().items()}
        (tmp_path / "small").mkdir()
        torch.save(small, tmp_path / "small" / "pytorch_model.bin")
    torch.distributed.barrier()
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="of another library, and the model"):
        fsdpc.checkpoint.load_pretrained(other, tmp_path, strict=False)
    codes = base(other.state_dict())
    with pytest.raises(
        fsdpc.checkpoint.CheckpointError, match="weight' as .* of torch.float8_e4m3"
    ):
        fsdpc.checkpoint.load_pretrained(other, tmp_path / "small")
    assert base(other.state_dict()) == codes


class Uneven(nn.Module):
    """A model with a tied weight. Shard boundaries cut rows of its weights, and a save writes a
    weight in several parts.
    """

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(37, 70), nn.ModuleList([nn.Linear(70, 129)])
        self.head = nn.Linear(70, 37, bias=False)
        self.head.weight = self.table.weight
        self.to(dtype)


def uneven(dtype):
    return lowbit.quantize(Uneven(dtype), embeddings=True)


def stored(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@ranks(1, 2, 3)
@every_door
def test_own_codes_are_saved_as_values(rank, world, door, tmp_path, monkeypatch):
    """``save`` and ``convert`` write the values that a layer decodes from its codes,
    in any dtype and in many parts.
    """
    monkeypatch.setattr(write, "_COMPUTED_BYTES", 512)
    for dtype, cast in ((torch.float32, None), (LOW, None), (LOW, torch.float64)):
        model, name = by_door(door, uneven(dtype)), f"{dtype}{cast}"
        wide = torch.float32 if cast else dtype
        expected = lowbit.dequantize(uneven(dtype), wide).state_dict()
        fsdpc.checkpoint.save(tmp_path / name, model, values=True, dtype=cast)
        fsdpc.checkpoint.save(tmp_path / f"codes{name}", model)
        if rank == 0:
            args = tmp_path / f"codes{name}", tmp_path / f"made{name}", cast and "fp64"
            convert(*args, "safetensors", values=True)
            for folder in (tmp_path / name, tmp_path / f"made{name}"):
                found = stored(folder)
                assert found.keys() == expected.keys() - {"head.weight"}
                assert all(torch.equal(found[k], expected[k].to(cast or dtype)) for k in found)
                assert not verify(folder).damaged
        torch.distributed.barrier()
    plainly = by_door(door, Uneven(LOW))
    fsdpc.checkpoint.load(tmp_path / f"{LOW}None", plainly)
    fsdpc.checkpoint.save(tmp_path / "again", plainly, values=True)  # the model has no codes
    other = by_door(door, uneven(torch.float32))
    codes = base_of(other)
    fsdpc.checkpoint.load_pretrained(other, tmp_path / f"{torch.float32}None")
    assert base_of(other) == codes
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="nf4 here: load_pretrained quantis"):
        fsdpc.checkpoint.load(tmp_path / f"{LOW}None", other)
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match=r"is in nf4 .*convert --values"):
        fsdpc.checkpoint.load(tmp_path / f"codes{LOW}None", plainly, strict=False)


def base_of(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {k: v.tolist() for k, v in state.items()}


@ranks(2)
def test_values_that_cannot_be_saved(rank, world, tmp_path):
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="decodes while it writes: save wit"):
        fsdpc.checkpoint.save(tmp_path / "a", own(), values=True, async_=True)
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="has no values"):
        fsdpc.checkpoint.save(tmp_path / "a", own(), values=True, format="dcp")
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="rank 1 saves without values=True"):
        fsdpc.checkpoint.save(tmp_path / "a", own(), values=rank == 0)
    with pytest.raises(
        fsdpc.checkpoint.CheckpointError, match="base.weight has codes or scales of"
    ):
        fsdpc.checkpoint.save(tmp_path / "a", Model(), values=True)
    assert not (tmp_path / "a").exists()
    fsdpc.checkpoint.save(tmp_path / "codes", own())
    fsdpc.checkpoint.save(tmp_path / "others", Model())
    if rank == 0:
        path = tmp_path / "codes" / manifest.NAME
        made = manifest.decode(path.read_bytes())
        (coded,) = made.codings.values()
        assert coded["blocks.1.base.weight"] == Coding("nf4", WIDTH, torch.float32)
        for codings, text in (
            (None, "base.weight has bytes, and .* does not say .* an older one.: load it into a"),
            ({name: {"blocks.1.base.weight": Coding("nf4", 99, LOW)} for name in made.codings},
             r"weight is torch.uint8 of shape \(64, 48\), and the manifest says rows of 99 values"),
            ({name: {"blocks.1.base.weight": Coding("new", 64, LOW)} for name in made.codings},
             "base.weight is in 'new', which this fsdpc cannot read"),
        ):  # fmt: skip
            made.codings = codings
            path.write_bytes(made.encode())
            with pytest.raises(fsdpc.checkpoint.CheckpointError, match=text):
                convert(tmp_path / "codes", tmp_path / "b", None, "safetensors", values=True)
        with pytest.raises(fsdpc.checkpoint.CheckpointError, match="codes or scales of bitsandb"):
            convert(tmp_path / "others", tmp_path / "b", None, "safetensors", values=True)
        assert not (tmp_path / "b").exists()
    torch.distributed.barrier()


@ranks(1)
@every_door
def test_own_codes_refusals(rank, world, door):
    with pytest.raises(ValueError, match="unknown codec 'nf3': choose one of nf4"):
        lowbit.quantize(plain(), "nf3")
    with pytest.raises(ValueError, match="found no Linear to quantise"):
        lowbit.quantize(nn.Sequential(nn.Tanh()))
    shared = nn.ModuleDict({"decoder": nn.Linear(8, 3), "other": nn.Linear(8, 3)})
    shared["lm_head"] = shared["decoder"]
    lowbit.quantize(shared)
    assert type(shared["decoder"]) is nn.Linear and type(shared["other"]) is lowbit.Linear
    with pytest.raises(ValueError, match="found no Linear to quantise: .* only frozen weights"):
        lowbit.quantize(shared, skip=())
    tied = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0.weight is the same parameter as 1.weight, which is"):
        lowbit.quantize(tied)
    lowbit.quantize(tied, embeddings=True)
    assert tied[1].weight is tied[0].weight and tied[1].weight.dtype == torch.uint8
    model = by_door(door, own())
    for call in (lowbit.quantize, lowbit.dequantize):
        with pytest.raises(TypeError, match=f"lowbit.{call.__name__} before the model is sharded"):
            call(model)
    wide = lowbit.quantize(plain(width=32))  # at width 32, codes have the shape of the values
    expected = base(wide.state_dict())
    state = dict(plain(1, 32).named_parameters())
    wide.load_state_dict(state)
    assert base(wide.state_dict()) != expected
    sharded = by_door(door, lowbit.quantize(plain(width=32)))
    if door != "fully_shard":
        sharded.load_state_dict(state)
        assert base(sharded.state_dict()) == base(wide.state_dict())
        with (
            pytest.raises(TypeError, match=r"blocks.0: parameter base.weight has bytes, and"),
            fsdpc.FSDP.summon_full_params(sharded),
        ):
            sharded.blocks[0].base.weight = nn.Parameter(torch.ones(32, 32), False)
    else:
        with pytest.raises(RuntimeError, match=r"blocks.0.base.weight is in nf4, and .* values"):
            set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))
        assert base(sharded.state_dict()) == expected
    for value in (torch.ones(64, 64).to(torch.float8_e4m3fn), torch.ones(64, 48)):
        with pytest.raises(RuntimeError, match=r"base.weight is in nf4, and the state dict has"):
            own().load_state_dict({"blocks.0.base.weight": value}, strict=False)
    with pytest.raises(RuntimeError, match="requires_grad|floating point"):
        own().blocks[0].base.weight.requires_grad_(True)
    with pytest.raises(TypeError, match="has no initialisation: load its values"):
        own().blocks[0].base.reset_parameters()


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(1, env=env.environment())
def test_kernels_code_rows_as_the_processor_does(rank, world):
    """Kernels on the simulated GPU give the codes that the CPU gives,
    also if codes do not begin at a multiple of 16 bytes.
    """
    assert kernel_ordinal(torch.empty(1)) == 0
    for width in (64, 70, 3):
        for dtype in (torch.float32, LOW):
            rows = torch.randn(9, width, dtype=dtype)
            coded = lowbit.encode_rows(rows, "nf4")
            host, values = torch.zeros_like(coded), torch.empty_like(rows)
            _C.encode_rows("nf4", rows, host)
            _C.decode_rows("nf4", values, host)
            assert torch.equal(coded, host)
            assert torch.equal(lowbit.decode_rows(coded, width, dtype, "nf4"), values)
            moved = torch.zeros(coded.numel() + 4, dtype=torch.uint8)[4:].view_as(coded)
            moved.copy_(coded)
            assert moved.data_ptr() % 16
            assert torch.equal(lowbit.decode_rows(moved, width, dtype, "nf4"), values)


@pytest.mark.parametrize("width", [64, 70, 3])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_own_layers_compute_with_decoded_weights(width, dtype, monkeypatch):
    """Quantized layers compute what torch's layers compute with the decoded weights, whether
    weights are decoded as a whole or in parts.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, 7)).to(dtype)
    lowbit.quantize(model, embeddings=True)
    expected = lowbit.dequantize(copy.deepcopy(model))
    ids, bias, found = torch.arange(9).view(3, 3), [], []
    for each in (model, expected):
        x = each[0](ids).clone().requires_grad_()
        each[1](x).square().sum().backward()
        found.append(x.grad)
        bias.append(each[1].bias.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(bias[0], bias[1])
    monkeypatch.setattr(lowbit, "_AT_ONCE", 2 * width)
    x = model[0](ids).clone().requires_grad_()
    model[1](x).square().sum().backward()
    near = {} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.02}
    torch.testing.assert_close(x.grad, found[0], **near)
    plainly = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, 7)).to(dtype)
    plainly.load_state_dict(lowbit.values(model, model.state_dict()))
    renamed = copy.deepcopy(model)
    renamed[1] = torch.compile(renamed[1])
    state, whole = get_model_state_dict(renamed), torch.compile(renamed)
    inner = whole.state_dict()
    assert {"1.weight", "1.bias"} <= state.keys() and "_orig_mod.1._orig_mod.weight" in inner
    for given in (state, inner, {k.replace("d.1._orig_mod", "d.1"): inner[k] for k in inner}):
        found = lowbit.values(whole if given is not state else renamed, given)
        assert [v.dtype for k, v in found.items() if "weight" in k] == [dtype, dtype]
    with pytest.raises(ValueError, match="has 1.bias, but not 1.weight, which would stay in codes"):
        lowbit.values(renamed, {"1.bias": state["1.bias"]})
    again = lowbit.quantize(copy.deepcopy(plainly), embeddings=True)
    again.load_state_dict(plainly.state_dict())  # values are quantised as they are loaded
    assert torch.equal(again[0].weight, lowbit.encode_rows(plainly[0].weight, "nf4"))


@pytest.mark.parametrize("autocast", [False, True])
def test_an_input_that_was_cast_to_the_dtype_of_codes_is_refused(autocast):
    """As in T5, the block casts the input of ``wo`` to the dtype of the weight. In an earlier
    version, autocast cast the resulting bytes back to numbers.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi, self.wo = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.wo(self.wi(x).to(self.wo.weight.dtype))

    x = torch.ones(2, 64)
    with torch.autocast("cpu", LOW, enabled=autocast):
        with pytest.raises(TypeError, match=r"the input of Linear\(in_f.* is torch.uint8"):
            lowbit.quantize(Block())(x)
        kept = lowbit.quantize(Block(), skip=("wo",))
        assert torch.equal(kept(x), lowbit.dequantize(copy.deepcopy(kept))(x))


@pytest.mark.parametrize("mask", [False, True])
def test_encoders_of_torch_evaluate_by_their_layers(mask):
    """An encoder with quantized layers does not use torch's fused kernel, which would read codes as
    values and needs inputs without padding.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = lowbit.quantize(nn.TransformerEncoder(layer, 2)).eval()
    assert type(model.layers[1].linear2) is lowbit.Linear
    plainly = nn.TransformerEncoder(layer, 2).eval()
    plainly.load_state_dict(lowbit.values(model, model.state_dict()))
    x = torch.randn(3, 5, 64)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]]) if mask else None
    with torch.no_grad():
        found = model(x, src_key_padding_mask=padding)
        expected = plainly(x, src_key_padding_mask=padding)
    real = ~padding if mask else slice(None)
    torch.testing.assert_close(found[real], expected[real])
