"""Tests of optimizer state dicts in the FULL form: they equal those of the unsharded model's
optimizer, and load into models that are sharded in any other way.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from optim_runs import (
    Run,
    adam,
    both,
    check_dict,
    check_states,
    load,
    mixed,
    on_rank_0,
    options_of,
    save,
    start,
)
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import Block, loss_of, tokens, toy, wrap_blocks

WIRE = {"FSDPC_COLLECTIVES": "wire"}
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


def check_full(run: Run) -> None:
    check_dict(save(run), run.expected())


@ranks(1, 2, 3)
@both
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_equal_to_the_unsharded_optimizers(rank, world, strategy, use_orig_params):
    run = start(rank, mixed(), sharding_strategy=strategy, use_orig_params=use_orig_params)
    for _ in range(2):
        check_full(run)
        run.train()


@ranks(2, env=WIRE)  # with 2 ranks, the order of ranks does not change a sum
@both
def test_over_torchs_collectives(rank, world, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    check_full(run)
    again = start(rank, mixed(), steps=0, use_orig_params=use_orig_params)
    saved = save(run)
    with on_rank_0(again.model):
        load(again, saved if rank == 0 else None)
    check_dict(save(again), run.expected())


@ranks(4)
@both
def test_hybrid(rank, world, use_orig_params):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair = (groups[rank // 2], groups[2 + rank % 2])

    def started():
        return start(
            rank,
            toy(),
            process_group=pair,
            use_orig_params=use_orig_params,
            steps=0,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )

    run = started()
    run.reference.groups = [[0, 1], [2, 3]]
    run.train(2)
    check_full(run)
    with on_rank_0(run.model):
        saved = save(run)
        assert bool(saved) == (rank == 0)
        again = started()
    with on_rank_0(again.model):
        load(again, saved)
    check_dict(save(again), run.expected())


# --- back again ----------------------------------------------------------------------------------


def saved_by(rank, world, policy, use_orig_params):
    run = start(rank, mixed(), policy=policy, use_orig_params=use_orig_params)
    parameters = run.model.state_dict()
    return parameters, save(run), run.train(3)


def resumed(rank, world, policy, use_orig_params, parameters, optim):
    """Load and train on as the first run did:
    each rank computes the batches of both ranks of the first run.
    """
    model = wrap_blocks("fsdpc", mixed(seed=5), *policy, use_orig_params=use_orig_params)
    model.load_state_dict(parameters)
    run = Run(model, adam(model), None, None, rank)
    load(run, optim)
    got = save(run)
    check_dict(got, optim)
    losses = []
    for number in range(2, 5):
        mean = sum(loss_of(model, tokens(r, number)) for r in range(2)) / 2
        mean.backward()
        run.optim.step()
        run.optim.zero_grad()
        losses.append(mean.detach())
    return losses


NORM = (Block, nn.LayerNorm)


@both
@pytest.mark.parametrize(
    "world,policy,before",
    [(1, (Block,), True), (3, NORM, True), (3, (Block,), False), (2, NORM, False)],
    ids=["1", "3-norms", "3-from-flat", "2-norms-from-flat"],
)
def test_resumed_under_another_world_wrapping_and_kind(world, policy, before, use_orig_params):
    saved = run_ranks(saved_by, 2, policy=(Block,), use_orig_params=before)
    expected = [sum(losses) / 2 for losses in zip(saved[0][2], saved[1][2], strict=True)]
    for losses in run_ranks(
        resumed,
        world,
        policy=policy,
        use_orig_params=use_orig_params,
        parameters=saved[0][0],
        optim=saved[0][1],
    ):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)


@ranks(2)
@both
def test_resumed_losses_are_the_uninterrupted_runs(rank, world, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    parameters, saved = run.model.state_dict(), save(run)
    expected = run.train(3)
    again = start(rank, mixed(seed=3), steps=0, use_orig_params=use_orig_params)
    again.model.load_state_dict(parameters)
    load(again, saved, load_directly=True)
    again.steps = 2
    before = copy.deepcopy(saved)
    assert again.train(3) == expected
    check_dict(saved, before)  # the optimizer has changed only its own copies


@ranks(3)
@both
def test_rank0_only(rank, world, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    with on_rank_0(run.model):
        saved = save(run)
    if rank == 0:
        check_dict(saved, run.expected())
    else:
        assert saved == {}
    again = start(rank, mixed(), steps=0, use_orig_params=use_orig_params)
    with on_rank_0(again.model):
        load(again, saved)
    check_dict(save(again), run.expected())


# --- optimizers ----------------------------------------------------------------------------------


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1, "lr": 1e-2, "tag": "w"},
            {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        ],
        lr=1e-3,
        amsgrad=True,
    )


@ranks(2)
def test_groups_keep_their_options_and_division(rank, world):
    run = start(rank, mixed(), make=decayed, use_orig_params=True)
    check_full(run)
    saved = save(run)
    again = start(
        rank,
        mixed(),
        steps=0,
        use_orig_params=True,
        policy=NORM,
        make=lambda model: (
            torch.optim.AdamW(list(reversed(decayed(model).param_groups)), amsgrad=True)
        ),
    )
    load(again, saved)
    got = save(again)
    check_states(got["state"], saved["state"])
    assert options_of(again.optim.param_groups) == options_of(saved["param_groups"])[::-1]
    assert [set(g["params"]) for g in got["param_groups"]] == [
        set(g["params"]) for g in saved["param_groups"][::-1]
    ]
    flat = start(rank, mixed(), steps=0, use_orig_params=False)
    with pytest.raises(ValueError, match="different options"):
        load(flat, saved)


MAKERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "plain_sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.1),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "tensor_lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "names": lambda m: torch.optim.Adam(m.named_parameters(), lr=0.01),
}


@ranks(2)
@both
@pytest.mark.parametrize("name", MAKERS)
def test_other_optimizers(rank, world, name, use_orig_params):
    run = start(rank, toy(), make=MAKERS[name], use_orig_params=use_orig_params)
    saved = save(run)
    check_full(run)
    if name == "names":
        assert [g["param_names"] for g in saved["param_groups"]] == [
            g["params"] for g in saved["param_groups"]
        ]
    again = start(rank, toy(), steps=0, make=MAKERS[name], use_orig_params=use_orig_params)
    load(again, saved)
    check_dict(save(again), saved)
