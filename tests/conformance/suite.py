"""A suite of cases that run on torch's FSDP and on fsdpc, and whose outcomes are compared.

A test module makes one `Cases` object, decorates functions with it and ends with its `tests()`:

    case = Cases(__name__, __file__)

    @case(raises=ValueError, words="ndim=2")
    def hybrid_with_a_flat_mesh(lib):
        lib.wrap(toy(), sharding_strategy=HYBRID, device_mesh=mesh())

    test_torch, test_fsdpc = case.tests()

A function gets a `Library` (torch or fsdpc, with the rank and the world size) and returns plain
values and tensors. The function asserts what the documentation promises. If the documentation
promises an exception, the decorator's `raises` states this. Each case makes two tests: torch
behaves as stated, and fsdpc behaves as stated and returns torch's values on every rank. If torch
fails (`torch=raises(...)`, `wrong(...)`, `HANGS`, `dies(...)`) or fsdpc refuses on purpose
(`fsdpc=raises(...)`), the tests require this failure, and the two outcomes go into the table that
`conformance_table.py` prints at the end.

A case with `doors=DOORS` runs through three interfaces: FullyShardedDataParallel with flat and with
original parameters, and fully_shard.

All cases of a module that need the same number of ranks run on one set of ranks per library, one
after the other. A case that kills or stops its ranks ends the set; later cases run on a new set.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import pytest
import torch.distributed.fsdp as torch_fsdp
from compare import difference
from library import HAS_ROWS, Library
from outcome import WORKS, Expected, Record
from runner import LEFT, read_records, run_cases
from torch.distributed.fsdp import FSDPModule, ShardingStrategy


@dataclasses.dataclass
class Case:
    """A case: a function, and the `arguments` that one combination of `over` passes to it."""

    name: str
    function: str
    arguments: dict[str, Any]
    world: int
    torch: tuple[Expected, ...]
    fsdpc: tuple[Expected, ...]
    rtol: float
    title: str
    alone: float
    fsdpc_does: str
    env: dict[str, str]
    door: str  # the interface, one of DOORS; "" for the Library class of the module


# Values that many cases use in `over`.
BOTH = [True, False]
S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
HYBRIDS = [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]

DOORS = ("flat", "original", *(["rows"] if HAS_ROWS else []))


class Cases:
    """The cases of one test module, and the outcomes of those that have run."""

    def __init__(
        self,
        module: str,
        file: str,
        world: int = 2,
        rtol: float = 1e-5,
        library: type[Library] = Library,
    ) -> None:
        self.module, self.file, self.world, self.rtol = module, file, world, rtol
        self.library = library
        self.cases: dict[str, Case] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.records: dict[tuple[str, str], list[Record]] = {}
        self.again: set[str] = set()

    def __call__(
        self,
        *,
        raises: type[BaseException] | None = None,
        words: str = "",
        torch: Expected | tuple[Expected, ...] = WORKS,
        fsdpc: Expected | tuple[Expected, ...] = WORKS,
        fsdpc_does: str = "works",
        world: int | None = None,
        rtol: float | None = None,
        alone: float = 0.0,
        env: dict[str, str] | None = None,
        over: dict[str, Sequence[Any]] | None = None,
        doors: Sequence[str] = ("",),
        needs: str = "",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function as a case, or as one case per combination of `over`.

        `raises` is an exception that both libraries raise. `torch` and `fsdpc` are the outcomes of
        the two libraries if these differ; if fsdpc works, the table shows `fsdpc_does`. With
        `alone`, the case runs on ranks of its own, and torch's ranks count as hanging after `alone`
        seconds. `needs` is a method of FSDPModule or a name of torch's package. If torch lacks this
        method or name, the case is left out.
        """
        if needs and not (hasattr(FSDPModule, needs) or hasattr(torch_fsdp, needs)):
            return lambda function: function

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            both = Expected("raises", raises.__name__, words) if raises else None
            self.functions[function.__name__] = function
            for door, row in itertools.product(doors, rows(over or {})):
                tail = "".join(f"-{label(v)}" for v in (*([door] if door else []), *row.values()))
                name = function.__name__ + tail
                assert name not in self.cases, f"two cases are called {name}"
                self.cases[name] = Case(
                    name,
                    function.__name__,
                    row,
                    world or self.world,
                    as_tuple(both or torch),
                    as_tuple(both or fsdpc),
                    self.rtol if rtol is None else rtol,
                    title_of(function),
                    alone,
                    fsdpc_does,
                    dict(env or {}),
                    door,
                )
            return function

        return decorate

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the two test functions of the module, one for each library."""
        names = list(self.cases)

        @pytest.mark.parametrize("name", names)
        def test_torch(name: str, chosen_cases: set[tuple[str, str]]) -> None:
            self.check(name, "torch", self.outcomes(name, "torch", chosen_cases))

        @pytest.mark.parametrize("name", names)
        def test_fsdpc(name: str, chosen_cases: set[tuple[str, str]]) -> None:
            ours = self.outcomes(name, "fsdpc", chosen_cases)
            theirs = self.outcomes(name, "torch", chosen_cases)
            self.check(name, "fsdpc", ours)
            case = self.cases[name]
            if case.torch == case.fsdpc == (WORKS,):
                for rank, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
                    text = difference(got.value, expected.value, case.rtol)
                    assert not text, f"rank {rank}, fsdpc against torch: {text}"
            elif case.torch != case.fsdpc:
                self.check(name, "torch", theirs)
                stated = case.fsdpc_does if WORKS in case.fsdpc else worst(ours)
                note_difference(case.title, worst(theirs), stated)

        for test in (test_torch, test_fsdpc):
            test.case_of = self.case_of  # type: ignore[attr-defined]  for ../combinations.py
        return test_torch, test_fsdpc

    def case_of(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the name of a case's function, and the values of its axes in the case."""
        case = self.cases[name]
        axes = {**case.arguments, **({"door": case.door} if case.door else {})}
        return case.function, {axis: label(value) for axis, value in axes.items()}

    def check(self, name: str, library: str, records: list[Record]) -> None:
        """Assert the stated outcome.

        A stated value or exception must be the outcome of all ranks. If the case states wrong
        values, a hang or a death, it is enough if one rank has this outcome.
        """
        allowed = getattr(self.cases[name], library)
        met = [any(record.meets(expected) for expected in allowed) for record in records]
        kinds = {expected.kind for expected in allowed}
        some = kinds & {"hangs", "dies", "wrong"} and "value" not in kinds
        story = "\n".join(f"rank {i}: {record.full()}" for i, record in enumerate(records))
        assert any(met) if some else all(met), f"expected {allowed} of {library}, but\n{story}"

    def library_of(self, name: str, *about: Any) -> Library:
        """Return the `lib` for a case's function; `about` are the first fields of a `Library`."""
        door = self.cases[name].door
        if door == "rows":
            from rows_library import RowsLibrary

            return RowsLibrary(*about)
        return self.library(*about, made={"use_orig_params": True} if door == "original" else {})

    # --- running -----------------------------------------------------------------------------

    def outcomes(self, name: str, library: str, chosen: set[tuple[str, str]]) -> list[Record]:
        """Return each rank's record. The first call runs all chosen cases that can share ranks."""
        if (name, library) not in self.records:
            case = self.cases[name]
            together = [
                c.name
                for c in self.cases.values()
                if c.world == case.world
                and not c.alone
                and not c.env
                and ((self.module, c.name) in chosen or c is case)
            ]
            if case.alone or case.env:
                self.run_set(
                    [name], library, case.alone and (case.alone if library == "torch" else 60.0)
                )
            else:
                self.run_sets(together, library)
        if library == "torch" and name not in self.again and self.died_unexpectedly(name):
            self.again.add(name)
            self.run_set([name], library, 0.0)
        return self.records[name, library]

    def died_unexpectedly(self, name: str) -> bool:
        """Return True if a rank that ran torch died, although the case does not state a death.

        gloo sometimes damages the heap. A death counts only if a rank also dies in a second run of
        this case alone.
        """
        died = any(record.kind == "dies" for record in self.records[name, "torch"])
        return died and all(expected.kind != "dies" for expected in self.cases[name].torch)

    def run_sets(self, names: list[str], library: str) -> None:
        while names:
            done = self.run_set(names, library, 0.0)
            names = [n for n in names if n not in done]

    def run_set(self, names: list[str], library: str, deadline: float) -> set[str]:
        """Run cases on one set of ranks until a case ends the set, and store their records."""
        case = self.cases[names[0]]
        with tempfile.TemporaryDirectory(prefix="fsdpc-conform-") as folder:
            story, ends = "", [Record("hangs")] * case.world
            try:
                outcomes = harness.run_ranks(
                    run_cases,
                    case.world,
                    faults=True,
                    on_device=library == "fsdpc",
                    timeout=deadline or 60 + 3 * len(names),
                    env={**({"FSDPC_TIMEOUT": "4"} if deadline else {}), **case.env},
                    library=library,
                    module=self.module,
                    file=self.file,
                    names=names,
                    folder=folder,
                )
                ends = [end_of(outcome) for outcome in outcomes]
            except harness.RankFailure as failure:
                story = str(failure)
            found = [read_records(Path(folder, f"rank{r}")) for r in range(case.world)]
        done = set()
        for name in names:
            if not any(name in records for records in found):
                break
            done.add(name)
            self.records[name, library] = [
                records.get(name, ends[r]) for r, records in enumerate(found)
            ]
        left = all(LEFT in records for records in found)
        whole = not done or all(names[len(done) - 1] in records for records in found)
        if len(done) < len(names) and whole and not left:
            stopped = next(n for n in names if n not in done)
            self.records[stopped, library] = [
                dataclasses.replace(end, story=end.story or story) for end in ends
            ]
            done.add(stopped)
        return done


# (title of a case, kind of torch's outcome) -> (torch's outcome, fsdpc's outcome)
DIFFERENCES: dict[tuple[str, str], tuple[str, str]] = {}


def note_difference(title: str, theirs: str, ours: str) -> None:
    """Add a row to the table, unless it has a row with this title and this kind of outcome."""
    DIFFERENCES.setdefault((title, theirs.split(":")[0]), (theirs, ours))


def worst(records: list[Record]) -> str:
    """Return the worst outcome among the ranks, in a few words.

    A rank that SIGKILL ended counts as the least bad, because the case itself sent the signal.
    """
    order = {"dies": 0, "hangs": 1, "raises": 2, "value": 3}
    killed = [r.kind == "dies" and r.text == "SIGKILL" for r in records]
    ranked = sorted(range(len(records)), key=lambda i: (killed[i], order[records[i].kind]))
    return records[ranked[0]].short()


def rows(over: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*over.values()):
        yield dict(zip(over, values, strict=True))


def label(value: Any) -> str:
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def title_of(function: Callable[..., Any]) -> str:
    text = (function.__doc__ or function.__name__.replace("_", " ")).strip()
    return text.splitlines()[0].rstrip(".")


def as_tuple(expected: Expected | tuple[Expected, ...]) -> tuple[Expected, ...]:
    return (expected,) if isinstance(expected, Expected) else expected


def end_of(outcome: harness.Outcome) -> Record:
    """Return the outcome of a rank that ended before it recorded an outcome.

    The rank may have died, or it may have ended because another rank died.
    """
    if outcome.exit_signal is not None:
        import signal

        return Record("dies", text=signal.Signals(outcome.exit_signal).name, story=outcome.log)
    return Record(
        "raises",
        errors=outcome.error_types,
        text=outcome.error or "ended early",
        story=outcome.traceback + outcome.log,
    )
