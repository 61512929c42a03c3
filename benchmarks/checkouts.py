"""Compare step times and host time per unit of two checkouts of fsdpc in alternating rounds.

    python benchmarks/checkouts.py --old ../fsdpc-before --model tiny,10m,85m --rounds 31

Both checkouts must be built in place (`python setup.py build_ext --inplace`). Each checkout has two
ranks of its own, which run until the end; only the ranks of one checkout work at a time, while the
other two sleep. In each round both checkouts take a turn, and the other checkout is first in the
next round. A turn times a few steps of fsdpc and as many steps of an unsharded local copy (see
bench_step.py). Then it times single forwards and backwards, from which the local copy's time is
subtracted to give the host time. The table shows medians over rounds, and the median and quartiles
of the ratio new / old within a round. Give this checkout's own path as `--old` to see the noise.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import common
from bench_step import host_once, start_rank, time_round, warm_up

HERE = Path(__file__).resolve().parent
SIDES = ("old", "new")
ENGINES = ("fsdpc", "local")
HOST_STEPS = 10  # timed forwards and backwards per turn; their median is the turn's host time
DEADLINE = 900  # seconds for one turn


def rank_job(rank: int, folder: str, checkout: str, model: str, orders: Connection) -> None:
    """Build the engines of one rank, then answer each order with the figures of a turn."""
    sys.path.insert(0, checkout)
    start_rank(rank, 2, folder)
    from engines import WORKLOADS, build

    import fsdpc

    if Path(fsdpc.__file__).resolve().parent.parent != Path(checkout).resolve():
        raise SystemExit(f"fsdpc came from {fsdpc.__file__} instead of {checkout}")
    work = WORKLOADS[model]
    trainings = {name: build(name, work) for name in ENGINES}
    losses = {name: warm_up(trainings[name], work, name == "local") for name in ENGINES}
    orders.send({"losses": losses, "units": work.config.layers + 1})
    while True:  # until the parent ends this process
        orders.send(take_turn(trainings, work, orders.recv()))


def take_turn(trainings: dict, work: object, turn: int) -> dict[str, dict[str, float]]:
    """Return seconds per step, processor seconds per step, and host seconds, by engine."""
    import statistics

    figures: dict[str, dict[str, float]] = {name: {} for name in ENGINES}
    for name in ENGINES[turn % 2 :] + ENGINES[: turn % 2]:
        step, cpu = time_round(trainings[name], work, turn)
        figures[name] = {"step": step, "cpu": cpu}
    host: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(HOST_STEPS):
        for name in ENGINES:
            host[name].append(host_once(trainings[name], work))
    for name in ENGINES:
        figures[name]["host"] = statistics.median(host[name])
    return figures


class Side:
    """The two ranks of one checkout."""

    def __init__(self, checkout: str, model: str) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.ranks = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            job = (rank, self.folder.name, checkout, model, theirs)
            process = context.Process(target=rank_job, args=job, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def answer(self) -> dict:
        """Return rank 0's answer after both ranks have answered."""
        for pipe in self.pipes:
            if not pipe.poll(DEADLINE):
                raise SystemExit(f"a rank did not answer within {DEADLINE} s")
        try:
            return [pipe.recv() for pipe in self.pipes][0]
        except EOFError:
            raise SystemExit("a rank ended early; its error is above") from None

    def turn(self, turn: int) -> dict[str, dict[str, float]]:
        """Let both ranks take one turn and return rank 0's figures."""
        for pipe in self.pipes:
            pipe.send(turn)
        return self.answer()

    def end(self) -> None:
        """End both ranks and remove their folder."""
        for process in self.ranks:
            process.kill()
            process.join()
        self.folder.cleanup()


def measure(checkouts: dict[str, str], model: str, rounds: int) -> dict:
    """Measure both checkouts with one model and return their figures."""
    sides = {name: Side(path, model) for name, path in checkouts.items()}
    try:
        starts = {name: side.answer() for name, side in sides.items()}
        turns: dict[str, list[dict]] = {name: [] for name in SIDES}
        for k in range(rounds):
            for name in SIDES[k % 2 :] + SIDES[: k % 2]:
                turns[name].append(sides[name].turn(k))
    finally:
        for side in sides.values():
            side.end()
    losses = {name: start["losses"]["fsdpc"] for name, start in starts.items()}
    return {**report(turns, starts["new"]["units"]), "losses": losses}


def report(turns: dict[str, list[dict]], units: int) -> dict:
    """Return medians and quartiles of each checkout, and of the ratio new / old within a round."""
    result: dict[str, dict] = {}
    series: dict[str, dict[str, list[float]]] = {}
    for name, rounds in turns.items():
        series[name] = {
            "step_ms": [1e3 * r["fsdpc"]["step"] for r in rounds],
            "cpu_ms": [1e3 * r["fsdpc"]["cpu"] for r in rounds],
            "step_to_local": [r["fsdpc"]["step"] / r["local"]["step"] for r in rounds],
            "host_us_per_unit": [
                1e6 * (r["fsdpc"]["host"] - r["local"]["host"]) / units for r in rounds
            ],
        }
        result[name] = {key: common.spread(values) for key, values in series[name].items()}
    result["ratio"] = {
        key: common.spread(
            [new / old for new, old in zip(series["new"][key], series["old"][key], strict=True)]
        )
        for key in series["new"]
    }
    return result


def print_report(model: str, result: dict) -> None:
    """Print one line for each figure."""
    rows = []
    for key, ratio in result["ratio"].items():
        cells = [f"{result[side][key]['median']:.4g}" for side in SIDES]
        spread = f"{ratio['q1']:.3f}..{ratio['q3']:.3f}"
        rows.append([key, *cells, f"{ratio['median']:.3f}", spread])
    common.print_table([model, "old", "new", "new / old", "q1..q3"], rows)
    if result["losses"]["old"] != result["losses"]["new"]:
        print(f"losses differ: {result['losses']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", required=True, help="the other checkout, built in place")
    parser.add_argument("--new", default=str(HERE.parent), help="(default: this one)")
    parser.add_argument("--model", default="tiny,10m,85m", help="comma-separated (%(default)s)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else was running")
    parser.add_argument(
        "--json",
        nargs="?",
        const="checkouts.json",
        metavar="PATH",
        help="write JSON, by default to benchmarks/results/checkouts.json",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    run = common.describe_run(kept=args.json is not None)
    checkouts = {name: str(Path(getattr(args, name)).resolve()) for name in SIDES}
    commits = {name: common.commit(path) for name, path in checkouts.items()}
    models = {}
    for model in args.model.split(","):
        models[model] = measure(checkouts, model, args.rounds)
        print_report(model, models[model])
    if args.json is not None:
        head = {"benchmark": "checkouts", "rounds": args.rounds, "note": args.note, **commits}
        common.write_json(args.json, {**head, "run": run, "models": models})


if __name__ == "__main__":
    main()
