"""The code that runs cases on a rank, in order, and writes each outcome to a file at once."""

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
from library import PACKAGES
from outcome import Expected, Record
from torch.utils._pytree import tree_map

TESTS = Path(__file__).parents[1]

STUCK_S = 20  # timeout of a case's collectives, which a rank that raised never joins
LEFT = ""  # recorded in place of a case's name if a rank ended the set early


def run_cases(
    rank: int, world: int, library: str, module: str, file: str, names: list[str], folder: str
) -> None:
    """Runs the cases in order; each outcome is on disk before the next case begins."""
    cases = harness.import_test_module(module, file).case
    turn = dist.new_group(timeout=timedelta(seconds=3 * STUCK_S))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STUCK_S), dist.group.WORLD)
    gc.collect()
    gc.freeze()  # later collections then visit only objects that cases leave behind
    with open(os.path.join(folder, f"rank{rank}"), "wb") as file_out:
        for name in names:
            torch.manual_seed(0)
            lib = cases.library_of(name, library, PACKAGES[library], rank, world)
            record = run_case(cases, cases.cases[name], lib)
            pickle.dump((name, vars(record)), file_out)
            gc.collect()
            stated = is_stated(record, getattr(cases.cases[name], library))
            if not stated or not all_alike(record, turn):
                pickle.dump((LEFT, {}), file_out)
                file_out.close()
                if not stated:
                    os._exit(0)  # exit at once, so that no rank waits for this one
                return
            file_out.flush()


def is_stated(record: Record, allowed: tuple[Expected, ...]) -> bool:
    """Return True if the case returned a value, or must raise on all ranks.

    After any other outcome the ranks are at different points of the program, so that collectives
    would not match. New ranks then run the remaining cases.
    """
    return record.kind == "value" or (len(allowed) == 1 and allowed[0].kind == "raises")


def all_alike(record: Record, turn: Any) -> bool:
    """Return True if all ranks returned or all ranks raised. Collective."""
    raised = torch.tensor(int(record.kind == "raises"))
    try:
        dist.all_reduce(raised, group=turn)
    except RuntimeError:  # another rank has exited
        return False
    return int(raised) in (0, dist.get_world_size())


def run_case(cases: Any, case: Any, lib: Any) -> Record:
    function = cases.functions[case.function]
    with saved_environment(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lib.caught = caught
        try:
            return Record(value=plain(function(lib, **case.arguments)))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = isinstance(error, AssertionError) and TESTS in Path(frames[-1].filename).parents
            return Record(
                "raises",
                errors=tuple(c.__name__ for c in type(error).__mro__),
                text=str(error),
                story=traceback.format_exc(),
                ours=ours,
            )


def plain(value: Any) -> Any:
    """Move tensors of a GPU to host memory, and check that the value can be pickled.

    An error of pickle is then raised inside of the case, and becomes its outcome.
    """
    value = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) and x.is_cuda else x, value)
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
