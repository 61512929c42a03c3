"""Tests of bitsandbytes' and torchao's low-bit parameters on fsdpc.

A test is skipped if its library is not installed. ``make test`` installs neither, because with them
every import of peft takes longer.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpc

needs_bitsandbytes, needs_torchao, needs_peft = (
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("bitsandbytes", "torchao", "peft")
)
every_door = pytest.mark.parametrize("door", ["original", "flat", "fully_shard"])


class Block(nn.Module):
    def __init__(self, width, make):
        super().__init__()
        self.base = make(width)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(make, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, make) for _ in range(2)), nn.Linear(width, 3))


def shard(door, model, low=False):
    if door == "fully_shard":
        policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if low else {}
        for module in (*model[:2], model):
            fsdpc.fully_shard(module, **policy)
        return model
    policy = ModuleWrapPolicy({Block})
    mixed = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)} if low else {}
    original = door == "original"
    return fsdpc.FSDP(model, auto_wrap_policy=policy, use_orig_params=original, **mixed)


def train(model, of, width=64):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        for rank in of:
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(4, width, generator=generator)).float().square().mean()
            (loss / len(of)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_bitsandbytes
@ranks(2)
@every_door
def test_bitsandbytes(rank, world, door):
    """Sharded models with double-quantized weights train like an unsharded model.

    This holds for every dtype in which the 4-bit codes are stored (``quant_storage``). The sharded
    models also load their own state dicts.
    """
    import bitsandbytes as bnb

    def make(storage):
        def linear(width):
            options = {"quant_type": "nf4", "quant_storage": storage, "bias": False}
            return bnb.nn.Linear4bit(width, width, compute_dtype=torch.float32, **options)

        return model_of(linear).to("cpu")

    plain, low = make(torch.uint8), []
    expected = train(plain, [1 - rank, rank])
    for storage in (torch.uint8, torch.float16, torch.float32):
        model = shard(door, make(storage))
        assert train(model, [rank]) == expected
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        model.load_state_dict(state)
        assert type(model[0].base.weight).__name__ != "Parameter"
        low.append(train(shard(door, make(storage), low=True), [rank]))
    assert low[0] == low[1] == low[2]


@needs_bitsandbytes
@needs_peft
@ranks(2)
def test_adapters_of_peft_are_saved_and_merged(rank, world, tmp_path):
    import peft
    from models import batch, build, shard, steps
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    if rank == 0:
        build("llama").save_pretrained(tmp_path / "base")
    dist.barrier()
    quantise = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=torch.float32,
        bnb_4bit_use_double_quant=True,
    )

    def base():
        return LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantise)

    def with_adapters():
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
        return peft.get_peft_model(base(), peft.LoraConfig(**options))

    model = shard("llama", with_adapters(), use_orig_params=False)
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank, 0, 3)
    state = model.state_dict()
    if rank == 0:
        with_adapters().save_pretrained(tmp_path / "adapters", state_dict=state)
    dist.barrier()
    plain = peft.PeftModel.from_pretrained(base(), tmp_path / "adapters")
    with torch.no_grad():
        loss = model(**batch(rank, 3)).loss
        assert torch.equal(plain(**batch(rank, 3)).loss, loss)
        merged = plain.merge_and_unload()
        assert merged(**batch(rank, 3)).loss.item() == pytest.approx(loss.item(), rel=0.05)


@needs_torchao
@ranks(2)
def test_torchao(rank, world):
    """Models with float8 or NF4 weights train the same with fully_shard and without it.

    FullyShardedDataParallel raises an error for both kinds of weights.
    """
    import torchao.float8 as ao
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Nf4(nn.Module):
        def __init__(self, width):
            super().__init__()
            value = to_nf4(torch.randn(width, width) / 16, scaler_block_size=256)
            self.weight = nn.Parameter(value, requires_grad=False)

        def forward(self, x):
            return linear_nf4(x, self.weight)

    def float8():
        config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return ao.convert_to_float8_training(
            model_of(functools.partial(nn.Linear, 256), 256),
            config=config,
            module_filter_fn=lambda module, name: name.endswith("base"),
        )

    for make in (float8, lambda: model_of(Nf4, 256)):
        expected = train(make(), [1 - rank, rank], 256)
        assert train(shard("fully_shard", make()), [rank], 256) == expected
        with pytest.raises(TypeError, match="memory only its own code knows: shard the module by"):
            shard("flat", make())
