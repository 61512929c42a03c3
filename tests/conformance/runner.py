"""The cases' side of the ranks: runs them in order and writes each outcome down at once."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from library import PACKAGES, Library
from outcome import Expected, Record

STUCK_S = 20  # a rank whose partner raised inside a collective is freed after this long
LEFT = ""  # in place of a case's name: the ranks ended the set themselves


def run_cases(
    rank: int, world: int, library: str, module: str, file: str, names: list[str], folder: str
) -> None:
    """Runs the cases in order; each outcome is on disk before the next case begins."""
    cases = harness.import_test_module(module, file).case
    turn = dist.new_group(timeout=timedelta(seconds=3 * STUCK_S))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STUCK_S), dist.group.WORLD)
    gc.collect()
    gc.freeze()  # so that the collections below see only what the cases leave behind
    with open(os.path.join(folder, f"rank{rank}"), "wb") as file_out:
        for name in names:
            torch.manual_seed(0)
            record = run_case(
                cases, cases.cases[name], Library(library, PACKAGES[library], rank, world)
            )
            pickle.dump((name, vars(record)), file_out)
            file_out.flush()
            gc.collect()
            if not in_step(record, getattr(cases.cases[name], library), turn):
                pickle.dump((LEFT, {}), file_out)
                return


def in_step(record: Record, allowed: tuple[Expected, ...], turn: Any) -> bool:
    """Whether this set of ranks can go on: a rank that raised alone, or where nothing was to be
    raised, leaves collectives without a partner. A new set then takes the cases that remain.
    Collective.
    """
    stated = len(allowed) == 1 and allowed[0].kind == "raises"
    counts = torch.tensor([record.kind == "raises", not stated]).long()
    dist.all_reduce(counts, group=turn)
    raised, unstated = (count / dist.get_world_size() for count in counts.tolist())
    return raised == 0 or (raised == 1 and unstated == 0)


def run_case(cases: Any, case: Any, lib: Library) -> Record:
    function = cases.functions[case.function]
    with saved_environment(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lib.caught = caught
        try:
            return Record(value=plain(function(lib, **case.arguments)))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = isinstance(error, AssertionError) and "/tests/" in frames[-1].filename
            return Record(
                "raises",
                errors=tuple(c.__name__ for c in type(error).__mro__),
                text=str(error),
                story=traceback.format_exc(),
                ours=ours,
            )


def plain(value: Any) -> Any:
    """Raises here, in the case's own name, what pickle would raise later."""
    pickle.dumps(value)
    return value


@contextmanager
def saved_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_records(path: Path) -> dict[str, Record]:
    records: dict[str, Record] = {}
    if path.exists():
        with path.open("rb") as file:
            try:
                while True:
                    name, fields = pickle.load(file)
                    records[name] = Record(**fields)
            except (EOFError, pickle.UnpicklingError):
                pass
    return records
