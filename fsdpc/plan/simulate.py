"""``python -m fsdpc simulate``: a step on many numbers of ranks, and where scaling stops.

Layout and schedule of one rank are computed as in the engine. All ranks are alike, so 100,000 ranks
take no more time than one. Step times are from the model of cost.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdpc.plan import options, show
from fsdpc.plan.cost import assumed, scaling, stops_scaling
from fsdpc.plan.ledger import plan

COMPARED = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
MOST_RANKS = 100_000
Figures = dict[str, float]
_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "ranks": lambda row: f"{row['world']:,.0f}",
    "peak": lambda row: show.size(row["peak_bytes"]),
    "padding": lambda row: show.size(row["padding_bytes"]),
    "calls": lambda row: f"{row['collectives']:,.0f}",
    "sent": lambda row: show.size(row["sent_bytes"]),
    "compute": lambda row: show.seconds(row["compute_s"]),
    "wire": lambda row: show.seconds(row["wire_s"]),
    "step": lambda row: show.seconds(row["step_s"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "busy": lambda row: f"{row['efficiency']:.0%}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulate a step at many worlds: bytes, padding, collectives and time of each strategy, "
        "with the batch of a rank kept. calls: collectives; tokens/s: of one GPU; busy: "
        "the part of a step in compute."
    )
    options.add_arguments(parser)
    parser.add_argument("--worlds", help="numbers of ranks, with commas")
    parser.add_argument(
        "--strategies", default=",".join(COMPARED), help="with commas (default: all four)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.set_defaults(suggest=False, simulate=True)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code. 0: success; 2: the options contradict each other."""

    def work() -> int:
        return show_worlds(arguments, options.wanted(arguments), arguments.strategies.split(","))

    return options.answer("simulate", work)


def worlds_of(text: str | None, default: Sequence[int]) -> list[int]:
    """Return the worlds in ``text``, or ``default`` if it is empty. ``ValueError`` names a part of
    ``text`` that is not a number of ranks.
    """
    if not text:
        return list(default)
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isdecimal() and int(part))]
    if wrong:
        raise ValueError(
            f"--worlds {text}: {wrong[0]!r} is no number of ranks; write numbers with commas, such "
            "as --worlds 8,64,512"
        )
    return [int(part) for part in parts]


def show_worlds(
    arguments: argparse.Namespace, wanted: options.Wanted, strategies: Sequence[str]
) -> int:
    """Print a row for each world and strategy. With ``--json``, print JSON instead: a dict by
    strategy, or a list of rows for ``plan --simulate``, which has one strategy.
    """
    host = wanted.setup.ranks_per_host
    default = [host * 4**i for i in range(7)]
    worlds = worlds_of(arguments.worlds, [*default, MOST_RANKS // host * host])
    found = {name: _rows(wanted, name, worlds) for name in strategies}
    if arguments.json:
        several = {name: _as_dict(rows) for name, rows in found.items()}
        print(json.dumps(several if hasattr(arguments, "strategies") else found[strategies[0]]))
        return 0
    model = plan(wanted.build, wanted.setup).model.name
    for name, rows in found.items():
        cells = [[cell(row) for cell in _COLUMNS.values()] for row in rows]
        show.table(f"{model}, {name}: a step at each world", list(_COLUMNS), cells)
    for name, rows in found.items():
        show.line(_verdict(name, rows))
    show.line(f"note: {assumed(wanted.card)}")
    return 0


def _rows(wanted: options.Wanted, name: str, worlds: Sequence[int]) -> list[Figures]:
    setup = wanted.setup
    if name != setup.strategy:
        setup = replace(setup, strategy=name, shard=0)
    plans = [plan(wanted.build, options.at_world(setup, world)) for world in worlds]
    return scaling(plans, wanted.card)


def _as_dict(rows: list[Figures]) -> dict[str, object]:
    return {"worlds": rows, "stops_scaling": stops_scaling(rows)}


def _verdict(name: str, rows: list[Figures]) -> str:
    end = stops_scaling(rows)
    if end is None:
        last = rows[-1]
        return f"{name}: still {last['efficiency']:.0%} in compute at {last['world']:,.0f} ranks"
    return f"{name}: stops scaling at {end:,.0f} ranks, where less than half of a step is compute"
