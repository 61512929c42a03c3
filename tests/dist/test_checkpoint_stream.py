"""Tests of fsdpc.checkpoint.stream: sets of full weights under each kind of sharding, and readers
in other processes. No reader gets a mixture of two sets or waits forever, and errors name a process
that dies.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import build, hybrid, mixed
from harness import die, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from toys import loss_of, tokens, toy

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.checkpoint import tap as tapping

SETS = int(os.environ.get("FSDPC_TEST_SETS", "40"))


def sharded(kind: str, model: nn.Module) -> nn.Module:
    if kind not in ("fully_shard", "fsdp2"):
        return build(kind, model)
    fully_shard = torch_fully_shard if kind == "fsdp2" else fsdpc.fully_shard
    return fully_shard(model, ignored_params={model.scale})


def check(found: dict[str, torch.Tensor], model: nn.Module, dtype: torch.dtype | None = None):
    """Check that ``found`` equals the state_dict() of the unsharded ``model``."""
    expected = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@ranks(1, 3)
@pytest.mark.parametrize("kind", ["fsdpc", "fsdpc-flat", "fully_shard", "fsdp2", "plain"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sets_are_what_the_unsharded_model_has(rank, world, kind, dtype):
    model, expected = sharded(kind, mixed(1)), mixed(1)
    tap = checkpoint.stream(model, dtype=dtype, bucket_bytes=3 * 4096)
    assert all(len(bucket) for bucket in tap.buckets())
    found = dict(tap)
    check(found, expected, dtype)
    assert [(n, t.dtype, tuple(t.shape)) for n, t in tap] == tap.metadata()
    with torch.no_grad():
        for each in (model, expected):
            for param in each.parameters():
                if param.is_floating_point():
                    param.mul_(2)
    check(dict(tap), expected, dtype)
    check(found, mixed(1), dtype)  # earlier tensors keep their values


@ranks(4)
@pytest.mark.parametrize("mesh", [True, False])
def test_replicas_and_one_rank(rank, world, mesh):
    model = build("fsdpc", toy(1), **hybrid(mesh))
    tap = checkpoint.stream(model, rank0_only=True, bucket_bytes=500)
    found = dict(tap)
    assert bool(found) == (rank == 0)
    if rank == 0:
        check(found, toy(1))
    sent: list[str] = []
    tap.send(lambda bucket: sent.extend(name for name, _ in bucket))
    assert sorted(sent) == sorted(found)


@ranks(4)
def test_other_dimensions_and_tensor_parallelism(rank, world):
    model, expected = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), toy()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param))
    expected = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    expected.load_state_dict(model.state_dict())
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight, mesh["tp"], [Shard(0)]))
    fsdpc.fully_shard(
        model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None
    )
    check(dict(checkpoint.stream(model)), expected)


@ranks(2)
def test_memory_is_two_buckets_and_one_to_cast(rank, world):
    model = toy(blocks=20, width=32)
    for block in model.blocks:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    tap = checkpoint.stream(model, dtype=torch.bfloat16, bucket_bytes=64 << 10)
    assert len(list(tap.buckets())) > 5
    tap = checkpoint.stream(model, dtype=torch.bfloat16, bucket_bytes=64 << 10)
    for _ in range(3):
        for _ in tap:
            pass
    assert 2 <= len(tap._rooms._kept) <= 3
    assert sum(map(len, tap._rooms._kept)) <= 3 * (64 << 10)


def step_inside(rank: int, world: int) -> None:
    model = build("fsdpc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tap = checkpoint.stream(model, bucket_bytes=1000)
    for at, bucket in enumerate(tap.buckets()):
        assert bucket
        loss_of(model, tokens(rank, at)).backward()  # a backward changes no parameter
    optimizer.step()
    names = [name for name, _ in tap]
    with pytest.raises(CheckpointError, match="has values of two steps"):
        for _ in tap.buckets():
            optimizer.step()
    assert [name for name, _ in tap] == names


def test_a_step_in_the_middle_of_a_set_is_an_error():
    run_ranks(step_inside, 2)


@ranks(3)
def test_ranks_that_leave_raise_or_differ(rank, world):
    model = build("fsdpc")
    tap = checkpoint.stream(model, bucket_bytes=500)
    for _ in tap:
        if rank == 1:
            break
    check(dict(tap), toy())

    def refuse(bucket: list[tuple[str, torch.Tensor]]) -> None:
        if rank == 2:
            raise KeyError(bucket[0][0])

    with pytest.raises(CheckpointError, match=r"rank 2 .*KeyError"):
        tap.send(refuse)
    check(dict(tap), toy())
    other = checkpoint.stream(model, dtype=torch.bfloat16 if rank else None)
    with pytest.raises(CheckpointError, match=r"ranks \[1, 2\] have other tensors"):
        dict(other)
    with pytest.raises(CheckpointError, match="dtype must be"):
        dict(checkpoint.stream(model, dtype=torch.int8))
    with pytest.raises(CheckpointError, match="matches no name"):
        dict(checkpoint.stream(model, only="nothing*"))
    assert [name for name, _ in checkpoint.stream(model, only="head.*")] == [
        "head.weight",
        "head.bias",
    ]
    with pytest.raises(CheckpointError, match=r"install\(\)"):
        dict(checkpoint.stream(build("fsdp1")))


# --- other processes -----------------------------------------------------------------------------


def trainer(rank: int, world: int, readers: int):
    """Make a group of all ranks except the last ``readers`` ranks. Return a model and its stream of
    weights on the ranks of the group, and (None, None) on the readers.
    """
    group = dist.new_group(list(range(world - readers)))
    if rank >= world - readers:
        return None, None
    model = build("fsdpc", toy(blocks=3), process_group=group)
    return model, checkpoint.stream(model, group=group, bucket_bytes=1000)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def published(rank: int, world: int, path: str, count: int, readers: int) -> list[int]:
    """Publish sets in which every element is the number of the set; return the numbers of the sets
    that this rank has read and checked.
    """
    rng = random.Random(rank)
    model, tap = trainer(rank, world, readers)
    if tap is not None:
        with tap:
            for number in range(1, count + 1):
                fill(model, number)
                time.sleep(rng.random() * 0.003)
                tap.publish(path, readers=readers, step=number, deadline=20)
        assert rank != 0 or not os.path.exists(path)
        return []
    names = set(toy(blocks=3).state_dict())
    steps, kept = [], []
    with checkpoint.StreamReader(path, deadline=20) as reader:
        for weights in reader:
            seen = set()
            for name, tensor in weights:
                if rng.random() < 0.02:
                    time.sleep(rng.random() * 0.003)
                assert bool((tensor == weights.step).all()), (name, weights.step, tensor)
                seen.add(name)
                if rng.random() < 0.1:
                    kept.append((weights.step, tensor))
                elif rng.random() < 0.1:
                    tensor.zero_()
                    kept.append((0, tensor))
            assert seen == names == {name for name, _, _ in weights.metadata()}
            steps.append(weights.step)
    assert all(bool((tensor == value).all()) for value, tensor in kept)
    return steps


def test_readers_get_whole_sets_in_order(tmp_path: Path):
    results = run_ranks(published, 4, path=str(tmp_path / "s"), count=SETS, readers=2)
    assert results[2:] == [list(range(1, SETS + 1))] * 2


def reader_leaves(rank: int, world: int, path: str, how: str) -> str:
    model, tap = trainer(rank, world, 1)
    if tap is None:
        with checkpoint.StreamReader(path, deadline=20) as reader:
            weights = next(reader)
            for at, _ in enumerate(weights):
                if at == 5:
                    break
            if how == "dies":
                die()
            with pytest.raises(CheckpointError, match="was not read to its end"):
                next(reader)
        with checkpoint.StreamReader(path, deadline=20) as reader:
            for weights in reader:
                assert all(bool((t == 2).all()) for _, t in weights)
        return ""
    fill(model, 1)
    with pytest.raises(
        CheckpointError, match=r"reader .*pid \d+.* in the middle of set 1"
    ) as error:
        tap.publish(path, deadline=20)
    fill(model, 2)
    if how == "leaves":
        tap.publish(path, deadline=20)
    else:
        with pytest.raises(CheckpointError, match=r"not all of the 1 readers .* within 0.3 s"):
            tap.publish(path, deadline=0.3)
    tap.close()
    return str(error.value)


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_reader_that_leaves_is_named(tmp_path: Path, how: str):
    outcomes = run_ranks(reader_leaves, 3, path=str(tmp_path / "s"), how=how, faults=True)
    assert all(each.returned for each in outcomes[:2]), outcomes
    assert outcomes[2].returned == (how == "leaves"), outcomes[2]


def writer_ends(rank: int, world: int, path: str, victim: int) -> str:
    model, tap = trainer(rank, world, 1)
    if tap is not None:
        real, count = tapping.Whole.read, 0

        def read(*args):
            nonlocal count
            count += 1
            if count == 3 and rank == victim:
                die()
            return real(*args)

        tapping.Whole.read = read
        tap.publish(path, deadline=20)
    with (
        checkpoint.StreamReader(path, deadline=20) as reader,
        pytest.raises(CheckpointError, match="in set 1.* not whole") as error,
    ):
        dict(next(reader))
    return str(error.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_training_that_dies_is_named(tmp_path: Path, victim: int):
    path = str(tmp_path / "s")
    outcomes = run_ranks(writer_ends, 3, path=path, victim=victim, faults=True, on_device=False)
    assert outcomes[2].returned, outcomes[2]
    assert ("has ended" if victim == 0 else "has failed in set 1") in outcomes[2].value
    assert "rank 1" in outcomes[0].error if victim else "rank 0" in outcomes[1].error


def test_waits_end_and_paths_are_checked(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nobody has published weights at .* for 0.1 s"):
        checkpoint.StreamReader(tmp_path / "s", deadline=0.1)
    tap = checkpoint.stream(toy())
    with pytest.raises(CheckpointError, match="not all of the 2 readers .* within 0.1 s"):
        tap.publish(tmp_path / "s", readers=2, deadline=0.1)
    with pytest.raises(CheckpointError, match="another process publishes"):
        checkpoint.stream(toy()).publish(tmp_path / "s", deadline=0.1)
    with checkpoint.StreamReader(tmp_path / "s", deadline=0.1) as reader:
        with pytest.raises(CheckpointError, match="has sent nothing for 0.1 s"):
            next(reader)
    tap.close()
    (tmp_path / "file").touch()
    for path, text in ((tmp_path / "file", "is no socket"), (tmp_path / ("x" * 120), "107 bytes")):
        with pytest.raises(CheckpointError, match=text):
            tap.publish(path, deadline=0.1)
    with pytest.raises(CheckpointError, match="at least 1"):
        tap.publish(tmp_path / "s", readers=0)
