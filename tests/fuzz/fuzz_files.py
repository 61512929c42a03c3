"""Random sequences of operations on checkpoint folders ("lives" of folders), with faults.

Among the operations are runs that go back to earlier steps, writers that are killed or that
overwrite what is being read, bits that flip, files that are lost or mixed up, and files of other
libraries.

    python tests/fuzz/fuzz_files.py --minutes 60 --seed 1
    python tests/fuzz/fuzz_files.py --seed 1 --only 123        # one life, told step by step

A life depends only on the seed and its number, except for the moments of kills. A load must give
all values of one save or raise ``CheckpointError``. A load that fails must change nothing, unless
the fault is found while values are being read. A run must go on from the step that was published
last, or say that this step is not known. ``verify``, ``compare`` and ``convert`` must never report
that a damaged checkpoint is good.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.checkpoint.convert import convert
from fsdpc.checkpoint.verify import compare, verify

Values = dict[str, Tensor]
OPERATIONS = 14  # the number of operations of a life
DEADLINE_S = 120


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.two = nn.Linear(5, 300).bfloat16()
        self.tied = self.one
        self.scale = nn.Parameter(torch.tensor(1.0))


def training() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return found


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Fills all tensors with values that no other save has."""
    rng = torch.Generator().manual_seed(number)
    for _, tensor in sorted(tensors_of(model, optimizer).items()):
        tensor.data.copy_(torch.randint(0, 250, tensor.shape, generator=rng))


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    return {key: value.clone() for key, value in tensors_of(model, optimizer).items()}


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Wrong(Exception):
    """The error that the fuzzer raises if the library did what it must not do."""


@dataclass
class Saved:
    """A checkpoint at its path. ``order`` is larger for a step that was published later.
    ``damaged`` says how the checkpoint was damaged, and is "" for an intact checkpoint."""

    path: Path
    values: Values
    order: int = 0
    damaged: str = ""

    def unknown(self) -> bool:
        """Return True if the manifest does not tell when the checkpoint was published."""
        return self.damaged.endswith(" fsdpc.json")


@dataclass
class Life:
    """One run's folder, and what should be in it."""

    seed: str
    home: Path
    tell: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.keep = self.rng.choice([None, None, 1, 2, 3])
        self.run = checkpoint.Checkpointer(
            self.home / "run", keep=self.keep, async_=self.rng.random() < 0.2
        )
        self.steps: dict[int, Saved] = {}
        self.plain: dict[str, Saved] = {}
        self.model, self.optimizer = training()
        self.saves = self.orders = self.step = 0
        self.resumed: int | None = None

    # --- operations ----------------------------------------------------------------------------

    def live(self) -> list[int]:
        """Return the steps of the run, the last published first, without the steps that the run
        gave up when it went back to an earlier step."""
        found: list[int] = []
        for step in sorted(self.steps, key=lambda s: -self.steps[s].order):
            if not found or step < found[-1]:
                found.append(step)
        return found

    def do_save(self) -> None:
        back = self.steps and self.rng.random() < 0.3
        step = self.rng.choice([*self.steps]) if back else self.step + 10
        self.fill()
        self.tell(f"save {step}")
        if self.refuses(self.run.path(step)):
            return
        self.run.save(step, self.model, self.optimizer, extra={"number": self.saves})
        self.run.wait()
        self.publish(step, kept(self.model, self.optimizer))

    def publish(self, step: int, values: Values) -> None:
        self.orders += 1
        self.step = step
        self.steps[step] = Saved(self.run.path(step), values, self.orders)
        for old in [s for s in self.steps if not self.steps[s].path.exists()]:
            if old == step or self.keep is None or self.steps[old].unknown():
                raise Wrong(f"step {old} was removed")
            del self.steps[old]
        order = self.live() + sorted(set(self.steps) - set(self.live()))
        spared = {step, self.resumed} | {s for s in self.steps if self.steps[s].unknown()}
        if self.keep is not None and len(order) > self.keep + len(spared):
            raise Wrong(f"{order} are kept, not {self.keep}")

    def do_resume(self) -> None:
        self.fill()
        before = kept(self.model, self.optimizer)
        newest = self.live()[0] if self.steps else None
        back = bool(self.steps) and self.rng.random() < 0.3
        asked = self.rng.choice([*self.steps]) if back else None
        wanted = newest if asked is None else asked
        self.tell(f"resume {asked}, {wanted} expected")
        hidden = asked is None and any(s.unknown() for s in self.steps.values())
        try:
            loaded = self.run.resume(self.model, self.optimizer, step=asked)
        except CheckpointError as error:
            self.tell(f"  {error}")
            damaged = wanted is not None and self.steps[wanted].damaged
            if not damaged and not hidden:
                raise Wrong(f"step {wanted} is sound: {error}") from error
            self.unchanged(before)
            return
        if loaded is None or wanted is None:
            if (loaded is None) != (wanted is None) and not self.gone():
                raise Wrong(f"nothing to resume from, but {wanted} is there")
            return
        if loaded.step != wanted:
            raise Wrong(f"went on from step {loaded.step}, not {wanted}")
        self.check(self.steps[wanted], loaded.verified)
        self.resumed = self.step = wanted
        if asked is not None:
            self.orders += 1
            self.steps[wanted].order = self.orders

    def gone(self) -> bool:
        """Return True if no step has a manifest any more. Then nothing tells which steps exist."""
        return not any((s.path / "fsdpc.json").exists() for s in self.steps.values())

    def do_load(self) -> None:
        saved = self.any_saved()
        if saved is None:
            return
        how: Any = self.rng.choice(["before", "before", "during", "no"])
        self.fill()
        before = kept(self.model, self.optimizer)
        self.tell(f"load {saved.path.name} ({saved.damaged or 'sound'}), verified {how}")
        try:
            loaded = checkpoint.load(saved.path, self.model, self.optimizer, verify=how)
        except CheckpointError as error:
            self.tell(f"  {error}")
            if not saved.damaged:
                raise Wrong(f"{saved.path} is sound: {error}") from error
            if how != "during" and "values were being read" not in str(error):
                self.unchanged(before)
            return
        if how == "no" and saved.damaged:
            return
        self.check(saved, loaded.verified)

    def do_damage(self) -> None:
        saved = self.any_saved()
        if saved is None or saved.damaged or self.rng.random() < 0.4:
            return
        file = self.rng.choice(sorted(p for p in saved.path.rglob("*") if p.is_file()))
        data = bytearray(file.read_bytes())
        kind = self.rng.choice(["bit", "bit", "cut", "lost", "other", "zeros", "parts"])
        others = [s.path / file.relative_to(saved.path) for s in self.all_saved() if s is not saved]
        others = [o for o in others if o.exists() and o.read_bytes() != data]
        if kind == "bit":
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        elif kind == "cut":
            del data[self.rng.randrange(len(data)) :]
        elif kind == "zeros":
            at = self.rng.randrange(len(data))
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        elif kind == "other" and others and file.name != "fsdpc.json":
            data = bytearray(others[0].read_bytes())
        if kind == "lost":
            file.unlink()
        elif kind == "parts" and (saved.path / "optimizer").exists():
            shutil.rmtree(saved.path / "optimizer")
            file = saved.path / "optimizer"
        elif bytes(data) != file.read_bytes():
            file.write_bytes(data)
        else:
            return
        saved.damaged = f"{kind} of {file.relative_to(saved.path)}"
        self.tell(f"damage {saved.path.name}: {saved.damaged}")

    def do_verify(self) -> None:
        saved = self.any_saved()
        if saved is None:
            return
        try:
            report = verify(saved.path)
        except CheckpointError as error:
            if not saved.damaged:
                raise Wrong(f"verify of a sound {saved.path}: {error}") from error
            return
        if bool(report.damaged) != bool(saved.damaged):
            raise Wrong(f"verify of {saved.path} ({saved.damaged or 'sound'}): {report}")

    def do_compare(self) -> None:
        one, other = self.any_saved(), self.any_saved()
        if one is None or other is None:
            return
        equal = same(one.values, other.values)
        try:
            lines = compare(one.path, other.path)
        except CheckpointError as error:
            if not (one.damaged or other.damaged):
                raise Wrong(f"compare: {error}") from error
            return
        if not (one.damaged or other.damaged) and bool(lines) == equal:
            raise Wrong(f"compare of {one.path} and {other.path}: {lines}")
        if not lines and not equal:
            raise Wrong(f"compare calls {one.path} and {other.path} equal")

    def do_convert(self) -> None:
        saved = self.any_saved()
        if saved is None:
            return
        self.saves += 1
        target = self.home / f"converted-{self.saves}"
        form = self.rng.choice(["safetensors", "dcp"])
        self.tell(f"convert {saved.path.name} ({saved.damaged or 'sound'}) to {form}")
        try:
            convert(saved.path, target, None, form)
        except CheckpointError as error:
            self.tell(f"  {error}")
            if not saved.damaged:
                raise Wrong(f"convert of a sound {saved.path}: {error}") from error
            if (target / "fsdpc.json").exists():
                raise Wrong("a failed conversion left a checkpoint") from error
            return
        made = Saved(target, saved.values)
        self.fill()
        checkpoint.load(target, self.model, self.optimizer)
        self.check(made, True)
        if form == "safetensors":
            self.plain[target.name] = made

    def do_overwrite(self) -> None:
        """Overwrite a checkpoint one or more times while a child process loads from its path."""
        name = self.rng.choice(["a", "b"])
        path = self.home / name
        self.fill()
        if name not in self.plain:
            checkpoint.save(path, self.model, self.optimizer)
            self.plain[name] = Saved(path, kept(self.model, self.optimizer))
            return
        if self.refuses(path):
            return
        known = [] if self.plain[name].damaged else [self.plain[name].values]
        versions = [self.saves + i + 1 for i in range(self.rng.choice([1, 4]))]
        self.tell(f"overwrite {name} {len(versions)} times, read meanwhile")
        child = os.fork()
        if child == 0:
            self.in_child(lambda: self.read_meanwhile(path, known, versions))
        try:
            for _ in versions:
                self.fill()
                checkpoint.save(path, self.model, self.optimizer, overwrite=True)
                self.plain[name] = Saved(path, kept(self.model, self.optimizer))
        finally:
            self.end_child(child)

    def refuses(self, path: Path) -> bool:
        """Return True if the path exists and is no checkpoint. A save must not replace it."""
        if not path.exists() or (path / "fsdpc.json").exists():
            return False
        try:
            checkpoint.save(path, self.model, self.optimizer, overwrite=True)
        except CheckpointError as error:
            if "is no checkpoint, so it is not replaced" not in str(error):
                raise
            return True
        raise Wrong(f"{path} without a manifest was overwritten")

    def read_meanwhile(self, path: Path, known: list[Values], versions: list[int]) -> None:
        model, optimizer = training()
        for number in versions:
            fill(model, optimizer, number)
            known.append(kept(model, optimizer))
        until = time.monotonic() + 0.25
        while time.monotonic() < until:
            fill(model, optimizer, 0)
            before = kept(model, optimizer)
            how: Any = self.rng.choice(["before", "during"])
            try:
                loaded = checkpoint.load(path, model, optimizer, verify=how)
            except CheckpointError as error:
                found = kept(model, optimizer)
                during = how == "during" or "values were being read" in str(error)
                if not during and not same(found, before):
                    raise Wrong(f"a failed load changed values: {error}") from error
                continue
            found = kept(model, optimizer)
            if not loaded.verified or not any(same(found, one) for one in known):
                raise Wrong("a load of what was overwritten mixed saves")

    def do_kill(self) -> None:
        """Save in a child process that is killed at a random moment."""
        step = self.step + 10
        manifest = self.run.path(step) / "fsdpc.json"
        before = manifest.read_bytes() if manifest.exists() else b""
        self.fill()
        child = os.fork()
        if child == 0:
            self.in_child(lambda: self.run.save(step, self.model, self.optimizer))
        time.sleep(self.rng.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there = manifest.exists() and manifest.read_bytes() != before
        self.tell(f"killed save {step}: {'there' if there else 'not there'}")
        if there:
            self.publish(step, kept(self.model, self.optimizer))

    def do_foreign(self) -> None:
        """Load files that torch wrote. A load must give the right values or raise an error; if a
        file is cut or lost, it must raise an error."""
        form = self.rng.choice(["bin", "pt", "dcp"])
        self.saves += 1
        path = self.home / f"foreign-{self.saves}"
        self.fill()
        wanted = kept(self.model, self.optimizer)
        optimizer: Any = None
        if form == "bin":
            path.mkdir()
            torch.save(self.model.state_dict(), path / "pytorch_model.bin")
        elif form == "pt":
            path = path.with_suffix(".pt")
            optimizer = self.optimizer
            state = {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path)
        else:
            weights, states = get_state_dict(self.model, self.optimizer)
            optimizer = self.optimizer
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(
                    {"model": weights, "optimizer": states}, checkpoint_id=str(path), no_dist=True
                )
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        files += list(path.glob(".metadata")) if path.is_dir() else []
        damage = self.rng.choice(["", "cut", "bit", "lost"])
        file = self.rng.choice(files)
        data = bytearray(file.read_bytes())
        if damage == "cut":
            file.write_bytes(data[: self.rng.randrange(len(data))])
        elif damage == "bit":
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            file.write_bytes(data)
        elif damage == "lost":
            file.unlink()
        self.tell(f"foreign {form} {damage} {file.name}")
        self.fill()
        before = kept(self.model, self.optimizer)
        try:
            loaded = checkpoint.load(path, self.model, optimizer)
        except CheckpointError as error:
            self.tell(f"  {error}")
            if not damage:
                raise Wrong(f"a sound {form}: {error}") from error
            if "values were being read" not in str(error):
                self.unchanged(before)
            return
        found = kept(self.model, self.optimizer)
        if optimizer is None:
            names = self.model.state_dict().keys()
            found, wanted = ({k: v[k] for k in names} for v in (found, wanted))
        if damage in ("cut", "lost") and not same(found, wanted):
            raise Wrong(f"a {form} file, {damage}, was loaded with other values")
        if not damage and (loaded.verified or not same(found, wanted)):
            raise Wrong(f"a sound {form} was loaded with other values, or as verified")

    # --- helpers -------------------------------------------------------------------------------

    def fill(self) -> None:
        self.saves += 1
        fill(self.model, self.optimizer, self.saves)

    def all_saved(self) -> list[Saved]:
        return [*self.steps.values(), *self.plain.values()]

    def any_saved(self) -> Saved | None:
        found = self.all_saved()
        return self.rng.choice(found) if found else None

    def unchanged(self, before: Values) -> None:
        if not same(kept(self.model, self.optimizer), before):
            raise Wrong("a load that failed has changed values")

    def check(self, saved: Saved, verified: bool) -> None:
        if not same(kept(self.model, self.optimizer), saved.values):
            raise Wrong(f"other values than {saved.path} has ({saved.damaged or 'sound'})")
        if saved.damaged and verified:
            raise Wrong(f"{saved.path} ({saved.damaged}) was loaded as verified")

    def in_child(self, call: Callable[[], Any]) -> None:
        status = 1
        try:
            signal.alarm(DEADLINE_S)
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def end_child(self, child: int) -> None:
        _, status = os.waitpid(child, 0)
        if status:
            raise Wrong(f"a child that reads ended with {status}")

    def live_on(self) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(OPERATIONS):
            name = self.rng.choice([*names, "do_save", "do_save", "do_resume"])
            getattr(self, name)()
            self.done[name[3:]] += 1


def run_case(seed: int, number: int, tell: Callable[[str], None]) -> Counter[str]:
    """Run one life. Raise ``Wrong`` if something is not as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        life = Life(f"{seed}:{number}", Path(folder), tell)
        life.live_on()
        return life.done


def run(seed: int, seconds: float, first: int = 0) -> tuple[int, Counter[str], list[str]]:
    """Run lives until the time is over; return their number, the operations and the faults."""
    begun, number, done = time.monotonic(), first, Counter[str]()
    faults = []
    while time.monotonic() - begun < seconds:
        story: list[str] = []
        try:
            done += run_case(seed, number, story.append)
        except Exception:
            text = traceback.format_exc()
            faults.append(f"--seed {seed} --only {number}\n" + "\n".join([*story, text]))
        number += 1
    return number - first, done, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one life")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        run_case(options.seed, options.only, lambda text: print(text, flush=True))
        return 0
    until, lives, found, operations = time.monotonic() + 60 * options.minutes, 0, 0, Counter[str]()
    while time.monotonic() < until:
        count, done, faults = run(options.seed, min(20.0, until - time.monotonic()), lives)
        lives, found, operations = lives + count, found + len(faults), operations + done
        for fault in faults:
            print(fault, flush=True)
        print(f"{lives} lives, {found} faults", flush=True)
    print(dict(operations))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
