"""Time training steps of a GPT of a billion parameters on one GPU: fsdpc, FSDP1 and FSDP2.

    python -m gpu.step                    # all parts, 1k, 4k and 16k tokens
    python -m gpu.step --parts time --tokens 4096 --json
    python -m gpu.step --dry --tiny       # the same lines without a GPU

All engines train on one nccl rank with bf16 computation over fp32 weights, activation checkpointing
and the same fused AdamW. On a group of one rank FSDP1 and fsdpc turn FULL_SHARD into NO_SHARD, as
torch documents; FSDP2 does not. `local` is the unsharded step, which casts fp32 weights into a bf16
copy that computes.

time    All engines run in one process and take turns in each round; each round begins with a
        different engine. A step is timed by the GPU's events and by the host's clock, both from an
        idle GPU until the GPU is idle again. The losses of the first steps, which run torch's
        deterministic algorithms, are compared.
memory  Each engine runs in a fresh process. The first figures are torch's peaks of allocated and
        reserved memory, and the memory that fsdpc maps outside of torch's allocator; "peak" is the
        allocated peak plus the mapped memory. The last figure is the growth of the whole device's
        used memory from before the engine is built; it includes NCCL's buffers.
host    Many small units run, so that the GPU always finishes before the host. The time is that from
        an idle GPU until backward returns. It includes waits for the GPU only if the engine itself
        waits. The time of the bare module in the same round is subtracted, and the rest is divided
        by the number of units.
counts  The same small units run under torch's profiler for one forward and backward. The figures
        are the number of launched kernels, copies and fills (minus those of the bare module, per
        unit), and the calls in which the host waits. From fsdpc's own trace come the bytes per
        parameter that fsdpc's gathers, packs and sums move.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import common

from gpu.alone import Tell, run_part
from gpu.report import print_step, step_report

LAYERS, WIDTH, SEQUENCE = 20, 2048, 2048
TINY_TOKENS = (32, 64)
SMALL_LAYERS, SMALL_WIDTH = 32, 64
WARMUP_STEPS = 3
LOSS_STEPS = 5
MEMORY_STEPS = 4
PART_SECONDS = {"time": 150, "memory": 60, "host": 60, "counts": 60}  # for one process
DEFAULT_ENGINES = "fsdpc,fsdp1,fsdp2,local"
COUNT_ENGINES = ("fsdpc", "fsdp1", "fsdp2", "bare")
MAPPED = ("gather_bytes", "reduce_bytes", "spare_bytes")  # not in torch's allocator


def workload(tokens: int, tiny: bool, device: Any) -> Any:
    """Return the big model with `tokens` tokens per step, or with `tiny` a small model."""
    import torch
    from engines import GPTConfig, Workload

    length = min(tokens, 32 if tiny else SEQUENCE)
    config = GPTConfig(layers=LAYERS, width=WIDTH, heads=WIDTH // 128, context=SEQUENCE)
    if tiny:
        config = GPTConfig(layers=2, width=64, heads=2, context=32)
    return Workload(
        config,
        batch=max(tokens // length, 1),
        seq=length,
        steps=1,
        dtype=torch.bfloat16,
        device=device,
        checkpointing=True,
    )


def small_workload(tiny: bool, device: Any) -> Any:
    """Return a model of many units that compute almost nothing."""
    from engines import GPTConfig

    layers = 4 if tiny else SMALL_LAYERS
    config = GPTConfig(layers=layers, width=SMALL_WIDTH, heads=2, context=32)
    work = replace(workload(32, True, device), config=config, batch=1, seq=32)
    return replace(work, checkpointing=False)


# --- parts, each in a process of its own ----------------------------------------------------------


def build_all(names: list[str], work: Any, failures: dict[str, str]) -> dict[str, Any]:
    """Build the engines. An engine that cannot be built is left out; its error is in `failures`."""
    from engines import build

    trainings = {}
    for name in names:
        try:
            trainings[name] = build(name, work)
        except Exception:
            failures[name] = traceback.format_exc(limit=-4)
    return trainings


def try_each(
    trainings: dict[str, Any], failures: dict[str, str], job: Any, order: list[str] | None = None
) -> dict[str, Any]:
    """Run job(training) for each training. If the job raises, drop the training and keep the error
    in `failures`.
    """
    results = {}
    for name in order or list(trainings):
        if name in trainings:
            try:
                results[name] = job(trainings[name])
            except Exception:
                failures[name] = traceback.format_exc(limit=-4)
                del trainings[name]
    return results


def rotated(names: list[str], turn: int) -> list[str]:
    """Return the names rotated by `turn`, so that another name is first in each round."""
    first = turn % max(len(names), 1)
    return names[first:] + names[:first]


@contextmanager
def reproducible() -> Iterator[None]:
    """Use torch's deterministic algorithms, where torch has them, in the context. Without them,
    attention's backward adds in any order. With deterministic algorithms torch also fills new
    memory by default; this function switches the filling off.
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def time_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the losses, and the step times of each round for each number of tokens."""
    from engines import random_batch

    failures: dict[str, str] = {}
    names = options["engines"]
    work = workload(options["tokens"][0], options["tiny"], device.device)
    trainings = build_all(names, work, failures)

    def warm_up(training: Any) -> list[float]:
        return [float(training.step(random_batch(work, k))) for k in range(LOSS_STEPS)]

    with reproducible():
        losses = try_each(trainings, failures, warm_up)
    found = {
        "parameters": sum(p.numel() for p in plain_on_meta(work).parameters()),
        "layers": work.config.layers,
        "width": work.config.width,
        "losses": losses,
        "tokens": {},
        "failures": failures,
    }
    for tokens in options["tokens"]:
        work = workload(tokens, options["tiny"], device.device)
        times = time_rounds(device, trainings, work, options["rounds"], failures)
        found["tokens"][str(tokens)] = {**times, "batch": work.batch, "seq": work.seq}
        tell(found)
    return found


def plain_on_meta(work: Any) -> Any:
    """Return the model on the meta device, without memory, to count its parameters."""
    import torch
    from engines import plain_model

    return plain_model(replace(work, device=torch.device("meta"), checkpointing=False))


def time_rounds(
    device: Any, trainings: dict[str, Any], work: Any, rounds: int, failures: dict[str, str]
) -> dict[str, Any]:
    """Return the milliseconds of each engine's steps, by events and by the host's clock."""
    from engines import random_batch

    batch = random_batch(work, 7)

    def one(training: Any) -> tuple[float, float]:
        device.synchronize()
        begin, first = time.perf_counter(), device.mark()
        training.step(batch)
        last = device.mark()
        device.synchronize()
        return device.milliseconds(first, last), 1e3 * (time.perf_counter() - begin)

    names = list(trainings)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(-1, rounds):  # the first round of a size is a warm-up
        for name, value in try_each(trainings, failures, one, rotated(names, turn)).items():
            if turn >= 0:
                times[name].append(value)
    return {
        "event_ms": {name: [value[0] for value in times[name]] for name in trainings},
        "wall_ms": {name: [value[1] for value in times[name]] for name in trainings},
    }


def memory_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the peaks of one engine in bytes for the largest number of tokens of the run."""
    import gc

    import torch
    from engines import build, random_batch

    work = workload(max(options["tokens"]), options["tiny"], device.device)
    torch.ones(64, 64, device=device.device) @ torch.ones(64, 64, device=device.device)
    before = device.memory()["in_use"]
    training = build(options["engine"], work)
    training.step(random_batch(work, 0))
    gc.collect()
    device.forget_peak()
    reserved = []
    for step in range(MEMORY_STEPS):
        training.step(random_batch(work, step + 1))
        device.synchronize()
        reserved.append(device.memory()["peak_reserved"])
    found = device.memory()
    own = engine_memory(training.model)
    mapped = sum(own.get(key, 0) for key in MAPPED)
    return {
        "tokens": work.batch * work.seq,
        "peak": found["peak_allocated"] + mapped,
        "mapped": mapped,
        "peak_allocated": found["peak_allocated"],
        "peak_reserved": found["peak_reserved"],
        "in_use": found["in_use"] - before,
        "reserved_growth_after_step_2": reserved[-1] - reserved[1],
        "engine": own,
    }


def engine_memory(model: Any) -> dict[str, int]:
    """Return fsdpc's bytes by purpose, or {} for other engines."""
    if not type(model).__module__.startswith("fsdpc"):
        return {}
    import fsdpc

    return fsdpc.memory_stats(model)


def host_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the seconds until backward returns, by engine and round."""
    from engines import random_batch

    failures: dict[str, str] = {}
    work = small_workload(options["tiny"], device.device)
    trainings = build_all(list(COUNT_ENGINES), work, failures)
    names = list(trainings)
    batch = random_batch(work, 0)

    def one(training: Any) -> float:
        device.synchronize()
        begin = time.perf_counter()
        training.backward(batch)
        elapsed = time.perf_counter() - begin
        training.optimizer.zero_grad()
        return elapsed

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-WARMUP_STEPS, 5 * options["rounds"]):
        for name, value in try_each(trainings, failures, one, rotated(names, turn)).items():
            if turn >= 0:
                seconds[name].append(value)
    kept = {name: seconds[name] for name in trainings}
    return {"units": work.config.layers + 1, "seconds": kept, "failures": failures}


def counts_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the launches and waits of one forward and backward, by engine."""
    from engines import random_batch

    from gpu import timeline

    failures: dict[str, str] = {}
    work = small_workload(options["tiny"], device.device)
    trainings = build_all(list(COUNT_ENGINES), work, failures)
    batch = random_batch(work, 0)
    traces = {}

    def one(training: Any) -> dict[str, Any]:
        for _ in range(WARMUP_STEPS):
            training.step(batch)
        tree = getattr(training.model, "_tree", None)
        if tree is not None:
            tree.clear_trace()
        before = engine_waits(training.model)
        found = timeline.record(lambda: training.backward(batch), device)
        waits = found.waits + engine_waits(training.model) - before
        if tree is not None:
            traces["fsdpc"] = trace_summary(tree.trace())
        own = sum(one.name.startswith("fsdpc_") for one in found.work)
        return {"launches": len(found.work), "waits": waits, "own_kernels": own}

    counted = try_each(trainings, failures, one)
    return {
        "units": work.config.layers + 1,
        "parameters": sum(p.numel() for p in plain_on_meta(work).parameters()),
        "counted": counted,
        "trace": traces.get("fsdpc", {}),
        "failures": failures,
    }


def engine_waits(model: Any) -> int:
    """Return how often fsdpc has waited so far. fsdpc polls the GPU, which no profiler shows."""
    groups = getattr(model, "_groups", None)
    if groups is None or groups.shard.device is None:
        return 0
    from fsdpc import _C

    return _C.cuda_waits(groups.shard.device)


def trace_summary(events: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of events and the total bytes of each operation."""
    found: dict[str, dict[str, int]] = {}
    for event in events:
        entry = found.setdefault(event["op"], {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += event["bytes"]
    return found


JOBS = {"time": time_job, "memory": memory_job, "host": host_job, "counts": counts_job}


def measure(args: argparse.Namespace, save: Any) -> dict[str, Any]:
    """Measure all parts. `save` is called after each part, so that a crash loses one part only."""
    tokens = [int(text) for text in args.tokens.split(",")]
    options = {
        "engines": args.engines.split(","),
        "tokens": list(TINY_TOKENS) if args.tiny else tokens,
        "rounds": args.rounds,
        "tiny": args.tiny,
        "dry": args.dry,
    }
    results: dict[str, Any] = {}
    for part in args.parts.split(","):
        if part == "memory":
            results[part] = {
                name: run_part(JOBS[part], {**options, "engine": name}, PART_SECONDS[part])
                for name in options["engines"]
            }
        else:
            results[part] = run_part(JOBS[part], options, PART_SECONDS[part])
        save(results)
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="time,memory,host,counts")
    parser.add_argument("--engines", default=DEFAULT_ENGINES)
    parser.add_argument("--tokens", default="1024,4096,16384", help="per step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a model of two small blocks")
    parser.add_argument("--dry", action="store_true", help="on the CPU in the GPU's place")
    parser.add_argument("--note", default="", help="kept in the JSON")
    parser.add_argument(
        "--json", nargs="?", const="gpu_step.json", metavar="PATH", help="write a result file"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from gpu import machine

    device = machine.open_device(args.dry)
    head = {"benchmark": "gpu_step", "note": args.note, "rounds": args.rounds, "tiny": args.tiny}
    head["run"] = {**common.describe_run(), **device.describe()}

    def save(results: dict[str, Any]) -> None:
        if args.json is not None:
            common.write_json(args.json, {**head, **step_report(results)})

    results = measure(args, save)
    report = step_report(results)
    print_step(report)
    median_loss = [statistics.fmean(curve) for curve in report.get("losses", {}).values()]
    too_far = median_loss and report["loss_difference"] > 2e-2 * median_loss[0]
    if too_far:
        print("the engines' losses differ by more than 2 percent")
    raise SystemExit(1 if too_far or report["failures"] else 0)


if __name__ == "__main__":
    main()
