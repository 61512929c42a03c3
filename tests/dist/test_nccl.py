"""Tests of communicators of GPUs, on simulated GPUs: values, errors, ranks that die,
and the end of a process.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import env
import numpy as np
import pytest
import simgpu
import torch
import torch.distributed as dist
from harness import die, ranks, run_ranks, signal_rank
from torch.distributed.fsdp import ShardingStrategy

import fsdpc
from fsdpc import _C
from fsdpc._comm import bootstrap as _bootstrap
from fsdpc._comm import nccl as _nccl

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()
LAST = r"gather of unit layers.2 \(collective \d+\)"
LARGE = 200_000  # elements per rank: too many for the host's channel, so NCCL sends them


def ids_of_rank_0(rank: int) -> tuple[bytes, bytes]:
    ids = [(_C.nccl_id(), _C.nccl_id()) if rank == 0 else None]
    dist.broadcast_object_list(ids)
    assert ids[0] is not None
    return ids[0]


@pytest.mark.parametrize("channel", [False, True])
@ranks(1, 3, env=GPU, alone=True)
def test_host_arrays_travel_with_or_without_a_channel(rank, world, channel):
    sent, pieces = [], []

    def exchange(memory, piece_bytes, what):
        sent.append((len(memory) == world * piece_bytes, what))
        pieces.append(piece_bytes)
        mine = memory[rank * piece_bytes : (rank + 1) * piece_bytes].tobytes()
        everyone = [b""] * world
        dist.all_gather_object(everyone, mine)
        memory[:] = np.frombuffer(b"".join(everyone), dtype=np.uint8)

    comm = _C.Comm.nccl(
        rank, world, *ids_of_rank_0(rank), 0, "pair", 20.0, exchange if channel else None
    )
    assert (comm.kind, comm.device, comm.rank, comm.world) == ("nccl", 0, rank, world)
    assert _C.nccl_version().startswith("NCCL 2.28.3 (/")
    total = world * (world + 1) / 2
    for n in (3, 300_001):
        where = np.full((world, n), rank, dtype=np.int64)
        comm.all_gather(where.reshape(-1))
        assert (where == np.arange(world)[:, None]).all()
        for dtype in (np.float16, np.float32, np.float64):
            values = np.full(n, rank + 1, dtype=dtype)
            comm.all_reduce(values)
            assert (values == total).all()
        comm.all_reduce(values := np.full(n, -rank, dtype=np.float32), op="max")
        assert (values == 0).all()
        comm.broadcast(values := np.full(n, rank, dtype=np.int16), root=world - 1)
        assert (values == world - 1).all()
        comm.reduce_scatter(values := np.full(n * world, rank + 1, dtype=np.float32))
        assert (values[rank * n : (rank + 1) * n] == total).all()
    comm.barrier("the end")
    assert not sent or (channel and all(fits for fits, _ in sent) and sent[-1][1] == "the end")
    assert bool(sent) == channel
    comm.agree("same" * 1000)
    assert not channel or pieces[-1] == 16  # equal texts: only a digest and a length are sent
    if world > 1:
        with pytest.raises(_C.MismatchError, match="line 2.*'b 0'.*'b 1'|b 0.*b 1"):
            comm.agree(f"a\nb {rank}", what="units")
        comm.agree("still good")
    comm.close()
    with pytest.raises(_C.StateError, match="closed"):
        comm.barrier()


@pytest.mark.parametrize("raised", ["CommTimeout", "PeerError"])
@ranks(2, env=GPU, alone=True)
def test_what_the_channel_raises_keeps_its_kind_and_breaks_the_communicator(rank, world, raised):
    error = getattr(_C, raised)

    def exchange(memory, piece_bytes, what):
        raise error(f"{what}: rank 7 did not come")

    comm = _C.Comm.nccl(rank, world, *ids_of_rank_0(rank), 0, exchange=exchange)
    for _ in range(2):
        with pytest.raises(error, match=r"^units: rank 7 did not come$"):
            comm.agree("text", what="units")


@ranks(1, env=GPU, alone=True)
def test_arguments_are_checked(rank, world):
    good = _C.nccl_id()
    with pytest.raises(ValueError, match="reduce_id must be the 128 bytes"):
        _C.Comm.nccl(0, 1, good, good[:5], 0)
    with pytest.raises(TypeError, match="exchange must be callable"):
        _C.Comm.nccl(0, 1, good, good, 0, exchange=3)
    with pytest.raises(NotImplementedError, match="no CUDA device 9 here"):
        _C.Comm.nccl(0, 1, good, good, 9)
    with pytest.raises(ValueError, match="rank 2 is not one of a group of 1"):
        _C.Comm.nccl(2, 1, good, good, 0)
    assert _C.Comm.self_(0).device == 0 and _C.Comm.self_().device is None
    with pytest.raises(ValueError, match='kind "nccl" is needed, not "self"'):
        _C.nccl_stall(_C.Comm.self_())
    with pytest.raises(NotImplementedError, match="no CUDA device 3 here"):
        _C.Comm.self_(3)


@ranks(2, 3, env=GPU, alone=True)
def test_tensors_on_the_gpu_travel_by_nccl(rank, world):
    def exchange(memory, piece_bytes, what):
        raise AssertionError(f"{what} went by the host's channel")

    comm = _C.Comm.nccl(rank, world, *ids_of_rank_0(rank), 0, exchange=exchange)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        comm.all_reduce(values := torch.full((1000,), rank + 1, dtype=dtype))
        assert bool((values == world * (world + 1) // 2).all())
    comm.broadcast(values := torch.full((5, 3), rank, dtype=torch.int64), root=world - 1)
    assert bool((values == world - 1).all())
    comm.all_gather(values := torch.full((world * 7,), rank, dtype=torch.uint8))
    assert values.tolist() == [r for r in range(world) for _ in range(7)]
    comm.reduce_scatter(values := torch.full((world * 7,), float(rank + 1)))
    assert bool((values[rank * 7 : (rank + 1) * 7] == world * (world + 1) / 2).all())
    with pytest.raises(ValueError, match="not contiguous"):
        comm.all_reduce(torch.zeros(4, 4).t()[1:])
    with pytest.raises(_C.CommError, match="host's channel"):
        comm.all_reduce(np.zeros(3, dtype=np.float32))


# --- of a process group --------------------------------------------------------------------------


def connect(pg: Any = None, device: int | None = 0) -> _C.Comm:
    return _bootstrap.comm_for_group(pg or dist.group.WORLD, device=device)


def check(comm: _C.Comm) -> None:
    for numel in (7, LARGE):
        values = np.full(numel, comm.rank + 1, dtype=np.float64)
        comm.all_reduce(values, what="check")
        assert (values == comm.world * (comm.world + 1) / 2).all()


@ranks(2, 4, env=GPU, alone=True)
def test_a_group_has_one_communicator_for_each_device(rank, world):
    on_gpu, on_cpu = connect(), connect(device=None)
    assert (on_gpu.kind, on_gpu.device) == ("nccl", 0)
    assert (on_cpu.kind, on_cpu.device) == ("shm", None)
    assert connect() is on_gpu and connect(device=None) is on_cpu
    assert _bootstrap.comm_for_host(dist.group.WORLD) is on_gpu
    check(on_gpu)
    check(on_cpu)
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
    mine = connect(pairs[rank // 2])
    assert (mine.rank, mine.world) == (rank % 2, 2)
    check(mine)
    check(on_gpu)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    assert (connect(alone).kind, connect(alone).device) == ("self", 0)


@ranks(4, env=GPU, alone=True)
def test_groups_of_hybrid_sharding(rank, world):
    shard_pgs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicate_pgs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = _bootstrap.make_groups(
        ShardingStrategy.HYBRID_SHARD, shard_pgs[rank // 2], replicate_pgs[rank % 2], device=0
    )
    assert groups.replicate is not None and groups.divide == 4
    assert (groups.shard.rank, groups.replicate.rank) == (rank % 2, rank // 2)
    check(groups.shard)
    check(groups.replicate)
    groups = _bootstrap.make_groups(ShardingStrategy.NO_SHARD, dist.group.WORLD, device=0)
    assert groups.replicate is not None
    assert (groups.shard.kind, groups.shard.device, groups.replicate.world) == ("self", 0, 4)


@ranks(2, env=GPU, alone=True)
def test_a_closed_communicator_is_watched_in_peace(rank, world):
    comm = connect()
    watched = next(w for w in _nccl._own() if w.comm() is comm)
    comm.barrier()
    comm.close()
    time.sleep(3 * _nccl.WATCH_S)
    assert watched._answers and watched.channel.known is None


@ranks(2, env=GPU, alone=True)
def test_keys_of_earlier_rounds_are_deleted(rank, world):
    comm = connect()
    for _ in range(5):
        comm.barrier()
    names = [f"group {dist.group.WORLD.group_name}/0"]
    channel = next(w.channel for w in _nccl._own() if w.channel.name in names)
    number = channel._round - 1
    assert number >= 4
    comm.barrier()  # then all ranks have deleted their keys of round `number - 1`
    assert not channel._store.check([f"{number - 1}/0"])
    assert channel._store.check([f"{number + 1}/0"])


@ranks(2, env=GPU, alone=True)
def test_nccl_does_not_carry_host_memory(rank, world):
    os.environ["FSDPC_COLLECTIVES"] = "nccl"
    with pytest.raises(ValueError, match="=nccl supports GPUs.*on the CPU"):
        connect(dist.new_group([0, 1]), device=None)


@ranks(2, env=GPU, alone=True)
def test_ranks_that_cannot_or_do_not_agree(rank, world):
    os.environ["FSDPC_TIMEOUT"] = ["20", "30"][rank]
    with pytest.raises(_C.MismatchError, match="FSDPC_TIMEOUT differs.*20.0 on rank 0, 30.0 on"):
        connect()
    os.environ["FSDPC_TIMEOUT"] = "20"
    error = _C.PeerError if rank == 0 else NotImplementedError
    with pytest.raises(error, match="no CUDA device 5 here"):
        connect(device=5 * rank)
    check(connect())


@ranks(1, env=GPU, alone=True)
def test_the_note_on_a_gpu_is_logged_once(rank, world, caplog=None):
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logging.getLogger("fsdpc").addHandler(Listener())
    ask = _C.cuda_device
    _C.cuda_device = lambda ordinal: {**ask(ordinal), "note": f"GPU {ordinal} is small"}
    _bootstrap._alone(0)
    connect(dist.new_group([0]))
    assert messages == ["GPU 0 is small"]


# --- ranks that do not come ----------------------------------------------------------------------


@pytest.mark.parametrize("numel", [3, LARGE])
@ranks(3, env=GPU, alone=True)
def test_agree_and_barriers_name_the_missing_ranks(rank, world, numel):
    comm = connect()
    dist.barrier()
    for watched in _nccl._own():
        watched.channel.timeout = 2.0
    if rank == 2:
        dist.barrier()
        with pytest.raises(_C.PeerError, match="late: rank 2 cannot go on: rank|rank . gave up"):
            comm.barrier("late")
        return
    with pytest.raises(_C.CommError) as caught:
        comm.agree("text", "construction of unit layers.3")
    text = str(caught.value)
    assert "waited 2 s in construction of unit layers.3 for rank 2 (FSDPC_TIMEOUT" in text
    dist.barrier()
    with pytest.raises(type(caught.value)):  # the communicator stays broken
        comm.all_gather(np.zeros(numel * world))


@pytest.mark.long
@ranks(2, env={**GPU, "FSDPC_TIMEOUT": "4"}, alone=True)
def test_a_rank_that_does_not_come_to_the_start(rank, world):
    if rank == 0:
        with pytest.raises(_C.CommTimeout, match="starting communicator group .*for rank 1 "):
            connect()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(_C.PeerError, match="rank 0 gave up: .* in starting communicator"):
            connect()


def killed(rank, world, numel):
    comm = connect()
    check(comm)
    if rank == 1:
        die()
    began = time.monotonic()
    try:
        comm.all_gather(np.zeros(numel * world), "gather of unit layers.3")
    except _C.PeerError as error:
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_rank_that_is_killed(numel):
    outcomes = run_ranks(killed, 3, faults=True, env=GPU, numel=numel)
    assert outcomes[1].exit_signal == signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].returned, outcomes[rank]
        seconds, text = outcomes[rank].value
        assert seconds < 20  # far below the deadline of 30 s
        assert "rank 1 (process" in text and "died" in text
        # The error says where this rank was; it may have noticed the death before its gather.
        assert "gather of unit layers.3" in text or "after 0 collectives" in text


def stopped(rank, world, numel):
    comm = connect()
    check(comm)
    if rank == 1:
        signal_rank(1, signal.SIGSTOP)
        time.sleep(60)
    try:
        comm.all_gather(np.zeros(numel * world), "gather of unit layers.3")
    except _C.CommTimeout as error:
        return str(error)


@pytest.mark.long
@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_rank_that_is_stopped(numel):
    outcomes = run_ranks(stopped, 2, faults=True, env={**GPU, "FSDPC_TIMEOUT": "6"}, numel=numel)
    assert outcomes[1].stopped and outcomes[0].returned, outcomes[0]
    assert "gather of unit layers.3" in outcomes[0].value
    words = "for rank 1 (FSDPC" if numel == 3 else "for the other ranks (FSDPC"
    assert words in outcomes[0].value


@pytest.mark.long
@ranks(3, env={**GPU, "FSDPC_TIMEOUT": "10"}, alone=True)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_deadline_says_where_the_other_ranks_are(rank, world, hosts):
    host = _bootstrap.this_host()
    _bootstrap.this_host = lambda: f"node{min(rank, hosts - 1)} {host}"
    comm = connect()
    comm.all_gather(torch.zeros(world), "gather of unit layers.2")
    comm.barrier()
    if rank == 2:  # this rank joins no second gather; its watching thread answers the others
        dist.barrier()
        seconds, where = _C.nccl_stall(comm)
        assert seconds == 0.0 and re.fullmatch(f"in none of its collectives, after {LAST}", where)
        return
    with pytest.raises(_C.CommError) as caught:
        comm.all_gather(np.zeros(LARGE * world), "gather of unit layers.3")
    dist.barrier()
    text = str(caught.value)
    cause = (
        r"the cause: rank 2 \(pid \d+( on node1)?\) sleeps or waits outside of fsdpc, at "
        r"test_nccl.py:\d+ in "
    )
    assert re.search(cause, text) or "rank 2 (pid" in text and "computes outside" in text, text
    assert ("on node1)" in text) == (hosts == 2), text
    for other in (0, 1):
        assert re.search(rf"\n  {other} .* waits .* gather of unit layers.3 \(coll", text), text


def raising(rank, world, numel):
    comm = connect()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["connected 0", "connected 2"])
        raise ValueError("boom\nmore")
    store.set(f"connected {rank}", "")
    began = time.monotonic()
    try:
        comm.all_gather(np.zeros(numel * world), "gather of unit layers.3")
    except _C.PeerError as error:
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_rank_that_raises(numel):
    outcomes = run_ranks(raising, 3, faults=True, env=GPU, numel=numel)
    assert outcomes[1].error is not None and "boom" in outcomes[1].error
    for rank in (0, 2):
        seconds, text = outcomes[rank].value
        assert seconds < 20 and "rank 1 gave up: ValueError: boom" in text
        assert "gather of unit layers.3" in text


# --- NCCL's own failures -------------------------------------------------------------------------


@ranks(2, env=GPU, alone=True)
def test_the_error_of_ranks_on_one_gpu_names_the_alternative(rank, world):
    os.environ["FSDPC_TIMEOUT"] = "3"
    simgpu.plant_nccl("INIT_STALL", -1, 1)
    with pytest.raises(_C.CommError, match="Ranks 0 and 1 share GPU 0.*FSDPC_COLLECTIVES=shm"):
        connect()


@ranks(2, env=GPU, alone=True)
def test_an_error_of_nccl_names_the_collective(rank, world):
    comm = connect()
    simgpu.plant_nccl("ASYNC_ERROR", -1, 1, 6)
    with pytest.raises(_C.CommError, match="NCCL failed in gather of unit 3.*remote process"):
        comm.all_gather(np.zeros(LARGE * world), "gather of unit 3")
    with pytest.raises(_C.CommError, match="gather of unit 3"):
        comm.barrier("later")


@ranks(2, env=GPU, alone=True)
def test_an_abort_that_blocks_holds_nobody_up(rank, world):
    comm = connect()
    check(comm)
    simgpu.plant_nccl("ABORT_BLOCKS", -1, 1, 30_000)
    began = time.monotonic()
    comm.abort("enough")
    with pytest.raises(_C.CommError, match="rank . gave up: enough"):
        comm.barrier()
    comm.close()
    del comm
    _bootstrap._comms.clear()
    gc.collect()
    assert time.monotonic() - began < 20


# --- the end of a process ------------------------------------------------------------------------

PROGRAM = """
    import os
    import sys
    import numpy as np
    import torch.distributed as dist
    import fsdpc
    from fsdpc._comm import bootstrap as _bootstrap

    def main(rank, folder, how):
        store = dist.FileStore(f"{folder}/store-{how}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        comm = _bootstrap.comm_for_group(dist.group.WORLD, device=0)
        comm.all_reduce(np.ones(200_000))
        if rank == 1:
            if how == "raise":
                raise RuntimeError("boom")
            if how == "destroy":
                dist.destroy_process_group()
            sys.exit(0)
        try:
            comm.agree("text", "construction of unit 3")
            print(how, "no error", flush=True)
        except fsdpc.CommError as error:
            print(how, type(error).__name__, error, flush=True)
        sys.exit(0)

    started = {}
    for how in sys.argv[2:]:
        for rank in range(2):
            child = os.fork()  # all is imported once; a child ends as a program does
            if child == 0:
                main(rank, sys.argv[1], how)
            started[child] = how, rank
    for child, (how, rank) in started.items():
        print("ended", how, rank, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
IN_ORDER = "PeerError construction of unit 3: rank 0 cannot go on: rank 1 left in good order"
ENDS = {
    "exit": IN_ORDER,
    "destroy": IN_ORDER,
    "raise": "PeerError construction of unit 3: rank 0 cannot go on: rank 1 gave up: RuntimeE",
}


@pytest.mark.long
def test_processes_end_without_hanging(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), *ENDS],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **GPU, "FSDPC_TIMEOUT": "400", "OMP_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    for how, expected in ENDS.items():
        (said,) = (line for line in lines if line.startswith(f"{how} "))
        assert said.startswith(f"{how} {expected}"), done
        codes = [f"ended {how} 0 0", f"ended {how} 1 {int(how == 'raise')}"]
        assert set(codes) <= set(lines), done
    assert time.monotonic() - began < 300  # no rank had to wait until the deadline


# --- registered memory, and the dtype of the wire ------------------------------------------------


def trained(rank: int, world: int, **mixed: Any) -> tuple[str, set[float], int]:
    """Return the precision line, the set of this rank's sums of gradients (each rank adds 1, but
    rank 0 adds 256), and the number of collectives that used windows.
    """
    model = fsdpc.FullyShardedDataParallel(
        torch.nn.Linear(64 * world, 1, bias=False), mixed_precision=fsdpc.MixedPrecision(**mixed)
    )
    model(torch.full((1, 64 * world), 256.0 if rank == 0 else 1.0)).sum().backward()
    grad = next(iter(model.parameters())).grad
    assert grad is not None and grad.numel() == 64
    return model.precision_line, set((grad * world).tolist()), simgpu.nccl_count()["windowed"]


@ranks(4, env={**GPU, "FSDPC_POISON": "0"}, alone=True)  # FSDPC_POISON adds a gather
def test_windows_sum_narrow_gradients_in_fp32(rank, world):
    assert connect().symmetric
    line, sums, windowed = trained(rank, world, param_dtype=torch.bfloat16)
    assert "reduce bf16 (summed in fp32, symmetric memory) |" in line, line
    assert (sums, windowed) == ({260.0}, 2)  # 259, rounded once


@ranks(4, env={**GPU, "FSDPC_NCCL_REGISTER": "0", "SIMNCCL_RANK_ORDER": "0"}, alone=True)
def test_without_windows_what_nobody_asked_to_be_narrow_travels_wide(rank, world):
    narrow = torch.bfloat16
    assert not connect().symmetric
    line, sums, windowed = trained(rank, world, param_dtype=narrow)
    assert "reduce fp32 |" in line, line
    assert (sums, windowed) == ({259.0}, 0)
    line, sums, _ = trained(rank, world, param_dtype=narrow, reduce_dtype=narrow)
    assert "reduce bf16 (rounded at each rank, as reduce_dtype asks) |" in line, line
    assert sums == {[260.0, 260.0, 256.0, 256.0][rank]}  # rounded at each rank, in ring order


@ranks(2, env={**GPU, "FSDPC_NCCL_REGISTER": "0"}, alone=True)
def test_two_ranks_round_once_anyway(rank, world):
    line, sums, _ = trained(rank, world, param_dtype=torch.bfloat16)
    assert "reduce bf16 |" in line, line
    assert sums == {256.0}  # 257, rounded once


@ranks(2, env={**GPU, "SIMNCCL_WINDOW_ERROR": "1"}, alone=True)
def test_a_window_that_spoils_nccl_is_done_without(rank, world):
    comm = connect()
    assert not comm.symmetric
    line, sums, windowed = trained(rank, world, param_dtype=torch.bfloat16)
    assert (sums, windowed) == ({256.0}, 0), line
    assert simgpu.nccl_count()["misuses"] == 0


@ranks(2, env=GPU, alone=True)
def test_a_window_of_the_second_communicator_that_fails_on_one_rank(rank, world):
    # There are two communicators, one for gathers and one for reductions.
    simgpu.plant_nccl("WINDOW_FAILS", 1, k=2, value=1)
    assert not connect().symmetric
    assert simgpu.nccl_count()["misuses"] == 0


@ranks(2, env=GPU, alone=True)
def test_nccl_with_blocking_switched_on(rank, world):
    if rank == 0:
        os.environ["NCCL_COMM_BLOCKING"] = "1"
    kind = NotImplementedError if rank == 0 else _C.PeerError
    with pytest.raises(kind, match="NCCL_COMM_BLOCKING=1 makes NCCL's calls block.*: unset it"):
        connect()


@ranks(2, env=GPU, alone=True)
def test_ranks_that_differ_in_registering(rank, world):
    os.environ["FSDPC_NCCL_REGISTER"] = str(rank)
    with pytest.raises(_C.MismatchError, match="FSDPC_NCCL_REGISTER differs.*False on rank 0"):
        connect()
