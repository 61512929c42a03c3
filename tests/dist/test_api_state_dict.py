"""Full state dicts equal the unsharded model's in keys, order, values and metadata."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import FULL, LOCAL, SHARDED, mixed, same, typed
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from toys import Block, loss_of, tokens, toy, wrap, wrap_blocks


def stage_policy():
    return ModuleWrapPolicy({nn.Sequential})


@ranks(1, 2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_equal_to_the_unsharded_models(rank, world, use_orig_params):
    expected = mixed().state_dict()
    model = mixed()
    model.again = None  # another test covers the shared module
    expected = {k: v for k, v in expected.items() if not k.startswith("again")}
    model = wrap("fsdpc", model, auto_wrap_policy=stage_policy(), use_orig_params=use_orig_params)
    for _ in range(2):
        got = model.state_dict()
        same(got, expected)
        assert got["head.weight"].data_ptr() == got["embed.weight"].data_ptr(), "the tie is kept"


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_module_at_two_places_is_saved_under_both_names(rank, world, use_orig_params):
    for policy in (None, ModuleWrapPolicy({nn.Linear})):
        plain = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2)})
        plain["again"] = plain["a"]
        expected = copy.deepcopy(plain.state_dict())
        model = wrap("fsdpc", plain, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        same(model.state_dict(), expected)


@ranks(2)
def test_metadata_is_the_unsharded_models(rank, world):
    expected = toy().state_dict()._metadata
    got = wrap_blocks("fsdpc", toy()).state_dict()._metadata
    assert dict(got) == dict(expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
def test_round_trip_and_training_goes_on(rank, world, engine, strategy, use_orig_params):
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = wrap_blocks(engine, toy(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    other = wrap_blocks(engine, toy(seed=1), **options)
    result = other.load_state_dict(saved)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    same(other.state_dict(), saved)
    plain = toy(seed=2)
    plain.load_state_dict(saved)
    torch.testing.assert_close(
        loss_of(other, tokens(rank, 1)), loss_of(plain, tokens(rank, 1)), rtol=1e-6, atol=0
    )
    loss_of(other, tokens(rank, 1)).backward()


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_units_nested_in_a_plain_model(rank, world, engine, use_orig_params):
    plain = toy()
    expected = copy.deepcopy(plain.state_dict())
    for i in range(2):
        plain.blocks[i] = wrap(engine, plain.blocks[i], use_orig_params=use_orig_params)
    same(plain.state_dict(), expected)
    other = toy(seed=3).state_dict()
    plain.load_state_dict(other)
    same(plain.state_dict(), other)


@ranks(2)
def test_activation_wrappers_leave_no_trace(rank, world, engine):
    expected = toy().state_dict()
    inside = toy()
    for i in range(2):
        inside.blocks[i] = wrap(engine, checkpoint_wrapper(inside.blocks[i]))
    outside = wrap_blocks(engine, toy())
    apply_activation_checkpointing(outside, check_fn=lambda m: isinstance(m, Block))
    for model in (wrap(engine, inside), outside):
        same(model.state_dict(), expected)
        model.load_state_dict(toy(seed=5).state_dict())
        same(model.state_dict(), toy(seed=5).state_dict())


@ranks(2)
def test_rank0_only(rank, world):
    model = toy()
    expected = copy.deepcopy(model.state_dict())
    model = wrap_blocks("fsdpc", model, ignored_modules=[model.norm])
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with type(model).state_dict_type(model, FULL, config):
        got = model.state_dict()
    same(got, expected if rank == 0 else {k: expected[k] for k in ("norm.weight", "norm.bias")})
    same(model.state_dict(), expected)


@ranks(2)
def test_low_precision_buffers_come_back(rank, world, engine):
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("offset", torch.tensor([1.5, 2.0]))
            self.register_buffer("steps", torch.tensor([3]))

        def forward(self, x):
            assert self.offset.dtype == torch.bfloat16 and self.steps.dtype == torch.int64
            return self.linear(x) + self.offset.sum()

    model = wrap(engine, nn.Sequential(Buffered()), mixed_precision=precision)
    model(torch.randn(2, 3))
    got = model.state_dict()
    assert got["0.offset"].dtype == torch.float32 and got["0.offset"].tolist() == [1.5, 2.0]
    assert got["0.steps"].dtype == torch.int64
    model.load_state_dict({**got, "0.offset": torch.tensor([4.0, 5.0])})
    assert model.state_dict()["0.offset"].tolist() == [4.0, 5.0]
    assert next(iter(model.buffers())).dtype == torch.bfloat16


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_strict_loading_names_keys_cleanly(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    state = toy(seed=1).state_dict()
    del state["blocks.1.up.bias"], state["head.weight"]
    state["blocks.0.norm.extra"] = state["surplus"] = torch.zeros(1)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["blocks.1.up.bias", "head.weight"]
    assert sorted(result.unexpected_keys) == ["blocks.0.norm.extra", "surplus"]
    got = model.state_dict()
    assert torch.equal(got["head.weight"], expected["head.weight"]), "what is missing stays"
    assert torch.equal(got["head.bias"], state["head.bias"])
    with pytest.raises(RuntimeError, match=r'"blocks.1.up.bias", "head.weight"'):
        model.load_state_dict(state)
    wrong = {**expected, "blocks.0.up.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight"):
        model.load_state_dict(wrong)
    loss_of(model, tokens(rank, 0)).backward()


@ranks(1, 2)
def test_a_part_of_a_flat_parameter(rank, world):
    """Loading into a module inside of a flat unit raises, as the module has no parameters.

    It also raises with strict=False, which would otherwise load nothing without an error.
    """
    model, expected = copy.deepcopy(wrap("fsdpc", toy())), toy()
    inner, values = model.module.blocks[1], toy(seed=1).blocks[1].state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"up\.weight is .*load through the FSDP module"):
            inner.load_state_dict(values, strict=strict)
    same(model.state_dict(), expected.state_dict())
    if world > 1:
        none = pytest.raises(RuntimeError, match=r"No `FlatParameter`.*head\.weight")
        with typed(model, LOCAL), none:
            model.load_state_dict(expected.state_dict(), strict=False)
    for seed, kind in enumerate((FULL, SHARDED), 1):
        other = wrap("fsdpc", toy(seed=seed))
        with typed(model, kind), typed(other, kind):
            state = other.state_dict()
            part = {key: value for key, value in state.items() if key.startswith("blocks.1.")}
            result = model.load_state_dict(part, strict=False)
        assert result.missing_keys == [key for key in state if key not in part]
        expected.blocks[1].load_state_dict(toy(seed=seed).blocks[1].state_dict())
        same(model.state_dict(), expected.state_dict())
    with type(model).summon_full_params(model):
        inner.load_state_dict(values)
    expected.blocks[1].load_state_dict(values)
    same(model.state_dict(), expected.state_dict())


@ranks(2)
def test_loading_by_assignment(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    params = list(model.parameters())
    state = toy(seed=4).state_dict()
    model.load_state_dict(state, assign=True)
    same(model.state_dict(), state)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


@ranks(2)
def test_units_are_unsharded_one_chain_at_a_time(rank, world):
    model = wrap_blocks("fsdpc", toy(blocks=4))
    members = type(model).fsdp_modules(model)
    seen = []

    def look(*args):
        seen.append([m._handle.state == "summoned" for m in members])

    for block in model.blocks:
        block.module.up.register_state_dict_pre_hook(look)
    model.state_dict()
    expected = [[True, *(i == j for j in range(4))] for i in range(4)]
    assert seen == expected
    assert not any(m._handle.state == "summoned" for m in members)


@ranks(2)
def test_a_failed_save_leaves_the_model_usable(rank, world):
    model = wrap("fsdpc", toy(), auto_wrap_policy=always_wrap_policy)

    def fail(*args):
        raise OSError("disk")

    handle = model.blocks[1].up.register_state_dict_pre_hook(fail)
    with pytest.raises(OSError, match="disk"):
        model.state_dict()
    handle.remove()
    same(model.state_dict(), toy().state_dict())
    loss_of(model, tokens(rank, 0)).backward()
