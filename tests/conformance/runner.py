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
from library import PACKAGES
from outcome import Expected, Record
from torch.utils._pytree import tree_map

TESTS = Path(__file__).parents[1]

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
            lib = cases.library_of(name, library, PACKAGES[library], rank, world)
            record = run_case(cases, cases.cases[name], lib)
            pickle.dump((name, vars(record)), file_out)
            gc.collect()
            stated = is_stated(record, getattr(cases.cases[name], library))
            if not stated or not all_alike(record, turn):
                pickle.dump((LEFT, {}), file_out)
                file_out.close()
                if not stated:
                    os._exit(0)  # at once, so that no rank waits in vain for this one
                return
            file_out.flush()


def is_stated(record: Record, allowed: tuple[Expected, ...]) -> bool:
    """True for a value or an exception that all ranks were to raise. After any other, ranks are in
    different places and their collectives have no partners: new ranks take the remaining cases.
    """
    return record.kind == "value" or (len(allowed) == 1 and allowed[0].kind == "raises")


def all_alike(record: Record, turn: Any) -> bool:
    """Whether all ranks returned or all raised. Collective."""
    raised = torch.tensor(int(record.kind == "raises"))
    try:
        dist.all_reduce(raised, group=turn)
    except RuntimeError:  # a rank has left
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
    """Raises in the case's own name what pickle would raise later, and moves tensors of a GPU to
    host memory.
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
