"""``python -m fsdpc plan``: memory and time of a training step, and the plans that fit a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from fsdpc.plan import advise, options, show, simulate, snapshot
from fsdpc.plan.cost import assumed, cost
from fsdpc.plan.ledger import Plan, plan

EXAMPLES = """examples:
  fsdpc plan llama-3-8b --gpu h100 --world 16 --sequence 8192   a known model: does a step fit?
  fsdpc plan config.json --memory 24GB --world 4 --suggest      a transformers model: what fits?
  fsdpc plan train:build --cpu --world 2 --explain              your own: train.py, def build()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Plan the memory and time of a training step, without a GPU."
    options.add_arguments(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="each unit's bytes, and what every switch would change",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="search for plans that fit --gpu or --memory, fastest first",
    )
    parser.add_argument("--worlds", help="worlds for --suggest and --simulate, with commas")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="bytes, padding, collectives and step time over many worlds",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--plot", metavar="FILE", help="also draw a picture: .png, .svg or .pdf")
    parser.add_argument(
        "--snapshot", metavar="FILE", help="also write it for torch's memory viewer"
    )
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code. 0: success; 1: ``--suggest`` finds no plan that fits; 2: the options
    contradict each other.
    """

    def work() -> int:
        wanted = options.wanted(arguments)
        if arguments.suggest:
            return _suggest(arguments, wanted)
        if arguments.simulate:
            return simulate.show_worlds(arguments, wanted, [wanted.setup.strategy])
        return _show(arguments, wanted)

    return options.answer("plan", work)


def _show(arguments: argparse.Namespace, wanted: options.Wanted) -> int:
    made = plan(wanted.build, wanted.setup)
    known = cost(made, wanted.card) if not arguments.cpu else None
    timed = (assumed(wanted.card),) if known is not None and made.model.flops else ()
    made = replace(made, notes=(*wanted.notes, *made.notes, *timed))
    other = wanted.builds.get("embeddings") if arguments.wrap == "blocks" else None
    found = advise.changes(wanted.build, made, wanted.card, other) if arguments.explain else []
    if arguments.plot:
        _draw(arguments.plot, made, wanted)
    if arguments.snapshot:
        points = made.timeline
        snapshot.write(arguments.snapshot, snapshot.snapshot(points, points[0].live))
    if arguments.json:
        print(json.dumps(_as_dict(made, wanted, known, found)))
        return 0
    show.show_plan(made, wanted.usable, known)
    if not arguments.explain:
        show.line("reasons, units and what each switch would change: --explain")
        return 0
    show.line("")
    show.show_reasons(made)
    show.show_units(made)
    show.show_changes(found, timed=not arguments.cpu and made.model.flops > 0)
    return 0


def _as_dict(made: Plan, wanted: options.Wanted, known: object, found: list) -> dict:
    result = made.as_dict()
    if wanted.usable is not None:
        result["usable_bytes"] = wanted.usable
        result["fits"] = made.fits(wanted.usable)
    if known is not None:
        result["cost"] = {**vars(known), "step": known.step, "between": known.between}  # type: ignore[attr-defined]
    if found:
        result["changes"] = [
            {"switch": c.label, "bytes": c.bytes, "seconds": c.seconds} for c in found
        ]
    return result


def _draw(path: str, made: Plan, wanted: options.Wanted) -> None:
    from fsdpc.plan.picture import draw

    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    others = [(n, plan(wanted.build, replace(wanted.setup, strategy=n, shard=0))) for n in names]
    draw(path, made, others, wanted.usable)


def _suggest(arguments: argparse.Namespace, wanted: options.Wanted) -> int:
    if wanted.usable is None:
        raise ValueError("--suggest needs --gpu or --memory")
    model = plan(wanted.build, wanted.setup).model
    if model.missing:
        raise ValueError(f"--suggest compares whole plans, but {model.missing}")
    if model.flops == 0:
        raise ValueError("--suggest ranks by step time, but the inputs have no token ids")
    names = dict.fromkeys((wanted.setup.optimizer, "adamw-fused", "adamw8bit"))
    worlds = simulate.worlds_of(arguments.worlds, [wanted.setup.world])
    found = advise.suggest(
        wanted.builds, wanted.setup, wanted.card, wanted.usable, optimizers=names, worlds=worlds
    )
    least = None
    if not found:
        least = advise.smallest_world(wanted.builds, wanted.setup, wanted.usable)
    if arguments.json:
        print(
            json.dumps(
                {
                    "fits": [
                        {
                            "plan": s.label,
                            "upper_bytes": s.plan.upper,
                            "step_s": s.cost.step,
                            "tokens_per_second": s.tokens_per_second,
                        }
                        for s in found
                    ],
                    "smallest_world": least,
                }
            )
        )
        return 0 if found else 1
    if found:
        show.show_suggestions(found)
        show.line(f"note: {assumed(wanted.card)}")
        return 0
    show.line(_nothing(least))
    return 1


def _nothing(least: int | None) -> str:
    if least is None:
        return (
            "does not fit on any number of ranks: activations, or one unit, are too large for "
            "one card. Use --loss fused, a shorter --sequence, or tensor parallelism"
        )
    return f"does not fit; the smallest world that does: {least} (everything recomputed)"
