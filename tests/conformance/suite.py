"""One behaviour, two libraries: cases run on torch's FSDP and on fsdpc, outcomes compared.

A test module makes one `Cases` object, decorates functions with it and ends with its `tests()`:

    case = Cases(__name__, __file__)

    @case(raises=ValueError, words="ndim=2")
    def hybrid_with_a_flat_mesh(lib):
        lib.wrap(toy(), sharding_strategy=HYBRID, device_mesh=mesh())

    test_torch, test_fsdpc = case.tests()

A function gets a `Library` (which of the two, rank, world) and returns plain values and tensors; it
asserts what the documentation promises, or states it as `raises`. Each case is two tests: torch's
class behaves as stated, and fsdpc's outcome is equal on every rank. Where torch fails
(`torch=raises(...)`, `wrong(...)`, `HANGS`, `dies(...)`) or fsdpc deliberately refuses
(`fsdpc=raises(...)`), the failure must be observed, and the pair goes into the table that
`conformance_table.py` prints at the end.

A case with `doors=DOORS` is asked of both interfaces: of FullyShardedDataParallel with flat and
with original parameters, and of fully_shard.

All cases of a module that need the same number of ranks run in one set of ranks per library, one
after the other. A case that kills or stops its ranks ends the set; those after it get a new one.
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
    """One behaviour. `arguments`: what this row of a parametrised function passes."""

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
    door: str  # which of DOORS the case is asked of; "": the test module's own Library


# Values that many cases give to `over`.
BOTH = [True, False]
S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
HYBRIDS = [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]

DOORS = ("flat", "original", *(["rows"] if HAS_ROWS else []))


class Cases:
    """The cases of one test module, and their outcomes once they ran."""

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
        """Registers a function as a case, or as one per combination of `over`.

        `raises`: both libraries raise it. `torch`, `fsdpc`: how that library ends, if the two
        differ; `fsdpc_does` says in the table what fsdpc does instead. `alone`: the case gets
        ranks of its own, and torch's count as hanging after so many seconds. `needs`: a method of
        FSDPModule, or a name of torch's package, without which the case is left out.
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
        """The two test functions of the module, one for each library."""
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
        """The name of a case's function, and the case's row of that function's axes."""
        case = self.cases[name]
        axes = {**case.arguments, **({"door": case.door} if case.door else {})}
        return case.function, {axis: label(value) for axis, value in axes.items()}

    def check(self, name: str, library: str, records: list[Record]) -> None:
        """Asserts the stated outcome: a value or an exception on all ranks; what goes wrong, hangs
        or dies need do so on one rank only.
        """
        allowed = getattr(self.cases[name], library)
        met = [any(record.meets(expected) for expected in allowed) for record in records]
        kinds = {expected.kind for expected in allowed}
        some = kinds & {"hangs", "dies", "wrong"} and "value" not in kinds
        story = "\n".join(f"rank {i}: {record.full()}" for i, record in enumerate(records))
        assert any(met) if some else all(met), f"expected {allowed} of {library}, but\n{story}"

    def library_of(self, name: str, *about: Any) -> Library:
        """The `lib` that the case's function gets; `about`: the first fields of a `Library`."""
        door = self.cases[name].door
        if door == "rows":
            from rows_library import RowsLibrary

            return RowsLibrary(*about)
        return self.library(*about, made={"use_orig_params": True} if door == "original" else {})

    # --- running -----------------------------------------------------------------------------

    def outcomes(self, name: str, library: str, chosen: set[tuple[str, str]]) -> list[Record]:
        """Each rank's record; runs all chosen cases of this module on the first call."""
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
        """True if a rank of torch's died where it should not: gloo sometimes damages the heap. Such
        a death counts if a second run, of this case alone, ends so, too.
        """
        died = any(record.kind == "dies" for record in self.records[name, "torch"])
        return died and all(expected.kind != "dies" for expected in self.cases[name].torch)

    def run_sets(self, names: list[str], library: str) -> None:
        while names:
            done = self.run_set(names, library, 0.0)
            names = [n for n in names if n not in done]

    def run_set(self, names: list[str], library: str, deadline: float) -> set[str]:
        """Runs the cases in one set of ranks, up to a case that ends the set; keeps the records."""
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


DIFFERENCES: dict[tuple[str, str], tuple[str, str]] = {}  # -> (torch, fsdpc), for the table


def note_difference(title: str, theirs: str, ours: str) -> None:
    """One row per title and kind of failure, however many variants of a case there are."""
    DIFFERENCES.setdefault((title, theirs.split(":")[0]), (theirs, ours))


def worst(records: list[Record]) -> str:
    """For the table: the worst rank. SIGKILL comes last, as the case itself sent that signal."""
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
    """How a rank without a record of a case ended: it died, or its partner did and it was ended."""
    if outcome.exit_signal is not None:
        import signal

        return Record("dies", text=signal.Signals(outcome.exit_signal).name, story=outcome.log)
    return Record(
        "raises",
        errors=outcome.error_types,
        text=outcome.error or "ended early",
        story=outcome.traceback + outcome.log,
    )
