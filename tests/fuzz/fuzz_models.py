"""Random models and training steps on sharded ranks, compared with an unsharded copy.

    python tests/fuzz/fuzz_models.py --cases 10000 --seed 1 [--minutes 60] [--ranks 2]
    python tests/fuzz/fuzz_models.py --seed 1 --only 1234          # one case, in full
    python tests/fuzz/fuzz_models.py --seed 1 --only 1234 --shrink # and made smaller
    python tests/fuzz/fuzz_models.py --without lora,ema,penalty    # features switched off

A case depends only on the seed and its number. Its outcome is ok, invalid (the unsharded program
raises an error, or overflows), refused (fsdpc raised an error), WRONG (a value differs by more than
the bound, or is NaN), HUNG (a deadline passed) or CRASHED (a process died of a signal). Ranks run
one case after another until a case is neither ok nor invalid; new ranks run the next cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    p for p in (str(HERE), str(HERE.parent / "dist"), str(HERE.parents[1])) if p not in sys.path
]

import cases  # noqa: E402
import harness  # noqa: E402
from fuzz_runs import BAD, Result, Summary, fuzz, outcome_of, show_case, shrink  # noqa: E402
from trees import KINDS, Cut  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone and show it")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so long")
    parser.add_argument("--ranks", type=int, default=0, help="this many instead of 1 to 4")
    parser.add_argument(
        "--without",
        default="",
        help="features switched off, by comma: "
        + ", ".join(
            [k.name for k in KINDS] + list(cases.OPS) + list(cases.STYLES) + list(cases.SWITCHES)
        ),
    )
    parser.add_argument("--cut", default="{}", help="what --shrink printed")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", help="append what is not ok to this file, as JSON lines")
    return parser.parse_args()


def main() -> int:
    asked = parse()
    cut = Cut(without=frozenset(filter(None, asked.without.split(","))))
    cut = cut.also(**{k: frozenset(v) for k, v in json.loads(asked.cut).items()})
    if asked.only is not None:
        result = outcome_of(asked.seed, asked.only, cut, asked.ranks)
        if asked.shrink and result.outcome not in ("ok", "invalid"):
            cut = shrink(asked.seed, asked.only, cut, result, asked.ranks)
            result = outcome_of(asked.seed, asked.only, cut, asked.ranks)
        print(show_case(asked.seed, asked.only, cut, asked.ranks))
        print("--cut", json.dumps({k: sorted(v) for k, v in vars(cut).items() if v}))
        print(f"{result.outcome}: {result.text}\n{result.story}")
        return int(result.outcome in BAD)
    numbers = list(range(asked.first, asked.first + asked.cases))
    try:
        from tqdm import tqdm

        bar = tqdm(total=len(numbers), unit="case", smoothing=0.05)
    except ImportError:
        bar = None

    def each(result: Result, summary: Summary) -> None:
        if bar is not None:
            bar.set_postfix_str(summary.line(), refresh=False)
            bar.update()
        if result.outcome in BAD:
            write = bar.write if bar is not None else print
            write(f"{result.outcome} {asked.seed} --only {result.number}: {result.text}")
        if asked.out and result.outcome not in ("ok", "invalid"):
            with open(asked.out, "a") as file:
                print(json.dumps(dataclasses.asdict(result)), file=file)

    summary = fuzz(asked.seed, numbers, cut, asked.ranks, asked.minutes, each)
    if bar is not None:
        bar.close()
    print(summary.table())
    return int(any(summary.outcomes[k] for k in BAD))


if __name__ == "__main__":
    try:
        code = main()
    finally:
        harness.Template.close()
    sys.exit(code)
