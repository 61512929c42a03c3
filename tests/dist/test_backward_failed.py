"""Programs that go on after a backward that raised: they save, copy, read or train the model.

The values are those of the same program without the failed step.
"""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from checkpoints import typed, whole
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.utils.checkpoint import checkpoint
from toys import (
    Reference,
    check_equal,
    check_gradients,
    full_gradients,
    full_parameters,
    no_sync_if,
    summon,
    wrap,
    wrap_blocks,
)

import fsdpc
from fsdpc import FullyShardedDataParallel as FSDP

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
ZEROS = pytest.mark.parametrize("to_none", [True, False])
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
IN_BACKWARD = r"unit '.+' is in backward on rank \d: save and load state dicts between steps"


class Planted(Exception):
    """The error that the tests raise in a backward."""


def raise_planted(grad):
    raise Planted("planted")


def interrupt(grad):
    raise KeyboardInterrupt


class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Planted("planted")


def by_parameter_hook(block, x):
    weight = block.up.weight.view_as(block.up.weight)
    weight.register_hook(raise_planted)
    return x + block.down(torch.tanh(nn.functional.linear(block.norm(x), weight, block.up.bias)))


def by_function(block, x):
    return x + Burn.apply(block.down(torch.tanh(block.up(block.norm(x)))))


def by_version(block, x):
    y = torch.tanh(block.up(block.norm(x)))
    z = block.down(y.clone())
    y.add_(1.0)
    return x + z + (y * y).mean()


def by_interrupt(block, x):
    y = block.down(torch.tanh(block.up(block.norm(x))))
    y.register_hook(interrupt)
    return x + y


FAULTS = {
    "parameter hook": (by_parameter_hook, Planted),
    "function": (by_function, Planted),
    "version": (by_version, RuntimeError),
    "interrupt": (by_interrupt, KeyboardInterrupt),
}


class Block(nn.Module):
    """A block like that of the toys. If `fault` is set, its backward raises an error."""

    def __init__(self, width=6, hidden=11, recompute=""):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.recompute, self.fault, self.watch = recompute, None, None

    def body(self, x):
        if self.fault and torch.is_grad_enabled():
            return self.fault(self, x)
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        if self.watch is not None and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self.watch)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
        return self.body(x)


class Model(nn.Module):
    def __init__(self, recompute=""):
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(recompute=recompute) for _ in range(3))
        self.outlet = nn.Linear(6, 3)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def squares(model, x):
    return model(x).square().mean()


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def block_of(model, number):
    return [m for m in model.modules() if isinstance(m, Block)][number]


class Run:
    """A sharded model, its optimizer, and what a training script does with them."""

    def __init__(self, rank, recompute="", model=None, **options):
        torch.manual_seed(0)
        self.rank, self.use_orig_params = rank, options["use_orig_params"]
        self.model = wrap_blocks("fsdpc", model or Model(recompute), Block, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, number):
        squares(self.model, batch(self.rank, number)).backward()

    def step(self, number, to_none=True):
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad(to_none)

    def fail(self, number, kind="function", block=1):
        fault, error = FAULTS[kind]
        failing = block_of(self.model, block)
        failing.fault = fault
        try:
            with pytest.raises(error):
                self.backward(number)
        finally:
            failing.fault = None


def everything(run):
    """Return the whole values of state dicts, of a copy of the model, and of full parameters."""
    model, optimizer, found = run.model, run.optimizer, {}
    for kind in (FULL, SHARDED, LOCAL):
        with typed(model, kind):
            state = model.state_dict()
            if kind is LOCAL:
                model.load_state_dict(state)
                continue
            found.update({f"{kind.name} {k}": v for k, v in whole(dict(state)).items()})
            saved = whole(FSDP.optim_state_dict(model, optimizer)["state"])
            for name, values in saved.items():
                for key, value in values.items():
                    found[f"{kind.name} optimizer {name} {key}"] = value
    copied = copy.deepcopy(model)
    found.update({f"copy {k}": v for k, v in full_parameters(copied).items()})
    found.update({f"full {k}": v for k, v in full_parameters(model).items()})
    with summon(model, writeback=False, with_grads=run.use_orig_params):
        for name, p in model.named_parameters():
            found[f"summoned {name}"] = p.detach()
            assert p.grad is None, name
    return {k: v.clone() for k, v in found.items() if isinstance(v, torch.Tensor)}


# The fault "version" is left out for the recomputation "saved". There it raises no error, because
# recomputed tensors have the right version.
FAULTS_RECOMPUTED = [
    (kind, recompute)
    for kind in FAULTS
    for recompute in ("", "reentrant", "saved")[: 2 if kind == "version" else 3]
]


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*NO_SHARD")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("kind, recompute", FAULTS_RECOMPUTED)
def test_an_emergency_checkpoint(rank, world, kind, recompute, strategy, use_orig_params):
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    run, calm = (Run(rank, recompute, **options) for _ in range(2))
    for each in (run, calm):
        each.step(0)
    run.fail(1, kind)
    assert run.model.training_state.name == "IDLE"
    check_equal(everything(run), everything(calm), "saved after the failure")
    run.optimizer.zero_grad()
    for each in (run, calm):
        each.step(2)
    check_equal(everything(run), everything(calm), "a step later")


@ranks(2, 3)
@BOTH
@ZEROS
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", ["shm", "wire"])
def test_gradients_cleared_after_the_failure(rank, world, use_orig_params, to_none, late, kind):
    """A unit's gradients are summed when the last rank has them.

    That may be after this rank has set its own gradients to zero.
    """
    fsdpc.set_collectives(kind)
    run, calm = (Run(rank, use_orig_params=use_orig_params) for _ in range(2))
    for each in (run, calm):
        each.step(0, to_none)
    if rank == late:
        block_of(run.model, 2).watch = lambda grad: time.sleep(0.5)
    run.fail(1, block=0)
    block_of(run.model, 2).watch = None
    run.optimizer.zero_grad(to_none)
    for each in (run, calm):
        each.backward(2)
    check_equal(full_gradients(run.model), full_gradients(calm.model), "gradients of the next step")


@ranks(4)
@BOTH
@ZEROS
def test_replicas(rank, world, use_orig_params, to_none):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {
        "process_group": (groups[rank // 2], across[rank % 2]),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "use_orig_params": use_orig_params,
    }
    run, calm = (Run(rank, **options) for _ in range(2))
    for each in (run, calm):
        each.step(0, to_none)
    run.fail(1, block=0)
    run.optimizer.zero_grad(to_none)
    for each in (run, calm):
        each.backward(2)
    check_equal(full_gradients(run.model), full_gradients(calm.model), "gradients of the next step")


@ranks(2)
@BOTH
def test_gradients_that_the_user_put_in_place(rank, world, use_orig_params):
    """After the failure the user changes gradients; the next backward adds to these gradients.

    The user replaces `.grad`, or the memory of `.grad`, or only the values.
    """

    def change(run, how):
        for p in (p for p in run.model.parameters() if p.grad is not None):
            if how == "tensor":
                p.grad = torch.full_like(p, 3.0)
            elif how == "memory":
                p.grad.data = torch.full_like(p, 3.0)
            else:
                p.grad.fill_(3.0)

    for how in ("tensor", "memory", "values"):
        run, calm = (Run(rank, use_orig_params=use_orig_params) for _ in range(2))
        for each in (run, calm):
            each.step(0, False)
        if rank == 1:
            block_of(run.model, 2).watch = lambda grad: time.sleep(0.3)
        run.fail(1, block=0)
        block_of(run.model, 2).watch = None
        for each in (run, calm):
            change(each, how)
            each.backward(2)
        check_equal(full_gradients(run.model), full_gradients(calm.model), how)


@ranks(2)
@BOTH
@ZEROS
@pytest.mark.parametrize("failing", [False, True], ids=["in no_sync", "in sync"])
@pytest.mark.parametrize("after", [False, True], ids=["then no_sync", "then sync"])
def test_accumulation_after_the_failure(rank, world, use_orig_params, to_none, failing, after):
    """The failed backward and the next backward each run inside or outside of no_sync."""
    run, calm = (Run(rank, use_orig_params=use_orig_params) for _ in range(2))
    for each in (run, calm):
        each.step(0, to_none)
    if rank == 1:
        block_of(run.model, 2).watch = lambda grad: time.sleep(0.3)
    with no_sync_if(run.model, not failing):
        run.fail(1, block=0)
    block_of(run.model, 2).watch = None
    run.optimizer.zero_grad(to_none)
    for each in (run, calm):
        with no_sync_if(each.model, not after):
            each.backward(2)
        each.backward(3)
    check_equal(full_gradients(run.model), full_gradients(calm.model), "gradients of both")


@ranks(2)
@BOTH
def test_kept_gradients_outlive_the_failure(rank, world, use_orig_params):
    """The backward of a micro-batch fails in no_sync, in the first block that backward reaches.

    The accumulated gradients of the blocks stay, without this micro-batch.
    """
    torch.manual_seed(0)
    model = Model()
    reference = Reference(model, loss_of=squares)
    run = Run(rank, model=model, use_orig_params=use_orig_params)
    with run.model.no_sync():
        run.backward(0)
        run.fail(1, block=2)
    reference.backward(batch(rank, 0), sync=False)
    run.backward(2)
    reference.backward(batch(rank, 2))
    got, expected = full_gradients(run.model), reference.gradients()
    # Only blocks are compared: the failed micro-batch had added to the outlet's gradient before it
    # failed.
    got, expected = ({k: v for k, v in d.items() if "blocks" in k} for d in (got, expected))
    check_equal(got, expected, "kept and new", rtol=1e-6, atol=1e-7)


@ranks(2)
@BOTH
def test_one_rank_fails_in_no_sync(rank, world, use_orig_params):
    """In no_sync nothing is sent, so only the batch of the rank that fails is lost."""
    torch.manual_seed(0)
    model = Model()
    reference = Reference(model, loss_of=squares)
    run = Run(rank, model=model, use_orig_params=use_orig_params)
    for step in range(2):
        with run.model.no_sync():
            if rank == 0:
                run.fail(2 * step)
            else:
                run.backward(2 * step)
        if rank == 1:
            reference.backward(batch(rank, 2 * step), sync=False)
        else:
            run.optimizer.zero_grad()
        run.backward(2 * step + 1)
        reference.backward(batch(rank, 2 * step + 1))
        check_gradients("fsdpc", run.model, reference, f"of step {step}")
        run.optimizer.zero_grad()
        reference.master.zero_grad()


class Partial(Model):
    """A model with an unused parameter. The unit of this parameter is complete only at the end of
    backward.
    """

    def __init__(self):
        super().__init__()
        self.blocks[1].unused = nn.Parameter(torch.ones(5))


@ranks(2)
@BOTH
def test_the_end_of_backward_fails(rank, world, use_orig_params):
    """The error is raised in the callback that torch calls after the graph has run."""
    run, calm = (Run(rank, model=Partial(), use_orig_params=use_orig_params) for _ in range(2))
    fails = False
    shape = []

    def hook(state, grad, out=None):
        nonlocal fails
        if fails and len(shape) and grad.numel() == shape[0]:
            raise Planted("planted")
        shape[:] = shape or [grad.numel()]
        dist.all_reduce(grad)
        grad.div_(world)
        if out is not None:
            out.copy_(grad.view(world, -1)[rank])

    for each in (run, calm):
        each.model.register_comm_hook(None, hook)
        each.step(0)
    fails = True
    for name in ("before", "after"):
        with pytest.raises(Planted):
            run.backward(1)
        assert run.model.training_state.name == "IDLE", name
        check_equal(everything(run), everything(calm), f"saved after the failure, {name}")
        run.optimizer.zero_grad()
    fails = False
    for each in (run, calm):
        each.step(2)
    check_equal(everything(run), everything(calm), "a step later")


@ranks(2)
@BOTH
@pytest.mark.parametrize("recompute", ["", "reentrant", "saved"])
def test_a_running_backward_refuses(rank, world, use_orig_params, recompute):
    """A running backward refuses state dicts and copies.

    It does so in a hook, in a recomputation and in another thread, and the step is still right.
    """
    run, calm = (Run(rank, recompute, use_orig_params=use_orig_params) for _ in range(2))
    refused = []

    def attempt():
        with pytest.raises(AssertionError, match=IN_BACKWARD):
            run.model.state_dict()
        with pytest.raises(RuntimeError, match="cannot be copied in backward"):
            copy.deepcopy(run.model)
        refused.append(run.model.training_state.name)

    def elsewhere(grad):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    block_of(run.model, 0).watch = lambda grad: attempt()
    block_of(run.model, 2).watch = elsewhere
    for each in (run, calm):
        each.step(0)
    assert refused == ["FORWARD_BACKWARD"] * 2
    check_equal(full_parameters(run.model), full_parameters(calm.model), "after the step")


@ranks(2)
def test_the_end_of_backward_refuses(rank, world):
    run = Run(rank, model=Partial(), use_orig_params=True)
    refused = []

    def hook(state, grad, out):
        with pytest.raises(AssertionError, match=IN_BACKWARD):
            run.model.state_dict()
        refused.append(torch._C._current_graph_task_id())
        out.zero_()

    run.model.register_comm_hook(None, hook)
    run.backward(0)
    assert len(refused) == 4


@ranks(2)
@BOTH
def test_an_inner_backward_fails(rank, world, use_orig_params):
    """A hook of a backward runs a second backward, which fails.

    The units are still in the outer backward, so a state dict is refused.
    """
    run, calm = (Run(rank, use_orig_params=use_orig_params) for _ in range(2))
    probe = torch.ones(3, requires_grad=True)
    refused = []

    def inner(grad):
        with torch.enable_grad(), pytest.raises(Planted):
            Burn.apply(probe).sum().backward()
        with pytest.raises(AssertionError, match=IN_BACKWARD):
            run.model.state_dict()
        refused.append(1)

    block_of(run.model, 1).watch = inner
    for each in (run, calm):
        each.step(0)
    assert refused
    check_equal(full_parameters(run.model), full_parameters(calm.model), "after the step")


@ranks(2)
@BOTH
@ZEROS
def test_the_units_get_another_root(rank, world, use_orig_params, to_none):
    """After a failed backward under one root, the model becomes a part of another root."""
    run, calm = (Run(rank, use_orig_params=use_orig_params) for _ in range(2))
    for each in (run, calm):
        each.step(0, to_none)
    run.fail(1, block=0)
    run.optimizer.zero_grad(to_none)
    for each in (run, calm):
        torch.manual_seed(1)
        each.model = wrap(
            "fsdpc",
            nn.Sequential(each.model, nn.Linear(3, 3)),
            use_orig_params=use_orig_params,
        )
        for number in (2, 3):
            each.step(number, to_none)
    check_equal(full_parameters(run.model), full_parameters(calm.model), "under the other root")


@ranks(2)
def test_memory_of_the_failed_backward_goes_at_once(rank, world):
    """The gradients of gathered parameters are freed: the backward may have run out of memory."""
    run = Run(rank, use_orig_params=True)
    run.step(0)
    run.fail(1)
    units = [m._unit for m in run.model.modules() if isinstance(m, FSDP)]
    assert all(p.grad is None for unit in units for p in unit.full if p is not None)
