"""Tests of peft: LoRA adapters are trained on a frozen model."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from models import MODELS, batch, blocks, both_models, both_ways, build, steps
from resume import FORMS, load, save
from torch.nn.parallel import DistributedDataParallel

from fsdpc import FSDP

pytest.importorskip("peft", reason="peft is not installed")
from peft import (  # noqa: E402
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.other import fsdp_auto_wrap_policy  # noqa: E402

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


def with_adapters(name: str) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=TARGETS[name],
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,  # peft's default, zeros in B, would hide errors at first
    )
    return get_peft_model(build(name), config)


def peft_policy(name: str, model: PeftModel):
    """Return peft's wrap policy.

    It makes a unit of each block, and of each module without children whose weight is trainable.
    """
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = MODELS[name][1].__name__
    return fsdp_auto_wrap_policy(model)


def shard(name: str, model: PeftModel, use_orig_params: bool, policy: str) -> FSDP:
    chosen = peft_policy(name, model) if policy == "peft" else blocks(name)
    return FSDP(model, auto_wrap_policy=chosen, use_orig_params=use_orig_params)


def trained(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@ranks(2)
@both_models
@both_ways
@pytest.mark.parametrize("policy", ["blocks", "peft"])
def test_training_equals_ddp(rank, world, name, use_orig_params, policy):
    """Losses equal DDP's to the bit, and the frozen parameters do not change."""
    reference = DistributedDataParallel(with_adapters(name))
    expected = steps(reference, trained(reference), rank, 0, 5)
    model = shard(name, with_adapters(name), use_orig_params, policy)
    assert steps(model, trained(model), rank, 0, 5) == expected
    assert expected[4] < expected[0]
    state, before = model.state_dict(), with_adapters(name).state_dict()
    assert list(state) == list(before)
    changed = {key for key, value in state.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if "lora_" in key}
    whole = reference.module.state_dict()
    for key, value in state.items():
        assert torch.equal(value, whole[key]), key


@ranks(2)
@both_models
@both_ways
def test_adapters_saved_and_loaded(rank, world, name, use_orig_params, tmp_path):
    """A plain model and a sharded model load saved adapters and give the same losses.

    ``save_pretrained`` is called on an unsharded skeleton, with the full state dict. If it is
    called on a module that contains units of torch or of fsdpc, peft 0.21 saves no adapters. It
    expects other names of the adapters.
    """
    model = shard(name, with_adapters(name), use_orig_params, "blocks")
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0, 3)
    state = model.state_dict()
    if rank == 0:
        with_adapters(name).save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    plain = PeftModel.from_pretrained(build(name), tmp_path)
    again = with_adapters(name)
    set_peft_model_state_dict(again, get_peft_model_state_dict(plain))
    again = shard(name, again, use_orig_params, "peft")
    with torch.no_grad():
        loss = model(**batch(rank, 3)).loss
        assert torch.equal(plain(**batch(rank, 3)).loss, loss)
        assert torch.equal(again(**batch(rank, 3)).loss, loss)
    assert steps(again, trained(again), rank, 3, 6) == steps(model, trained(model), rank, 3, 6)


@ranks(2)
def test_an_adapter_that_peft_cannot_load_after_sharding(rank, world):
    """peft 0.21 loads nothing into an FSDP module, and fsdpc warns about this.

    peft makes keys that no FSDP module has, and loads them with ``strict=False``.
    """
    plain = with_adapters("llama")
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(0.5)
    adapter = get_peft_model_state_dict(plain)
    model = shard("llama", with_adapters("llama"), True, "blocks")
    with pytest.warns(UserWarning, match=f"loaded nothing: none of the {len(adapter)} keys"):
        set_peft_model_state_dict(model, adapter)
    named = {name: value for name, value in plain.state_dict().items() if "lora_" in name}
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    loaded = model.state_dict()
    assert len(named) == len(adapter)
    assert all(torch.equal(loaded[name], value) for name, value in named.items())


@ranks(2)
@both_ways
@pytest.mark.parametrize("form", FORMS)
def test_resuming_gives_the_same_losses(rank, world, use_orig_params, form, tmp_path):
    """A model with frozen parameters resumes with the same losses under each of two wrap policies.

    The optimizer has only the trained parameters.
    """
    model = shard("llama", with_adapters("llama"), use_orig_params, "blocks")
    optimizer = trained(model)
    steps(model, optimizer, rank, 0, 3)
    save(form, model, optimizer, tmp_path)
    expected = steps(model, optimizer, rank, 3, 6)
    for policy in ("blocks", "peft"):
        again = shard("llama", with_adapters("llama"), use_orig_params, policy)
        optimizer = trained(again)
        load(form, again, optimizer, tmp_path)
        assert steps(again, optimizer, rank, 3, 6) == expected


@ranks(2)
@both_ways
def test_adapters_loaded_into_the_sharded_model(rank, world, use_orig_params):
    """``load_state_dict`` with only adapters and ``strict=False`` does not change other values."""
    model = shard("llama", with_adapters("llama"), use_orig_params, "blocks")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapters = {key: value + 1 for key, value in before.items() if "lora_" in key}
    missing, unexpected = model.load_state_dict(adapters, strict=False)
    assert set(missing) == before.keys() - adapters.keys() and not unexpected
    for key, value in model.state_dict().items():
        assert torch.equal(value, adapters.get(key, before[key])), key
