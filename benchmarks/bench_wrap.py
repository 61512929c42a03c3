"""Time wrapping a model by fsdpc and by torch's FSDP1 in the same two ranks.

    python benchmarks/bench_wrap.py --model 5,33,200
    python benchmarks/bench_wrap.py --model 33 --first --json

A round makes a new model for each class (not timed), waits at a barrier, and times the constructor
with a wrap policy. Then it times the first forward, in which both classes do the setup that is
needed once per model. A time is that of the slower rank; a ratio divides by FSDP1's time in the
same round. "cpu" is the processor time of the constructor on rank 0, which does not include the
time of other programs. A model is dropped before the next one is made. With ``--first`` each round
wraps over a new process group, so that fsdpc's time includes making the group's communicator;
otherwise the group already has one.

Models are GPTs. `5`, `33` and `200` have that many units, with 12 small parameters in each block
(width 32). `85m` has 13 units of width 768; moving the values is most of the work there.
"""

from __future__ import annotations

import argparse
import gc
import time
from multiprocessing.connection import Connection

import common
from bench_step import end_rank, run_ranks, start_rank

MODELS = {"5": (4, 32), "33": (32, 32), "200": (199, 32), "85m": (12, 768)}
WARMUP_ROUNDS = 2
PARTS = ("wrap", "cpu", "forward")


def workload(model: str) -> object:
    """Return the model's sizes, and one short sequence as its batch."""
    from engines import GPTConfig, Workload

    layers, width = MODELS[model]
    config = GPTConfig(layers=layers, width=width, heads=width // 16 if width < 64 else 12)
    return Workload(config, batch=1, seq=16, steps=1)


def wrap_job(
    rank: int, world: int, folder: str, out: Connection, model: str, first: bool, rounds: int
) -> None:
    """Time all rounds on one rank; rank 0 sends the seconds of each round by class and part."""
    start_rank(rank, world, folder)
    work = workload(model)
    names = ["fsdpc", "fsdp1"]
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds + WARMUP_ROUNDS):
        for name in names[turn % 2 :] + names[: turn % 2]:
            taken = time_one(name, work, first)
            if turn >= WARMUP_ROUNDS:
                seconds[name].append(taken)
    if rank == 0:
        out.send(seconds)
    end_rank()


def time_one(name: str, work: object, first: bool) -> dict[str, float]:
    """Return the slower rank's seconds of the constructor and of the first forward, and this rank's
    processor seconds of the constructor.
    """
    import torch.distributed as dist
    from engines import plain_model, random_batch

    group = dist.new_group() if first else dist.group.WORLD
    module = plain_model(work)
    tokens, _ = random_batch(work, 0)
    gc.collect()
    dist.barrier(group)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    model = wrapped(name, module, group)
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    wrap = slowest(elapsed)
    middle = time.perf_counter()
    model(tokens)
    return {"wrap": wrap, "cpu": cpu, "forward": slowest(time.perf_counter() - middle)}


def wrapped(name: str, module: object, group: object) -> object:
    """Return the wrapped model, which has one unit per block and one unit for the rest."""
    import functools

    from engines import Block

    if name == "fsdpc":
        import fsdpc as library
        from fsdpc import wrap
    else:
        from torch.distributed import fsdp as library
        from torch.distributed.fsdp import wrap
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return library.FullyShardedDataParallel(
        module,
        process_group=group,
        auto_wrap_policy=policy,
        device_id=next(module.parameters()).device,
        use_orig_params=True,
    )


def slowest(seconds: float) -> float:
    """Return the largest of the ranks' values."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def report(seconds: dict[str, list[dict[str, float]]]) -> dict:
    """Return medians and quartiles of milliseconds and of the ratios to FSDP1 within a round."""
    engines: dict[str, dict] = {}
    for name, rounds in seconds.items():
        engines[name] = {}
        for part in PARTS:
            mine = [taken[part] for taken in rounds]
            theirs = [taken[part] for taken in seconds["fsdp1"]]
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            engines[name][f"{part}_ms"] = common.spread([1e3 * value for value in mine])
            engines[name][f"{part}_ratio"] = common.spread(ratios)
    return engines


def print_report(model: str, engines: dict) -> None:
    def cell(values: dict, digits: int) -> str:
        return "{median:.{d}f} ({q1:.{d}f}..{q3:.{d}f})".format(d=digits, **values)

    head = [model, "wrap ms", "x fsdp1", "cpu ms", "x fsdp1", "first forward ms", "x fsdp1"]
    columns = [f"{part}_{unit}" for part in PARTS for unit in ("ms", "ratio")]
    rows = [[name, *(cell(figures[c], 2) for c in columns)] for name, figures in engines.items()]
    common.print_table(head, rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(MODELS), help="comma-separated (%(default)s)")
    parser.add_argument("--first", action="store_true", help="a new process group in each round")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else was running")
    parser.add_argument(
        "--json",
        nargs="?",
        const="wrap.json",
        metavar="PATH",
        help="write JSON, by default to benchmarks/results/wrap.json",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    run = common.describe_run(kept=args.json is not None)
    models = {}
    for model in args.model.split(","):
        models[model] = report(run_ranks(wrap_job, 2, model, args.first, args.rounds))
        print_report(model, models[model])
    if args.json is not None:
        head = {"benchmark": "wrap", "rounds": args.rounds, "note": args.note}
        head |= {"ranks": 2, "threads_per_rank": 1, "new_group": args.first}
        common.write_json(args.json, {**head, "run": run, "models": models})


if __name__ == "__main__":
    main()
