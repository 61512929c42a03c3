"""Tests of communicators of real process groups: values, errors, ranks that die,
and the end of a process.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from combinations import subset
from harness import die, ranks, run_ranks, shorten_deadlines, signal_rank
from torch.distributed.fsdp import ShardingStrategy

import fsdpc
from fsdpc import _C
from fsdpc._comm import bootstrap as _bootstrap

FLOATS = ["float32", "bfloat16", "float16", "float64"]


def connect(kind: str = "auto") -> _C.Comm:
    return _bootstrap.comm_for_group(dist.group.WORLD, kind=kind)


def values_of(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """Return numbers whose sum depends on the order of addition;
    every rank gets the same numbers for a given `rank`.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(numel, generator=generator) * 100).to(getattr(torch, dtype))


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, computed in fp32 (in fp64 for fp64) and rounded once."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


# --- values ----------------------------------------------------------------------------------


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["shm", "c10d"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_collectives(rank, world, kind, dtype):
    comm = connect(kind)
    assert (comm.kind, comm.rank, comm.world) == (kind, rank, world)
    for piece in (0, 1, 7, 1000, 70001):
        parts = [values_of(r, piece * world, dtype) for r in range(world)]
        own = slice(rank * piece, (rank + 1) * piece)

        gathered = torch.zeros_like(parts[0])
        gathered[own] = parts[rank][own]
        comm.all_gather(gathered, "values")
        for r in range(world):
            there = slice(r * piece, (r + 1) * piece)
            assert torch.equal(gathered[there], parts[r][there])

        exact = kind == "shm"
        scattered = parts[rank].clone()
        comm.reduce_scatter(scattered, "gradients")
        check_sum(scattered[own], [p[own] for p in parts], exact)

        summed = parts[rank].clone()
        comm.all_reduce(summed)
        check_sum(summed, parts, exact)

        for op, function in (("max", torch.maximum), ("min", torch.minimum)):
            best = parts[rank].clone()
            comm.all_reduce(best, op=op)
            wanted = parts[0]
            for part in parts[1:]:
                wanted = function(wanted, part)
            assert torch.equal(best, wanted)

        for root in range(world):
            sent = parts[rank].clone()
            comm.broadcast(sent, root=root)
            assert torch.equal(sent, parts[root])


def check_sum(got: torch.Tensor, parts: list[torch.Tensor], exact: bool) -> None:
    if exact:
        assert torch.equal(got, ordered_sum(parts))
    else:  # torch's backends sum in any order, in the dtype itself
        loose = 600 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, ordered_sum(parts), rtol=loose, atol=loose)


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_other_types_travel_bit_for_bit(rank, world, kind):
    comm = connect(kind)
    whole = torch.arange(5 * world, dtype=torch.int64) * 2**40 + 3
    mine = torch.zeros_like(whole)
    mine[5 * rank : 5 * rank + 5] = whole[5 * rank : 5 * rank + 5]
    comm.all_gather(mine)
    assert torch.equal(mine, whole)
    flags = torch.tensor([rank == 1, True])
    comm.broadcast(flags, root=1)
    assert flags.tolist() == [True, True]


@ranks(2)
def test_gil_is_free_while_waiting(rank, world):
    """A thread of rank 0 waits in a barrier while rank 0's main thread counts. Rank 1 enters the
    barrier only after rank 0 has counted.
    """
    comm = connect("shm")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["counted"])
        comm.barrier()
        return
    ended: list[BaseException | None] = []

    def wait():
        try:
            comm.barrier()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(20):
        assert not ended, "the thread held the GIL until its wait ended"
        time.sleep(0.001)
    store.set("counted", "")
    thread.join(60)
    assert ended == [None]


# --- groups ----------------------------------------------------------------------------------


@ranks(1)
def test_one_rank_needs_nobody(rank, world):
    assert connect().kind == "self"
    groups = _bootstrap.make_groups(ShardingStrategy.FULL_SHARD, dist.group.WORLD)
    assert (groups.shard.kind, groups.replicate, groups.divide) == ("self", None, 1.0)


@ranks(2)
def test_neighbours_share_memory(rank, world):
    assert connect().kind == "shm"


@ranks(2, env={"FSDPC_COLLECTIVES": "c10d"})
def test_environment_chooses(rank, world):
    assert connect(None).kind == "c10d"


@ranks(2)
def test_communicators_are_kept_until_the_group_goes(rank, world):
    pg = dist.new_group([0, 1])
    comm = _bootstrap.comm_for_group(pg)
    assert _bootstrap.comm_for_group(pg) is comm
    assert connect() is not comm
    seen = weakref.ref(comm)
    del comm
    gc.collect()
    assert seen() is not None
    dist.barrier()
    dist.destroy_process_group(pg)
    del pg
    gc.collect()
    assert seen() is None


@ranks(2, env={"FSDPC_COLLECTIVES": "c10d"})
def test_a_destroyed_group_is_an_error(rank, world):
    pg = dist.new_group([0, 1])
    comm = _bootstrap.comm_for_group(pg)
    comm.barrier()
    dist.destroy_process_group(pg)
    del pg
    gc.collect()
    with pytest.raises(fsdpc.CommError, match="the process group was destroyed"):
        comm.barrier()


@ranks(4)
def test_subgroups(rank, world):
    shard_pgs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicate_pgs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = _bootstrap.make_groups(
        ShardingStrategy.HYBRID_SHARD, shard_pgs[rank // 2], replicate_pgs[rank % 2]
    )
    assert (groups.shard.rank, groups.replicate.rank, groups.divide) == (rank % 2, rank // 2, 4.0)
    value = np.array([10.0**rank])
    groups.shard.all_reduce(value)
    assert value[0] == (11.0 if rank < 2 else 1100.0)
    groups.replicate.all_reduce(value)
    assert value[0] == 1111.0


@ranks(2)
def test_no_shard_replicates(rank, world):
    groups = _bootstrap.make_groups(ShardingStrategy.NO_SHARD, dist.group.WORLD)
    assert (groups.shard.kind, groups.replicate.world, groups.divide) == ("self", 2, 2.0)
    assert groups.shard_pg is None and groups.replicate_pg is dist.group.WORLD
    with pytest.raises(ValueError, match="NO_SHARD"):
        _bootstrap.make_groups(ShardingStrategy.NO_SHARD, dist.group.WORLD, dist.group.WORLD)


@ranks(2)
@pytest.mark.parametrize(
    "variable, values",
    [
        ("FSDPC_COLLECTIVES", ["shm", "c10d"]),
        ("FSDPC_TIMEOUT", ["20", "30"]),
    ],
)
def test_environments_that_differ(rank, world, variable, values):
    os.environ[variable] = values[rank]
    with pytest.raises(fsdpc.MismatchError, match=f"{variable} differs between ranks.*on rank 1"):
        connect(None)


@ranks(2)
def test_shm_is_refused_across_hosts(rank, world):
    host = _bootstrap.this_host()
    _bootstrap.this_host = lambda: f"{host}, host {rank}"
    assert connect("auto").kind == "c10d"
    other = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="FSDPC_COLLECTIVES=shm needs all ranks .* host 1"):
        _bootstrap.comm_for_group(other, kind="shm")


@ranks(1)
def test_fake_backend(rank, world):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    comm = _bootstrap.comm_for_group(dist.group.WORLD)
    comm.all_gather(torch.zeros(8))
    comm.reduce_scatter(torch.zeros(8))
    comm.all_reduce(torch.zeros(8))
    comm.barrier()
    comm.agree("text")
    assert (comm.kind, comm.rank, comm.world) == ("c10d", 1, 4)


# --- disagreement ----------------------------------------------------------------------------


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_agree(rank, world, kind):
    comm = connect(kind)
    comm.agree("layer one\nlayer two", "model")
    with pytest.raises(fsdpc.MismatchError) as caught:
        comm.agree(f"layer one\nlayer {'two' if rank == 0 else 'three'}", "model")
    text = str(caught.value)
    assert "layer two" in text and "layer three" in text and "rank 1" in text


@ranks(2)
def test_timeout_names_the_missing_ranks(rank, world):
    comm = connect("shm")
    shorten_deadlines(0.5)
    if rank == 0:
        with pytest.raises(fsdpc.CommTimeout, match="rank 1"):
            comm.all_reduce(np.ones(3), what="norm of the gradients")
    dist.barrier()


@ranks(2)
def test_a_forked_child_does_not_speak_for_its_rank(rank, world):
    comm = connect("shm")
    if rank == 0:
        child = os.fork()
        if child == 0:
            _bootstrap._leave()
            sys.excepthook(ValueError, ValueError("of the child"), None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    comm.barrier()
    comm.barrier()


# --- ranks that end --------------------------------------------------------------------------


def body_killed(rank, world):
    comm = connect("shm")
    comm.barrier()
    if rank == 1:
        die()
    began = time.monotonic()
    try:
        comm.all_gather(np.zeros(3 * 10**6, np.float32), "values")
    except fsdpc.PeerError as error:
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("world", [2, 3])
def test_killed_rank(world):
    outcomes = run_ranks(body_killed, world, faults=True)
    assert outcomes[1].exit_signal == signal.SIGKILL
    for outcome in outcomes[:1] + outcomes[2:]:
        seconds, text = outcome.value
        assert seconds < 20  # far below the deadline of 30 s
        assert "rank 1" in text and "died" in text


def end_of_a_group(rank, kind):
    """Ranks 2 and 3 train on a group of their own, until rank 3 dies."""
    pg = dist.new_group([2, 3])
    if rank < 2:
        return None
    fsdpc.set_collectives(kind)
    model = fsdpc.FullyShardedDataParallel(torch.nn.Linear(64, 64), process_group=pg)
    model(torch.ones(1, 64)).sum().backward()
    if rank == 3:
        die()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(100):
            model(torch.ones(1, 64)).sum().backward()
    return "".join(traceback.format_exception(caught.value))


def body_of_a_group_in_memory(rank, world):
    return end_of_a_group(rank, "shm")


def body_of_a_group_on_wires(rank, world):
    return end_of_a_group(rank, "wire")


@pytest.mark.parametrize("body", [body_of_a_group_in_memory, body_of_a_group_on_wires])
def test_errors_say_what_the_ranks_of_a_group_are_called(body):
    outcomes = run_ranks(body, 4, faults=True)
    text = outcomes[2].value
    assert "ranks 2-3 are called 0-1 here" in text and "rank 1" in text, outcomes[2]


def body_of_own_errors(rank, world):
    """Return the texts of two errors on a rank of a subgroup: one made in C, and one in Python."""
    pg = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = fsdpc.FullyShardedDataParallel(
        torch.nn.Linear(64, 64), process_group=pg, use_orig_params=True
    )
    model.module.register_forward_hook(lambda module, *_: module.weight.data.mul_(2))
    with pytest.raises(RuntimeError) as in_c, torch.no_grad():
        model(torch.ones(1, 64))
    with pytest.raises(RuntimeError) as in_python:
        model.module.weight = torch.nn.Parameter(torch.ones(3))
        model(torch.ones(1, 64))
    return str(in_c.value), str(in_python.value)


def test_a_rank_of_a_group_says_which_rank_of_the_program_it_is():
    for rank, (in_c, in_python) in enumerate(run_ranks(body_of_own_errors, 3)[1:], 1):
        assert in_c.startswith("ranks 1-2 are called 0-1 here: "), in_c
        assert f"on rank {rank - 1}, where" in in_c, in_c
        assert f"on rank {rank} ({rank - 1} of its group)" in in_python, in_python


def test_numbers_are_said_once():
    comm = _C.Comm.self_()
    comm.set_numbers("rank 5 is called 0 here")
    with pytest.raises(RuntimeError, match="have numbers already: rank 5 is called 0 here"):
        comm.set_numbers("rank 6 is called 0 here")
    with pytest.raises(TypeError):
        comm.set_numbers(5)
    comm.abort("rank 0 has had enough")
    with pytest.raises(_C.CommError, match="^rank 5 is called 0 here: rank 0 gave up"):
        comm.barrier()


def body_interrupted(rank, world):
    comm = connect("shm")
    comm.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        return
    try:
        signal_rank(0, signal.SIGINT, after=0.3)
        comm.barrier("something")
    except KeyboardInterrupt:
        store.set("interrupted", "")
        return "interrupted"


def test_interrupt_ends_a_wait():
    outcomes = run_ranks(body_interrupted, 2, faults=True)
    assert outcomes[0].value == "interrupted"


PROGRAM = """
    import signal
    import sys
    import numpy as np
    import torch.distributed as dist
    import fsdpc
    from fsdpc._comm import bootstrap as _bootstrap

    def main(rank, folder, how):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # spawn ends the others when one fails
        store = dist.FileStore(folder + "/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        comm = _bootstrap.comm_for_group(dist.group.WORLD)
        comm.barrier()
        if rank == 1:
            if how == "raise":
                raise RuntimeError("boom\\nmore")
            if how == "exit":
                sys.exit(0)
        else:
            try:
                comm.all_reduce(np.ones(3))
                print("no error", flush=True)
            except fsdpc.CommError as error:
                print(type(error).__name__, error, flush=True)

    if __name__ == "__main__":
        if sys.argv[1] == "spawn":
            import torch.multiprocessing as mp
            mp.spawn(main, (sys.argv[2], sys.argv[3]), nprocs=2)
        else:
            main(int(sys.argv[1]), *sys.argv[2:])
"""


def run_program(folder: Path, launcher: str, how: str) -> str:
    """Return what rank 0 of the program prints when rank 1 ends in the way `how`."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    ranks_to_start = ["spawn"] if launcher == "spawn" else ["0", "1"]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), rank, str(folder), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "FSDPC_TIMEOUT": "30",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            },
        )
        for rank in ranks_to_start
    ]
    try:
        return processes[0].communicate(timeout=300)[0].strip()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "how"), subset(itertools.product(["script", "spawn"], ["raise", "exit"]))
)
def test_peers_learn_how_a_program_ended(tmp_path, launcher, how):
    text = run_program(tmp_path, launcher, how)
    if how == "raise":
        assert text.startswith("PeerError rank 1 (") and "RuntimeError: boom" in text
        assert "more" not in text
    else:
        assert text.startswith("PeerError") and "rank 1 has left" in text and "died" not in text
