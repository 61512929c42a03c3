"""Private attributes of torch's flat parameter and its handle that frameworks read and set."""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import FlatParameter
from toys import Block, check_equal, full_parameters, loss_of, tokens, toy, wrap_blocks

BF16 = torch.bfloat16
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])


def units(model):
    return type(model).fsdp_modules(model)


def frozen_toy() -> nn.Module:
    """Return a Toy whose units have two segments: frozen norms in fp32, and the rest in bf16."""
    model = toy(dtype=BF16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float().requires_grad_(False)
    return model


@ranks(2)
@both_ways
def test_the_flat_parameter_says_what_it_stands_for(rank, world, engine, use_orig_params):
    model = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
    for unit, inner in zip(units(model), (None, Block(), Block()), strict=True):
        flat = unit._flat_param
        assert isinstance(flat, nn.Parameter) and isinstance(flat, FlatParameter)
        assert flat.dtype == torch.float32 and flat.requires_grad and flat.dim() == 1
        if inner is not None:
            assert set(flat._fqns) == {name for name, _ in inner.named_parameters()}
        assert unit._handle._orig_param_dtype == torch.float32
        total = torch.tensor(flat.numel())
        torch.distributed.all_reduce(total)
        assert total >= sum(p.numel() for p in (inner or nn.Module()).parameters())


@ranks(2)
@both_ways
def test_raising_the_storage_dtype(rank, world, use_orig_params):
    """The storage dtype of a unit can be raised in the way that accelerate raises it.

    Only the trainable parameters of the unit change, to equal values. With use_orig_params the
    parameters stay the same objects.
    """
    model = wrap_blocks("fsdpc", frozen_toy(), use_orig_params=use_orig_params)
    before, objects = full_parameters(model), list(model.parameters())
    root, first, second = units(model)
    flat = first._flat_param
    assert flat.dtype == BF16 and flat.requires_grad
    flat.data = flat.data.to(torch.float32)
    first._handle._orig_param_dtype = torch.float32
    for unit, dtype in ((root, BF16), (first, torch.float32), (second, BF16)):
        assert unit._flat_param.dtype == unit._handle._orig_param_dtype == dtype
        trained = {p.dtype for p in unit.params if p.requires_grad}
        assert trained == {dtype}
    after = full_parameters(model)
    check_equal(
        {k: v.float() for k, v in after.items()},
        {k: v.float() for k, v in before.items()},
        "after raising",
    )
    changed = {name for name in before if before[name].dtype != after[name].dtype}
    expected = {f"blocks.0.{name}" for name in ("up.weight", "up.bias", "down.weight")}
    assert changed == expected
    if use_orig_params:
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    first._handle._orig_param_dtype = torch.float32  # changes nothing, as it is float32 already


@ranks(2)
@both_ways
def test_training_after_raising_is_training_in_fp32(rank, world, use_orig_params):
    raised = wrap_blocks("fsdpc", toy(dtype=BF16), use_orig_params=use_orig_params)
    for unit in units(raised):
        unit._handle._orig_param_dtype = torch.float32
    plain = wrap_blocks("fsdpc", toy(dtype=BF16).float(), use_orig_params=use_orig_params)
    for model in (raised, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_equal(full_parameters(raised), full_parameters(plain), "trained")


@ranks(1, 2, 3)
@both_ways
def test_the_flat_parameter_tells_where_its_parameters_lie(rank, world, use_orig_params):
    """``_shard_param_infos`` and similar attributes describe the flat parameter correctly.

    The test cuts the values of each parameter out of the flat parameter, and compares them.
    """
    model = wrap_blocks("fsdpc", frozen_toy(), use_orig_params=use_orig_params)
    whole = full_parameters(model)
    for unit, prefix in zip(units(model), ("", "blocks.0.", "blocks.1."), strict=True):
        flats = [unit._flat_param] if use_orig_params else unit.params
        for flat in flats:
            assert isinstance(flat, FlatParameter) and flat._num_params == len(flat._fqns) > 0
            assert flat._local_shard.data_ptr() == flat.data_ptr()
            assert flat._sharded_size == flat.size()
            assert sum(flat._numels_with_padding) == flat._unpadded_unsharded_size.numel()
            assert flat._padded_unsharded_size.numel() == world * flat.numel()
            assert flat._is_padding_mask.count(False) == flat._num_params
            rows = zip(flat._fqns, flat._shapes, flat._numels, flat._shard_param_infos, strict=True)
            held = 0
            for name, shape, numel, info in rows:
                full = whole[prefix + name]
                assert (full.shape, full.numel()) == (shape, numel)
                if info.in_shard:
                    mine = flat.detach()[info.offset_in_shard :][: info.numel_in_shard]
                    begin, end = info.intra_param_start_idx, info.intra_param_end_idx
                    assert torch.equal(mine, full.flatten()[begin : end + 1])
                    held = max(held, info.offset_in_shard + info.numel_in_shard)
            assert flat._shard_numel_padded == flat.numel() - held
        if use_orig_params:
            own = dict(unit.module.named_parameters())
            for name, p in zip(flats[0]._fqns, flats[0]._params, strict=True):
                if prefix:
                    assert p is own[name]
