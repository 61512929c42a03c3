"""Tests of tiny transformers models, Llama and GPT-2, in a training loop without a framework."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from models import adamw, batch, both_models, both_ways, build, shard, shard_in_place, steps
from resume import FORMS, load, save
from torch.nn.parallel import DistributedDataParallel

from fsdpc import FSDP, FSDPModule, MixedPrecision, MixedPrecisionPolicy

DOORS = {
    "flat": functools.partial(shard, use_orig_params=False),
    "orig": functools.partial(shard, use_orig_params=True),
    "fully_shard": shard_in_place,
}


@ranks(2)
@both_models
@pytest.mark.parametrize("door", DOORS)
def test_training_equals_ddp(rank, world, name, door):
    """Losses equal DDP's to the bit, as the sum of two gradients does not depend on their order."""
    reference = DistributedDataParallel(build(name))
    model = DOORS[door](name, build(name))
    assert sum(isinstance(module, (FSDP, FSDPModule)) for module in model.modules()) == 3
    expected = steps(reference, adamw(reference), rank, 0, 5)
    assert steps(model, adamw(model), rank, 0, 5) == expected
    assert expected[-1] < expected[0]
    state, whole = model.state_dict(), reference.module.state_dict()
    assert list(state) == list(whole)
    for key, value in state.items():
        value = value.full_tensor() if door == "fully_shard" else value
        assert torch.equal(value, whole[key]), key


@ranks(2)
@both_models
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_checkpointed_blocks_and_bf16(rank, world, name, door):
    """bf16 trains, and gradient checkpointing by transformers does not change the losses."""
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if door == "orig":
        mixed = {"mixed_precision": MixedPrecision(**low)}
    else:
        mixed = {"mp_policy": MixedPrecisionPolicy(**low)}
    seen = []
    for checkpointed in (False, True):
        module = build(name)
        if checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        model = DOORS[door](name, module, **mixed)
        seen.append(steps(model, adamw(model), rank, 0, 4))
    assert seen[0] == seen[1]
    assert seen[0][-1] < seen[0][0]


@ranks(2)
@both_models
def test_generate_under_summon(rank, world, name):
    """``generate`` on full parameters gives every rank the unsharded model's tokens."""
    whole = build(name).eval()
    model = shard(name, build(name)).eval()
    prompt = batch(0, 0)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        got = model.module.generate(prompt, **options)
    assert torch.equal(got, whole.generate(prompt, **options))


@ranks(2)
@both_models
def test_saved_for_from_pretrained(rank, world, name, tmp_path):
    """``from_pretrained`` loads the full state dict that ``save_pretrained`` has written."""
    model = shard(name, build(name))
    steps(model, adamw(model), rank, 0, 2)
    state = model.state_dict()
    if rank == 0:
        model.module.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    again = type(model.module).from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = again(**batch(rank, 9)).loss
        assert torch.equal(model(**batch(rank, 9)).loss, expected)


@ranks(2)
@both_models
@both_ways
def test_only_rank_0_has_the_weights(rank, world, name, use_orig_params):
    """If only rank 0 has weights, the model of every rank equals rank 0's.

    The other ranks build the model on the meta device and get parameters and buffers from rank 0.
    The buffers include the rotary tables, which are in no state dict.
    """
    with torch.device("cpu" if rank == 0 else "meta"):
        module = build(name)
    model = shard(
        name,
        module,
        use_orig_params=use_orig_params,
        sync_module_states=True,
        param_init_fn=None if rank == 0 else lambda m: m.to_empty(device="cpu", recurse=False),
    )
    reference = DistributedDataParallel(build(name))
    assert steps(model, adamw(model), rank, 0, 4) == steps(reference, adamw(reference), rank, 0, 4)


@ranks(2)
@both_models
@both_ways
@pytest.mark.parametrize("form", FORMS)
def test_resuming_gives_the_same_losses(rank, world, name, use_orig_params, form, tmp_path):
    """A model that resumes after three steps has the same next three losses, to the bit.

    This holds also if the resumed model has the other value of ``use_orig_params``.
    """
    model = shard(name, build(name), use_orig_params=use_orig_params)
    optimizer = adamw(model)
    steps(model, optimizer, rank, 0, 3)
    save(form, model, optimizer, tmp_path)
    expected = steps(model, optimizer, rank, 3, 6)
    for shown in (use_orig_params, not use_orig_params):
        again = shard(name, build(name, seed=5), use_orig_params=shown)
        optimizer = adamw(again)
        load(form, again, optimizer, tmp_path)
        assert steps(again, optimizer, rank, 3, 6) == expected
