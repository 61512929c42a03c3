"""Tests that run a bounded number of cases of the model fuzzer, and that check that planted faults
are found.

`python tests/fuzz/fuzz_models.py --cases 10000` runs more cases.
"""

from __future__ import annotations

import functools

import cases
import fuzz_runs as runs
import pytest
from trees import KINDS, Builder, Cut, describe

SEED = 1
SECONDS = 10.0
EVERYTHING = Cut()
REFUSED = 0.05  # the share of cases that fsdpc may refuse
NO_COMMUNICATION = ("c10d", "hybrid")
# The test of planted faults switches this feature off, so that FSDP1 shards every model: faults are
# planted only in the class for FSDP1 (`sides.Sharded`).
FSDP1 = "fully_shard"


def test_a_case_is_its_seed():
    assert len({k.name for k in KINDS}) == len(KINDS)
    for number in range(40):
        a, b = (cases.draw_case(f"5:{number}", Cut()) for _ in range(2))
        assert (describe(a.model), a.ops, a.config) == (describe(b.model), b.ops, b.config)
        pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
        assert all(x.equal(y) for x, y in pairs)


def test_what_is_left_out_leaves_the_rest():
    whole = cases.draw_case("5:3", Cut())
    part = cases.draw_case("5:3", Cut(nodes=frozenset({1})))
    assert whole.nodes == part.nodes and whole.ops == part.ops
    lines = zip(describe(whole.model).splitlines(), describe(part.model).splitlines(), strict=False)
    assert next(a == b for a, b in lines)
    assert Builder("s", 3, Cut(without=frozenset(k.name for k in KINDS))).build(3, 9) is not None


@pytest.mark.long
@pytest.mark.parametrize(
    "fault, outcome",
    [
        ("gradient_of_one_rank_is_off", "WRONG"),
        ("one_nan", "WRONG"),
        ("stale_weights", "WRONG"),
        ("released_early", "WRONG"),
        ("dies", "CRASHED"),
        ("sleeps", "HUNG"),
    ],
)
def test_planted_faults_are_found(fault, outcome):
    """Each planted fault is found within a few cases, and these cases pass without the fault."""
    plain = frozenset(
        {k.name for k in KINDS}
        | set(cases.OPS)
        | {*NO_COMMUNICATION, FSDP1, "mixed", "no_shard", *cases.STYLES}
    )
    cut = Cut(without=plain - {"residual", "sequence", "parallel", "mlp", "shared"})
    found = [
        r.outcome
        for r in results_of(
            list(range(8)), cut, patch=fault, timeout=3.0 if fault == "sleeps" else None
        )
    ]
    assert outcome in found, f"{fault}: {found}"
    assert set(outcomes_of(range(8), cut)) == {"ok"}


def results_of(numbers, cut, **options):
    """Runs cases on 2 ranks up to the first that is bad; returns all results."""
    config = cases.config_of(f"{SEED}:0", cut.without, 2)
    results = []
    for result in runs.run_numbers(SEED, numbers, cut, config, **options):
        results.append(result)
        if result.outcome in runs.BAD:
            break
    return results


@functools.cache  # the results without a planted fault, which all planted faults need
def outcomes_of(numbers, cut):
    return runs.fuzz(SEED, list(numbers), cut, 2).outcomes


def test_random_models_and_steps():
    """Random cases of a fixed seed are correct. As many cases run as a fixed time allows."""
    bad = []

    def each(result, summary):
        if result.outcome in runs.BAD:
            again = runs.outcome_of(SEED, result.number, EVERYTHING)
            bad.append(
                f"{result.outcome} --seed {SEED} --only {result.number}: {result.text} "
                f"(again: {again.outcome})\n{result.story}"
            )

    summary = runs.fuzz(
        SEED, list(range(2000)), EVERYTHING, minutes=SECONDS / 60, each=each, batch=12
    )
    assert not bad, "\n\n".join(bad) + summary.table()
    total = sum(summary.outcomes.values())
    assert total and summary.outcomes["ok"] > 0.7 * total, summary.table()
    assert summary.outcomes["refused"] <= max(5, REFUSED * total), summary.table()
