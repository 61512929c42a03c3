"""Tests of two sharded models in one program, one of which runs inside the other's forward or
backward: a teacher, a perceptual loss, checkpoints that alternate.

Ranks sleep at random places, so that they drift apart as far as they can. The parameters after all
steps must equal those of unsharded copies.
"""

from __future__ import annotations

import copy
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import Block, check_equal, full_parameters, wrap_blocks

from fsdpc._comm import bootstrap as _bootstrap

STEPS = 40 if os.environ.get("FSDPC_TEST_COMBINATIONS", "all") == "all" else 10
DEADLINE = {"FSDPC_TIMEOUT": "15"}
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])


class Taught(Block):
    """A block that calls `sleep`, computes, calls `inner` on its output, and calls `sleep`
    again."""

    def __init__(self):
        super().__init__()
        self.inner = self.sleep = nothing

    def forward(self, x):
        self.sleep()
        y = super().forward(x)
        y = self.inner(y)
        self.sleep()
        return y


def nothing(x=None):
    return x


def sleeper(rank, seed):
    generator = random.Random(1000 * seed + rank)

    def sleep(x=None):
        if generator.random() < 0.2:
            time.sleep(generator.random() * 0.003)
        return x

    return sleep


def blocks(seed, count, kind=Block):
    torch.manual_seed(seed)
    return nn.Sequential(*(kind() for _ in range(count)))


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 6, generator=generator)


def set_inner(student, inner, sleep=nothing, at=(2, 5)):
    """Let the blocks with the indices `at` call `inner` on their outputs. Blocks 2 and 5, the
    default, use different gather slots."""
    found = [m for m in student.modules() if isinstance(m, Taught)]
    for i, block in enumerate(found):
        block.inner = inner if i in at else sleep
        block.sleep = sleep


# --- what is run inside ---------------------------------------------------------------------------


def teach_no_grad(teacher):
    def inner(y):
        with torch.no_grad():
            t = teacher(y.detach())
        return y + 0.1 * t

    return inner


def teach_through(teacher):
    return lambda y: y + 0.1 * teacher(y)


def teach_in_backward(teacher):
    def hook(grad):
        with torch.no_grad():
            return grad + 0.01 * teacher(grad)

    def inner(y):
        if y.requires_grad:
            y.register_hook(hook)
        return y

    return inner


INNER = {"no_grad": teach_no_grad, "through": teach_through, "backward": teach_in_backward}


def train(rank, world, student, step_of, steps=STEPS):
    """Train `student`, a pair of a sharded model and its unsharded copy, and compare the
    parameters of both. `step_of(model, batch, step, plain)` returns the loss; `plain` is True for
    the copy."""
    optimizer = torch.optim.SGD(student[0].parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(student[1].parameters(), lr=0.05)
    for step in range(steps):
        step_of(student[0], batch_of(rank, step), step, False).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(steps):
        for r in range(world):
            step_of(student[1], batch_of(r, step), step, True).backward()
        take_mean_step(plain_optimizer, world)
    expected = {name: p.detach() for name, p in student[1].named_parameters()}
    check_equal(full_parameters(student[0]), expected, "after the last step", rtol=1e-4)


def take_mean_step(optimizer, world):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= world
    optimizer.step()
    optimizer.zero_grad()


def distil(rank, world, seed, mode, use_orig_params, teacher_group=None):
    options = {"use_orig_params": use_orig_params}
    plain_teacher = blocks(1, 4).requires_grad_(False)
    plain = blocks(0, 6, Taught)
    teacher = wrap_blocks(
        "fsdpc", copy.deepcopy(plain_teacher), process_group=teacher_group, **options
    )
    sharded = wrap_blocks("fsdpc", copy.deepcopy(plain), Taught, **options)
    set_inner(sharded, INNER[mode](teacher), sleeper(rank, seed))
    set_inner(plain, INNER[mode](plain_teacher))
    train(rank, world, (sharded, plain), lambda model, x, *_: model(x).square().mean())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", INNER)
@both_ways
@ranks(2, 3, env=DEADLINE)
def test_teacher_inside(rank, world, seed, mode, use_orig_params):
    distil(rank, world, seed, mode, use_orig_params)


@pytest.mark.long
@pytest.mark.parametrize("mode", INNER)
@ranks(4, env=DEADLINE)
def test_teacher_inside_on_four_ranks(rank, world, mode):
    distil(rank, world, 7, mode, use_orig_params=True)


@pytest.mark.parametrize("mode", INNER)
@ranks(2, 3, env=DEADLINE)
def test_teacher_of_another_group(rank, world, mode):
    """The teacher has its own process group, so its ranks wait in another shared memory segment."""
    distil(rank, world, 3, mode, True, dist.new_group(list(range(world))))


@pytest.mark.long
@pytest.mark.parametrize("mode", INNER)
@ranks(4, env=DEADLINE)
def test_teacher_of_a_smaller_group(rank, world, mode):
    """Ranks 0 and 1 share one copy of the teacher, and ranks 2 and 3 share another copy."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    distil(rank, world, 4, mode, True, pairs[rank // 2])


@pytest.mark.long
@both_ways
@ranks(2, 3, env=DEADLINE)
def test_checkpoints_that_alternate(rank, world, use_orig_params):
    """Two models run in turn, and each is recomputed inside the other's backward."""
    plain = nn.ModuleList([blocks(0, 4, Taught), blocks(1, 4, Taught)])
    sharded = nn.ModuleList(
        wrap_blocks("fsdpc", copy.deepcopy(m), Taught, use_orig_params=use_orig_params)
        for m in plain
    )
    set_inner(sharded, nothing, sleeper(rank, 5))

    def loss(pair, x):
        x = x.clone().requires_grad_()
        for part in (*pair, *pair):
            x = checkpoint(part, x, use_reentrant=True)
        return x.square().mean()

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.001)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.001)
    for step in range(STEPS):
        loss(sharded, batch_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(STEPS):
        for r in range(world):
            loss(plain, batch_of(r, step)).backward()
        take_mean_step(plain_optimizer, world)
    for part, reference in zip(sharded, plain, strict=True):
        expected = {name: p.detach() for name, p in reference.named_parameters()}
        check_equal(full_parameters(part), expected, "after the last step", rtol=1e-3)


@pytest.mark.parametrize("same_group", [True, False])
@ranks(2, 3, env=DEADLINE)
def test_a_step_in_another_order(rank, world, same_group):
    """In every third step, rank 1 evaluates the teacher after the student's forward, and the other
    ranks evaluate the teacher before it."""
    group = None if same_group else dist.new_group(list(range(world)))
    plain_teacher, plain = blocks(1, 4).requires_grad_(False), blocks(0, 6, Taught)
    teacher = wrap_blocks("fsdpc", copy.deepcopy(plain_teacher), process_group=group)
    sharded = wrap_blocks("fsdpc", copy.deepcopy(plain), Taught)
    set_inner(sharded, nothing, sleeper(rank, 6))

    def step_of(model, x, step, unsharded):
        judge = plain_teacher if unsharded else teacher
        late = step % 3 == 1 and rank == 1 and not unsharded
        with torch.no_grad():
            wanted = None if late else judge(x)
        y = model(x)
        with torch.no_grad():
            wanted = judge(x) if late else wanted
        return (y - wanted).square().mean()

    train(rank, world, (sharded, plain), step_of)


@ranks(2, 3, env=DEADLINE)
def test_teacher_that_follows(rank, world):
    """The teacher's parameters are averaged with the student's before each forward, without a
    backward of the teacher in between. Values that were gathered in an earlier step would change
    the results."""
    plain, plain_teacher = blocks(0, 6, Taught), blocks(0, 6, Taught).requires_grad_(False)
    sharded = wrap_blocks("fsdpc", copy.deepcopy(plain), Taught, use_orig_params=True)
    teacher = wrap_blocks("fsdpc", copy.deepcopy(plain_teacher), Taught, use_orig_params=True)
    set_inner(teacher, nothing, sleeper(rank, 9))

    def step_of(model, x, step, unsharded):
        judge = plain_teacher if unsharded else teacher
        # The unsharded teacher is averaged once in a step, not once for each rank's batch.
        if not unsharded or step_of.moved != step:
            step_of.moved = step
            with torch.no_grad():
                for p, q in zip(judge.parameters(), model.parameters(), strict=True):
                    p.mul_(0.5).add_(q, alpha=0.5)
        return model(x).square().mean()

    step_of.moved = -1
    set_inner(sharded, teach_no_grad(teacher), sleeper(rank, 8))
    set_inner(plain, teach_no_grad(plain_teacher))
    train(rank, world, (sharded, plain), step_of)


# --- waits that fsdpc does not see ----------------------------------------------------------------


def sum_in_both_directions(y):
    """Call one collective of torch in forward and one in backward, as an exchange between experts
    does."""
    dist.all_reduce(y.detach().clone())
    if y.requires_grad:
        y.register_hook(lambda grad: dist.all_reduce(grad.clone()) and None)
    return y


@both_ways
@ranks(2, 3, timeout=120, env=DEADLINE)
def test_collectives_inside(rank, world, use_orig_params):
    """Each unit calls a collective of torch while the next unit is being prefetched."""
    plain = blocks(0, 6, Taught)
    sharded = wrap_blocks(
        "fsdpc",
        copy.deepcopy(plain),
        Taught,
        forward_prefetch=True,
        use_orig_params=use_orig_params,
    )
    set_inner(sharded, sum_in_both_directions, sleeper(rank, 3), at=range(6))
    set_inner(plain, nothing)
    train(rank, world, (sharded, plain), lambda model, x, *_: model(x).square().mean())


# --- a rank that ends before the others -----------------------------------------------------------


def run_fewer_steps(rank, world):
    sharded = wrap_blocks("fsdpc", blocks(0, 3))
    if rank == 1:
        time.sleep(0.5)
    for step in range(2 if rank == 1 else 3):
        sharded(batch_of(rank, step)).square().mean().backward()
    if rank == 1:
        _bootstrap._leave()  # what happens when a program ends


def test_ranks_that_have_left_are_not_waited_for():
    outcomes = run_ranks(run_fewer_steps, 2, faults=True, env={"FSDPC_TIMEOUT": "30"})
    # The error is not a timeout, because the wait ended before the deadline.
    assert "rank 1 has left" in (outcomes[0].error or ""), outcomes[0].log
