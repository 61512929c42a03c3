"""Tests of all combinations of options: gradients and 3 optimizer steps against an unsharded copy.

The full product of strategy x prefetch x forward prefetch x accumulation x use_orig_params runs in
one launch on two ranks in fp32. Other world sizes and precisions take every STRIDE-th combination;
the world size and the precision determine the combination with which they begin. Each value of each
option occurs with each world size and each precision. `--combinations` chooses among all these
combinations. The optimizer alternates between AdamW and SGD with momentum. A failure names the
combination.

Results must be bitwise equal if values are sent without rounding, because the engine adds the
ranks' gradients in rank order. If gradients are sent in bf16 or fp16, they must agree to a few
roundings of that type. The reference model then takes the engine's gradients, so that the optimizer
step is compared by itself.
"""

from __future__ import annotations

import itertools

import on_hosts
import pytest
import torch
from combinations import subset
from harness import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from toys import (
    PRECISIONS,
    Reference,
    check_gradients,
    check_parameters,
    loss_of,
    no_sync_if,
    sharding_groups,
    tokens,
    toy,
    wrap_blocks,
)

STEPS = 3
FLAT = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
PREFETCH = [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
ACCUMULATION = ["none", "sync", "no_sync"]
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


STRIDE = 11  # shares no factor with the number of combinations


def combinations(world, precision, one_of=1):
    strategies = FLAT + (HYBRID if world == 4 else [])
    product = itertools.product(strategies, PREFETCH, [False, True], ACCUMULATION, [True, False])
    everything = world == 2 and precision == PRECISIONS[0]
    start = 0 if everything else (world + 3 * PRECISIONS.index(precision)) % STRIDE
    numbers = {values: number for number, values in enumerate(product)}
    for values in subset(list(numbers)[start :: 1 if everything else STRIDE * one_of]):
        yield numbers[values], values, list(OPTIMIZERS)[numbers[values] // 2 % 2]


@ranks(1, 2, 3, 4, timeout=150)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.name)
def test_every_combination(rank, world, engine, precision):
    check_combinations(rank, world, engine, precision)


@pytest.mark.long
@ranks(3, 4, timeout=150, env=on_hosts.counted_as("abba"))
def test_hosts_of_several_ranks(rank, world):
    """Rank 0 is on one host, and ranks 1 and 2 are on another host. If there are four ranks, rank 3
    is on the host of rank 0."""
    check_combinations(rank, world, "fsdpc", PRECISIONS[0], one_of=2)


def check_combinations(rank, world, engine, precision, one_of=1):
    hybrid_mesh = None
    if world == 4:
        hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    failures = []
    for number, values, optimizer in combinations(world, precision, one_of):
        strategy, prefetch, forward_prefetch, accumulation, use_orig_params = values
        name = (
            f"{strategy.name} {precision.name} prefetch={prefetch and prefetch.name} "
            f"forward_prefetch={forward_prefetch} accumulation={accumulation} "
            f"use_orig_params={use_orig_params} {optimizer}"
        )
        options = dict(
            sharding_strategy=strategy,
            backward_prefetch=prefetch,
            forward_prefetch=forward_prefetch,
            use_orig_params=use_orig_params,
            **precision.options(),
            **({"device_mesh": hybrid_mesh} if strategy in HYBRID else {}),
        )
        try:
            train(
                engine,
                rank,
                options,
                precision,
                accumulation,
                OPTIMIZERS[optimizer],
                seed=number,
                groups=sharding_groups(strategy, world),
            )
        except AssertionError as error:  # all ranks compare full values, so all get this error
            failures.append(f"{name}\n    {str(error)[:600]}")
        except BaseException as error:
            error.add_note(f"in combination {name}")
            raise
    assert not failures, f"{len(failures)} combinations differ, e.g.\n" + "\n".join(failures[:4])


def train(engine, rank, options, precision, accumulation, make_optimizer, seed, groups):
    model = toy(seed, precision.model)
    reference = Reference(model, precision, groups=groups)
    sharded = wrap_blocks(engine, model, **options)
    exact = engine == "fsdpc" and precision.exact
    optimizer = make_optimizer(sharded.parameters())
    reference_optimizer = make_optimizer(reference.master.parameters())
    micros = 1 if accumulation == "none" else 2
    for step in range(STEPS):
        for micro in range(micros):
            sync = accumulation != "no_sync" or micro == micros - 1
            batch = tokens(rank, step, micro)
            with no_sync_if(sharded, not sync):
                loss = loss_of(sharded, batch)
                loss.backward()
            expected = reference.backward(batch, sync=sync)
            if exact and not torch.equal(loss.detach(), expected):
                raise AssertionError(f"loss {loss} != {expected}, step {step}")
        check_gradients(engine, sharded, reference, f"of step {step}")
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")
