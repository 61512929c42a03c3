"""Tests of collectives="c10d": torch's own tools see and count everything that ranks exchange in a
step.

With FULL_SHARD, a step costs each unit two all-gathers and one reduce-scatter. A unit whose values
are still in its slot in backward costs one all-gather less. The whole tree costs one further
all-gather of bits, which tell which parameters got a gradient on any rank. Before each gather and
each reduction, the ranks compare which unit they are about to exchange, by an all-gather of marks;
trust_order leaves out this comparison.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode
from toys import Reference, check_equal, full_gradients, loss_of, tokens, toy, wrap_blocks

import fsdpc

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if GATHER == "all_gather_single" else "reduce_scatter_tensor"
# the values of the last two blocks are still in their slots when backward begins
BLOCKS, SLOTS = 5, 2
UNITS = BLOCKS + 1
STEPS = 2
# The environment of tests that count gathers. FSDPC_POISON=1 would destroy the values that are
# still in a slot, and the unit would be gathered again.
WITHOUT_POISON = {"FSDPC_POISON": "0"}
GATHERS = {
    ShardingStrategy.FULL_SHARD: UNITS + BLOCKS - SLOTS,
    ShardingStrategy.SHARD_GRAD_OP: UNITS,
    ShardingStrategy.NO_SHARD: 0,
}  # per step
FULL = GATHERS[ShardingStrategy.FULL_SHARD]


class Counting:
    """A context in which torch.distributed's functions count their calls. The all-gathers by which
    ranks compare their turns are counted under "turns"."""

    def __init__(self, world: int) -> None:
        self.calls: Counter[str] = Counter()
        # bytes of a comparison of turns: one mark of 20 bytes from each rank
        self.small = 20 * world

    def __enter__(self) -> Counter[str]:
        self.before = {name: getattr(dist, name) for name in (GATHER, SCATTER, "all_reduce")}
        for name, function in self.before.items():
            setattr(dist, name, self.counting(name, function))
        return self.calls

    def counting(self, name, function):
        def call(tensor, *args, **kwargs):
            size = tensor.numel() * tensor.element_size()
            self.calls["turns" if name == GATHER and size == self.small else name] += 1
            return function(tensor, *args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, function in self.before.items():
            setattr(dist, name, function)


def warm(rank, **options):
    """Return a sharded model after its first step, in which the ranks also compare their models."""
    model = wrap_blocks("fsdpc", toy(blocks=BLOCKS), use_orig_params=True, **options)
    loss_of(model, tokens(rank, 0)).backward()
    return model


def step(model, rank):
    for number in range(STEPS):
        model.zero_grad()
        loss_of(model, tokens(rank, number)).backward()


@ranks(2, 3, env=WITHOUT_POISON)
@pytest.mark.parametrize("strategy", GATHERS, ids=lambda s: s.name)
@pytest.mark.parametrize("trust_order", [False, True])
def test_calls_of_a_step(rank, world, strategy, trust_order):
    fsdpc.set_collectives("c10d", trust_order=trust_order)
    model = warm(rank, sharding_strategy=strategy)
    with Counting(world) as calls:
        step(model, rank)
    gathers = STEPS * GATHERS[strategy]
    if strategy is ShardingStrategy.NO_SHARD:
        # one all-reduce for each unit, and one all-gather of bits for all units together
        assert calls == {"all_reduce": STEPS * UNITS, GATHER: STEPS}, calls
        return
    # One further all-gather, at the end of a backward, tells which parameters were used.
    expected = {GATHER: gathers + STEPS, SCATTER: STEPS * UNITS}
    if not trust_order:
        expected["turns"] = gathers + STEPS * UNITS + STEPS
    assert calls == expected, calls
    assert model._tree.kind == "wire"


@ranks(2, env={"FSDPC_GATHER_SLOTS": "1", **WITHOUT_POISON})
def test_calls_with_one_slot(rank, world):
    fsdpc.set_collectives("c10d", trust_order=True)
    model = warm(rank)
    with Counting(world) as calls:
        step(model, rank)
    # The root and the last block stay gathered. The end of a backward needs one further all-gather.
    assert calls[GATHER] == STEPS * (2 * UNITS - 2 + 1), calls


@ranks(2)
def test_calls_under_shared_memory(rank, world):
    """A step calls no collectives, because the ranks of one host exchange everything through shared
    memory."""
    model = warm(rank)
    with Counting(world) as calls:
        step(model, rank)
    assert not calls, calls


@ranks(2, env=WITHOUT_POISON)
def test_communication_debug_mode(rank, world):
    fsdpc.set_collectives("c10d", trust_order=True)
    model = warm(rank)
    mode = CommDebugMode()
    with mode:  # only one step, because the mode expects one forward per module
        loss_of(model, tokens(rank, 1)).backward()
    counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items() if n}
    assert counts == {"_allgather_base_": FULL + 1, "_reduce_scatter_base_": UNITS}, counts


@ranks(2, env={"TORCH_FR_BUFFER_SIZE": "2000", **WITHOUT_POISON})
def test_flight_recorder(rank, world):
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        pytest.skip("this torch records flights of NCCL only")
    fsdpc.set_collectives("c10d", trust_order=True)
    model = warm(rank)

    def recorded():
        entries = json.loads(dump()).get("entries", [])
        return Counter(e["profiling_name"].split(":")[-1] for e in entries)

    before = recorded()
    step(model, rank)
    new = recorded() - before
    # gloo records reductions under several names
    assert new.total() == STEPS * (FULL + UNITS + 1), new


@ranks(1, env=WITHOUT_POISON)
def test_fake_process_group(rank, world):
    """One process with a fake process group stands for rank 1 of 4. The shapes, the memory and the
    calls of a step are those of a real rank; the values are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    model = warm(1)
    assert {p.numel() for p in model.parameters()} < {0, *range(100)}
    with Counting(4) as calls:
        step(model, 1)
    assert calls[GATHER] == STEPS * (FULL + 1) and calls[SCATTER] == STEPS * UNITS, calls
    assert all((p.grad is not None) == (p.numel() > 0) for p in model.parameters())


@ranks(2)
def test_trusted_order_trains_alike(rank, world):
    fsdpc.set_collectives("c10d", trust_order=True)
    model = toy()
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model)
    for number in range(STEPS):
        loss_of(model, tokens(rank, number)).backward()
        reference.backward(tokens(rank, number))
        check_equal(full_gradients(model), reference.gradients(), f"of step {number}")


@ranks(2)
def test_choosing_collectives(rank, world):
    with pytest.raises(ValueError, match="auto, shm, wire, c10d, nccl"):
        fsdpc.set_collectives("gloo")
    fsdpc.set_collectives("c10d")
    model = warm(rank)
    fsdpc.set_collectives("c10d")
    with pytest.raises(RuntimeError, match="2 ranks uses 'c10d' already.*new group"):
        fsdpc.set_collectives("auto")
    assert model._tree.kind == "wire"


@ranks(2)
def test_ranks_that_disagree_about_trust(rank, world):
    fsdpc.set_collectives("c10d", trust_order=rank == 0)
    with pytest.raises(fsdpc.MismatchError, match="order of collectives"):
        warm(rank)


@ranks(2, 3, env={"FSDPC_COLLECTIVES": "c10d"})
@pytest.mark.parametrize("grad", [True, False])
def test_models_in_another_order(rank, world, grad):
    """Both models have the same names and shapes, so the ranks' collectives would match. The ranks
    notice nevertheless that they run different models."""
    student, teacher = (wrap_blocks("fsdpc", toy()) for _ in range(2))
    for model in (student, teacher):
        loss_of(model, tokens(rank, 0)).backward()
    first = student if rank == 0 else teacher
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(fsdpc.MismatchError, match="of unit .* while rank . runs another model"),
    ):
        loss_of(first, tokens(rank, 1))
