"""Time training steps of fsdpc, FSDP1, FSDP2 and an unsharded local copy in the same run.

    python benchmarks/bench_step.py --model 10m,10m-bf16
    python benchmarks/bench_step.py --model tiny --parts host --engines fsdpc,local --json

The benchmark has three parts, and each part runs the engines in the processes that it needs:

time    All engines run in the same two ranks and take turns in each round; each round begins with
        a different engine. An engine's time is divided by the time of `local` in the same round,
        so both times are measured within seconds. A round times a few steps from a barrier until
        the slower rank is done. Before the first round, each engine takes three warm-up steps on
        fixed data, whose losses are compared. In these steps the local copies average their
        gradients; in timed rounds they do not communicate.
memory  Each engine gets two fresh ranks, so that no other engine's memory counts. The parent
        process reads both ranks' PSS every few milliseconds during four steps. The table shows the
        memory above the PSS of a process that has imported everything; a page that both ranks map
        counts half for each rank.
host    Time of forward and backward without communication and waiting. The plain module's time in
        the same round is subtracted, and the rest is divided by the number of units. FSDP1 and
        FSDP2 run on torch's fake process group of two ranks, whose collectives do nothing. fsdpc
        runs on two real ranks over shared memory, and the waits that its trace records are
        subtracted; the copies and sums of its collectives still count. `fsdpc-alone` is fsdpc on
        a group of one rank: it runs every hook, swap and gradient copy, but does not communicate.
        `fsdpc-c10d` is fsdpc on the fake group, where it calls torch.distributed for each
        collective. The suffix `-flat` means `use_orig_params=False`, and `fsdpc2` is
        `fsdpc.fully_shard`. `fsdpc-events` and `fsdpc-tensors` (only in the part `time`) train
        inside fsdpc.profile_memory, with `tensors=False` and `tensors=True` respectively.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import common

DEFAULT_PARTS = {
    "10m": "time,memory",
    "10m-bf16": "time,memory",
    "85m": "time,memory",
    "tiny": "time,host",
}
MEMORY_KEYS = ("steady", "peak")  # steady: after the last step; peak: the peak during steps
WARMUP_STEPS = 3
MEMORY_STEPS = 4
SAMPLE_SECONDS = 0.005
DEADLINE = 900  # seconds for one launch of ranks


def pss_mb(pid: int | str) -> float:
    """Return a process's proportional set size in MB: shared pages are split over their users."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        lines = [line.split() for line in rollup]
    return next(int(words[1]) for words in lines if words[0] == "Pss:") * 1024 / 1e6


def start_rank(rank: int, world: int, folder: str, backend: str = "gloo") -> None:
    """Make this process a rank with one thread."""
    import torch
    import torch.distributed as dist

    common.end_with_parent()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def run_ranks(
    job: Callable,
    world: int,
    *arguments: object,
    watch: Callable[[list[int], Connection], dict] | None = None,
) -> dict:
    """Run job(rank, world, folder, connection, *arguments) in fresh processes.

    Return what `watch(pids, connection)` returns, or without `watch` what rank 0 sends through the
    connection.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=job, args=(rank, world, folder, theirs, *arguments), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        timer = threading.Timer(DEADLINE, lambda: [process.kill() for process in ranks])
        timer.start()
        try:
            result = watch([process.pid for process in ranks], ours) if watch else ours.recv()
        except EOFError:
            raise SystemExit("a rank ended early; its error is above") from None
        finally:
            timer.cancel()
            for process in ranks:
                process.join(20)
                process.kill()
    return result


# time


def time_job(
    rank: int, world: int, folder: str, out: Connection, model: str, names: list[str], rounds: int
) -> None:
    """Run one rank of the part `time`; rank 0 sends the losses and the seconds per step."""
    start_rank(rank, world, folder)
    from engines import WORKLOADS, build

    work = WORKLOADS[model]
    trainings = {name: build(name, work) for name in names}
    losses = {
        name: warm_up(training, work, name == "local") for name, training in trainings.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu = time_round(trainings[name], work, turn)
            seconds[name].append(wall)
            processor[name].append(cpu)
    if rank == 0:
        sizes = {"batch_per_rank": work.batch, "seq": work.seq, "steps_per_round": work.steps}
        out.send({"losses": losses, "seconds": seconds, "cpu": processor, "sizes": sizes})
    end_rank()


def warm_up(training: object, work: object, average: bool) -> list[float]:
    """Take the first steps with different data on each rank; return losses averaged over ranks."""
    import torch.distributed as dist
    from engines import random_batch

    after, world, losses = training.after_backward, dist.get_world_size(), []

    def average_gradients() -> None:
        after()
        for group in training.optimizer.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world

    if average:
        training.after_backward = average_gradients
    for step in range(WARMUP_STEPS):
        loss = training.step(random_batch(work, step * world + dist.get_rank()))
        dist.all_reduce(loss)
        losses.append(loss.item() / world)
    training.after_backward = after
    return losses


def time_round(training: object, work: object, turn: int) -> tuple[float, float]:
    """Return the seconds per step, from a barrier to the end of the slower rank, and the processor
    seconds per step and rank. Other processes on the machine do not add to processor seconds.
    """
    import torch
    import torch.distributed as dist
    from engines import random_batch

    batch = random_batch(work, 1000 * turn + dist.get_rank())
    dist.barrier()
    with training.around():
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for _ in range(work.steps):
            training.step(batch)
        elapsed = torch.tensor(time.perf_counter() - begin)
        used = torch.tensor(time.process_time() - begin_cpu)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return elapsed.item() / work.steps, used.item() / work.steps / dist.get_world_size()


def end_rank() -> None:
    """End this process without the interpreter's teardown, which threads of engines make slow."""
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


# memory


def memory_job(rank: int, world: int, folder: str, out: Connection, model: str, name: str) -> None:
    """Run one rank of the part `memory`; rank 0 sends the parent the name of each phase."""
    start_rank(rank, world, folder)
    import torch.distributed as dist
    from engines import WORKLOADS, build, random_batch

    def phase(text: str) -> None:
        dist.barrier()
        if rank == 0:
            out.send(text)
            out.recv()
        dist.barrier()

    work = WORKLOADS[model]
    import_all(name)
    phase("baseline")
    training = build(name, work)
    for step in range(WARMUP_STEPS):
        training.step(random_batch(work, step * world + rank))
    phase("warm")
    for step in range(MEMORY_STEPS):
        training.step(random_batch(work, step * world + rank))
    phase("steady")
    end_rank()


def import_all(name: str) -> None:
    """Import what the engine imports and run a tiny matmul, before the baseline is measured."""
    import torch
    import torch.distributed.fsdp

    if name.startswith("fsdpc"):
        import fsdpc._fsdp2.module  # noqa: F401
        import fsdpc.fsdp  # noqa: F401
    torch.ones(64, 64) @ torch.ones(64, 64)


def watch_memory(pids: list[int], connection: Connection) -> dict:
    """Read the ranks' PSS whenever rank 0 sends the name of a phase. Between "warm" and "steady",
    also sample PSS for the peak. Return MB by phase, and the peak, averaged over the ranks.
    """
    figures: dict[str, float] = {}
    peak, sampling = 0.0, False
    while "steady" not in figures:
        if connection.poll(SAMPLE_SECONDS if sampling else 1):
            phase = connection.recv()
            figures[phase] = statistics.mean(pss_mb(pid) for pid in pids)
            sampling = phase == "warm"
            connection.send("go on")
        elif sampling:
            peak = max(peak, statistics.mean(pss_mb(pid) for pid in pids))
    figures["peak"] = max(peak, figures["steady"])
    return figures


# host


def fake_job(
    rank: int, world: int, folder: str, out: Connection, model: str, names: list[str], rounds: int
) -> None:
    """Measure host time in one process, on a process group whose collectives do nothing."""
    start_rank(rank, 2, folder, backend="fake")
    from engines import WORKLOADS, build

    work = WORKLOADS[model]
    trainings = {name: build(name.removesuffix("-c10d"), work) for name in names}
    out.send({"seconds": host_rounds(trainings, work, rounds), "units": work.config.layers + 1})
    os._exit(0)


def alone_job(
    rank: int, world: int, folder: str, out: Connection, model: str, names: list[str], rounds: int
) -> None:
    """Measure host time on a group of one rank, which does not communicate."""
    start_rank(rank, 1, folder)
    from engines import WORKLOADS, build

    work = WORKLOADS[model]
    trainings = {name: build(name.replace("-alone", ""), work) for name in names}
    out.send({"seconds": host_rounds(trainings, work, rounds), "units": work.config.layers + 1})
    end_rank()


def shared_job(
    rank: int, world: int, folder: str, out: Connection, model: str, names: list[str], rounds: int
) -> None:
    """Measure host time on two real ranks over shared memory; rank 0 sends its own times."""
    start_rank(rank, world, folder)
    from engines import WORKLOADS, build

    work = WORKLOADS[model]
    trainings = {name: build(name, work) for name in names}
    seconds = host_rounds(trainings, work, rounds)
    if rank == 0:
        out.send({"seconds": seconds, "units": work.config.layers + 1})
    end_rank()


def host_rounds(trainings: dict, work: object, rounds: int) -> dict[str, list[float]]:
    """Return each engine's seconds of forward and backward without waits. Engines take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(rounds + WARMUP_STEPS):
        for name, training in trainings.items():
            elapsed = host_once(training, work)
            if turn >= WARMUP_STEPS:
                seconds[name].append(elapsed)
    return seconds


def host_once(training: object, work: object) -> float:
    """Return the seconds of one forward and backward without the waits that fsdpc's trace records.
    The optimizer's step is not timed. It must run all the same: fsdpc notices whether parameters
    have changed, and does other work if they have not.
    """
    import torch.distributed as dist
    from engines import random_batch

    batch = random_batch(work, 0)
    host = getattr(training.model, "_fsdpc_host", training.model)
    tree = getattr(host, "_tree", None)  # None for other engines and before the first forward
    if tree is not None:
        tree.clear_trace()
    dist.barrier()
    begin = time.perf_counter()
    training.backward(batch)
    elapsed = time.perf_counter() - begin
    if tree is not None:
        elapsed -= 1e-9 * sum(e["bytes"] for e in tree.trace() if e["op"] == "wait")
    training.optimizer.step()
    training.optimizer.zero_grad()
    return elapsed


# reports


def report_time(result: dict, tokens: int) -> dict:
    """Turn seconds per round into step time, ratio to `local` in the same round, and tokens/s."""
    engines = {}
    for name, seconds in result["seconds"].items():
        engines[name] = {
            "step_ms": common.spread([1e3 * value for value in seconds]),
            "cpu_ms": common.spread([1e3 * value for value in result["cpu"][name]]),
            "tokens_per_second": tokens / statistics.median(seconds),
            "losses": result["losses"][name],
        }
        if "local" in result["seconds"]:
            floor = result["seconds"]["local"]
            ratios = [value / base for value, base in zip(seconds, floor, strict=True)]
            engines[name]["ratio"] = common.spread(ratios)
    return engines


def report_host(result: dict) -> dict:
    """Turn seconds into microseconds per unit above the plain module's time in the same round."""
    floor, units, engines = result["seconds"]["local"], result["units"], {}
    for name, seconds in result["seconds"].items():
        extra = [1e6 * (a - b) / units for a, b in zip(seconds, floor, strict=True)]
        engines[name] = {
            "host_ms": common.spread([1e3 * value for value in seconds]),
            "host_us_per_unit": common.spread(extra),
        }
    return engines


def loss_difference(engines: dict) -> float | None:
    """Return the largest difference between any two engines' warm-up losses."""
    curves = [engine["losses"] for engine in engines.values() if "losses" in engine]
    if len(curves) < 2:
        return None
    return max(max(column) - min(column) for column in zip(*curves, strict=True))


def print_engines(engines: dict) -> None:
    """Print medians and quartiles, with one line per engine."""
    head = ["engine", "step ms", "q1..q3", "x local", "q1..q3", "cpu ms", "tokens/s"]
    head += ["MB", "peak MB", "us/unit"]
    rows = []
    for name, figures in engines.items():
        memory, host = figures.get("memory_mb"), figures.get("host_us_per_unit")
        rows.append(
            [
                name,
                *median_and_quartiles(figures.get("step_ms"), 1),
                *median_and_quartiles(figures.get("ratio"), 3),
                f"{figures['cpu_ms']['median']:.1f}" if "step_ms" in figures else "-",
                f"{figures['tokens_per_second']:,.0f}" if "step_ms" in figures else "-",
                *(f"{memory[k] - memory['baseline']:.0f}" if memory else "-" for k in MEMORY_KEYS),
                f"{host['median']:.1f}" if host else "-",
            ]
        )
    common.print_table(head, rows)


def median_and_quartiles(values: dict | None, digits: int) -> tuple[str, str]:
    """Format a spread as two cells: the median, and the quartiles."""
    if values is None:
        return "-", "-"
    return f"{values['median']:.{digits}f}", f"{values['q1']:.{digits}f}..{values['q3']:.{digits}f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default=",".join(DEFAULT_PARTS),
        help="comma-separated, of 10m, 10m-bf16, 85m, 85m-bf16, tiny (default: %(default)s)",
    )
    parser.add_argument("--engines", default="fsdpc,fsdpc2,fsdp1,fsdp2,local")
    parser.add_argument("--parts", help="of time, memory, host; by default what suits the model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else was running")
    parser.add_argument(
        "--json",
        nargs="?",
        const="",
        metavar="PATH",
        help="write JSON, by default to benchmarks/results/step_MODEL.json",
    )
    return parser.parse_args()


def measure(model: str, names: list[str], parts: list[str], rounds: int) -> dict:
    """Run the parts for one model; return the sizes and each engine's figures."""
    engines: dict[str, dict] = {name: {} for name in names}
    sizes: dict = {}
    if "time" in parts:
        result = run_ranks(time_job, 2, model, names, rounds)
        sizes = result["sizes"]
        merge(engines, report_time(result, 2 * sizes["batch_per_rank"] * sizes["seq"]))
    if "memory" in parts:
        for name in names:
            figures = run_ranks(memory_job, 2, model, name, watch=watch_memory)
            engines[name]["memory_mb"] = figures
    if "host" in parts:
        merge(engines, measure_host(model, names, 10 * rounds))
    return {**sizes, "loss_difference": loss_difference(engines), "engines": engines}


def measure_host(model: str, names: list[str], rounds: int) -> dict[str, dict]:
    """Run the part `host`: fsdpc and fsdpc2 on real ranks, fsdpc alone on one rank, and all engines
    except fsdpc2 on a fake group.
    """
    ours = [name for name in names if name in ("fsdpc", "fsdpc2")]
    fake = [f"{name}-c10d" if name == "fsdpc" else name for name in names if name != "fsdpc2"]
    fake += ["fsdp1-flat"] if "fsdp1" in names else []
    figures = report_host(run_ranks(fake_job, 1, model, fake, rounds))
    if ours:
        shared = report_host(run_ranks(shared_job, 2, model, [*ours, "local"], rounds))
        figures.update({name: shared[name] for name in ours})
    if "fsdpc" in names:
        lonely = ["fsdpc-alone", "fsdpc-alone-flat"]
        alone = report_host(run_ranks(alone_job, 1, model, [*lonely, "local"], rounds))
        figures.update({name: alone[name] for name in lonely})
    return figures


def merge(engines: dict[str, dict], more: dict[str, dict]) -> None:
    """Add the figures ``more`` of one part to ``engines``, which has those of earlier parts."""
    for name, figures in more.items():
        engines.setdefault(name, {}).update(figures)


def main() -> None:
    args = parse_args()
    for model in args.model.split(","):
        parts = (args.parts or DEFAULT_PARTS.get(model, "time,memory")).split(",")
        run = common.describe_run(kept=args.json is not None)
        result = measure(model, args.engines.split(","), parts, args.rounds)
        print(f"{model}: {', '.join(parts)}")
        print_engines(result["engines"])
        if result["loss_difference"] is not None:
            print(
                f"largest difference of losses in the first {WARMUP_STEPS} steps: "
                f"{result['loss_difference']:.1e}"
            )
        if args.json is not None:
            head = {"benchmark": "step", "model": model, "rounds": args.rounds, "note": args.note}
            content = {**head, "ranks": 2, "threads_per_rank": 1, "run": run, **result}
            common.write_json(args.json or f"step_{model}.json", content)


if __name__ == "__main__":
    main()
