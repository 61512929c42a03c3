"""``Checkpointer``: saves a checkpoint per step into one folder, removes old ones, and resumes."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdpc.checkpoint import background as _background
from fsdpc.checkpoint import folders as _folders
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint import steps as _steps
from fsdpc.checkpoint.background import SaveHandle
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.loading import Loaded, Verify
from fsdpc.checkpoint.names import Only, lasting
from fsdpc.checkpoint.progress import bar
from fsdpc.checkpoint.ranks import ranks_of
from fsdpc.checkpoint.saving import write_plan
from fsdpc.checkpoint.several import Models, Optimizers, States, plan_of, run_several, states_of
from fsdpc.checkpoint.storage import AnyPath, place_of
from fsdpc.checkpoint.upload import way_to


class Checkpointer:
    """A directory of checkpoints, one folder per step (``directory/step-000100``). Every rank makes
    this object with the same arguments.

    The checkpoint that was saved last is the newest, whatever its step. If a run goes back to an
    earlier step (by ``resume(step=100)``, or by a save at a step that is not higher), the later
    steps are abandoned: ``abandoned()`` lists them, and ``keep`` removes them first.

    Args:
        directory: the directory, made if it does not exist, or a URL that a driver of fsspec
            handles (``s3://bucket/run``). At a URL, the folder of a step is a checkpoint only if it
            has ``fsdpc.json``; folders without this file are removed together with old steps.
        keep: how many of the newest checkpoints stay; ``None`` keeps all. A checkpoint is removed
            only when a newer one is durable. A checkpoint stays in any case if the file ``latest``
            names it, if the run has resumed from it, or if its ``fsdpc.json`` is damaged.
        keep_every: steps that are multiples of this number stay, too.
        best: ``"min"`` or ``"max"``: the ``keep_best`` steps with the lowest or highest ``metric``
            of ``save`` stay, too.
        keep_best: how many steps stay because of ``best``; of steps with equal metrics, the later
            ones stay.
        protected: these steps stay, even if they are abandoned. ``keep_every`` and ``best`` do not
            keep abandoned steps.
        every: ``save`` does nothing at steps that are not multiples of this number.
        async_: save in the background; see ``fsdpc.checkpoint.save``.
        dtype: the dtype of the model's floats in the files.
        when_busy, progress: see ``fsdpc.checkpoint.save``.
        only: the tensors to save and load; see ``fsdpc.checkpoint.save`` and ``load``.
        staging: for a URL; see ``fsdpc.checkpoint.save``.
        link: if false, no two steps share a file; see ``fsdpc.checkpoint.save``.
        group: the ranks that save together; by default all ranks.

    Local. Raises ``ValueError`` if a number is below 1, or if ``best`` is neither "min" nor "max".
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: Literal["min", "max"] | None = None,
        keep_best: int = 1,
        protected: Iterable[int] = (),
        every: int | None = None,
        async_: bool = False,
        dtype: torch.dtype | None = None,
        when_busy: _background.WhenBusy = "wait",
        progress: bool = False,
        only: Only = None,
        staging: str | os.PathLike[str] | None = None,
        link: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if best not in (None, "min", "max"):
            raise ValueError(f"best must be 'min' or 'max', not {best!r}")
        counts = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best, "every": every}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.directory = place_of(directory)
        self._staging, self._link = staging, link
        self.keep, self.every, self.async_ = keep, every, async_
        self._keep_every, self._best, self._keep_best = keep_every, best, keep_best
        self._protected = frozenset(protected)
        self._dtype, self._group = dtype, group
        self._when_busy: _background.WhenBusy = when_busy
        self._progress, self._only = progress, lasting(only)
        self._resumed: int | None = None
        self._told: set[int] = set()  # abandoned steps that a warning has named

    def path(self, step: int) -> AnyPath:
        """Return the folder of a step. Local."""
        return _steps.folder_of(self.directory, step)

    def save(
        self,
        step: int,
        model: Models,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        states: States = None,
        rng: bool = False,
        metric: float | None = None,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save a checkpoint of ``step``, then remove old ones. Collective. If an earlier save is
        running in the background, ``when_busy`` decides what happens. ``metric`` is the value for
        ``best``, the same on every rank.

        Returns a handle if the save continues in the background. Returns ``None`` if the save is
        complete, and at steps that are not multiples of ``every`` (unless ``force`` is true).
        Raises ``CheckpointError`` as ``fsdpc.checkpoint.save`` does, and if the previous save has
        failed in the background. If the text has "naming checkpoint ... the latest", the checkpoint
        is complete, and only the file ``latest`` could not be written. Raises ``ValueError`` if
        ``step`` is negative, and ``TypeError`` if ``step`` is no whole number.
        """
        step = _steps.number_of(step)
        if not force and self.every is not None and step % self.every:
            return None
        ranks = ranks_of(self._group)

        def after() -> None:
            way()
            with ranks.step(f"naming checkpoint {self.path(step)} the latest"):
                if ranks.rank == 0:
                    self._published(step)

        with ranks.together():
            _background.make_room(self._when_busy, self._group)
            with ranks.step(f"saving checkpoint {self.path(step)}") as given:
                scheduler, objects = states_of(scheduler, states, rng)
                given.value = metric = None if metric is None else float(metric)
                if metric is not None and not math.isfinite(metric):
                    raise ValueError(f"metric must be a finite number, not {metric}")
            if any(value != metric for value in given.values):
                raise CheckpointError(f"ranks give other metrics: {given.values}")
            target = self.path(step)
            way = way_to(target, ranks, self._staging, overwrite=True, is_step=True)
            plan = plan_of(
                way.local,
                ranks,
                model,
                optimizer,
                scheduler,
                extra,
                objects,
                dtype=self._dtype,
                step=step,
                overwrite=True,
                only=self._only,
                file_bytes=way.file_bytes,
            )
            plan.metric, plan.published = metric, way.published
            plan.links = way.links and self._link
            advance = bar(plan, ranks, self._progress)
            if self.async_:
                return _background.start(plan, ranks, advance=advance, after=after, target=target)
            write_plan(plan, ranks, advance=advance)
            after()
        return None

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error if the save failed. Local."""
        _background.finish_running()

    def resume(
        self,
        model: Models,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        *,
        states: States = None,
        rng: bool = False,
        step: int | None = None,
        strict: bool = True,
        verify: Verify = "before",
    ) -> Loaded | None:
        """Load the newest complete checkpoint; return ``None`` if there is none. Collective. If
        ``step`` is given, load the checkpoint of this step instead: the run goes back to the step,
        whose checkpoint is the newest from then on, also for a later ``resume``.

        Leftovers of saves that were killed are removed first. Raises ``CheckpointError`` if the
        checkpoint is damaged (no other is loaded instead), if it is not known which checkpoint
        is the newest because some ``fsdpc.json`` is damaged or missing, or if there is no
        checkpoint of ``step``.
        """
        ranks = ranks_of(self._group)
        with ranks.together():
            _background.finish_running()
            with ranks.step(f"looking for checkpoints in {self.directory}") as looked:
                looked.value = (step, self._look(step) if ranks.rank == 0 else None)
            found = looked.values[0][1]
            if any(asked != step for asked, _ in looked.values):
                raise CheckpointError(
                    f"resume: the ranks ask for different steps: {[n for n, _ in looked.values]}"
                )
            if found is None:
                return None
            with ranks.step(f"loading checkpoint {self.path(found)}"):
                scheduler, objects = states_of(scheduler, states, rng)
            loaded = run_several(
                self.path(found),
                ranks,
                model,
                optimizer,
                scheduler,
                objects,
                strict=strict,
                cast=False,
                verify=verify,
                only=self._only,
            )
            self._resumed = found
            if step is not None:
                with ranks.step(f"going back to {self.path(step)}"):
                    if ranks.rank == 0:
                        self._go_back(step)
            return loaded

    def latest(self) -> AnyPath | None:
        """Return the folder of the newest complete checkpoint, which is the one that was published
        last, or ``None`` if there is none. Local. Raises ``CheckpointError`` if it is not known
        which checkpoint is the newest; see ``resume``.
        """
        newest = self._newest(_steps.read_steps(self.directory))
        return None if newest is None else self.path(newest)

    def best(self) -> AnyPath | None:
        """Return the folder of the complete checkpoint with the best metric, or ``None`` if there
        is none. Local. Raises ``ValueError`` if ``best=`` is not given.
        """
        if self._best is None:
            raise ValueError("best= is not given, so no metric is the best")
        ranked = self._ranked(_steps.read_steps(self.directory).live)
        return self.path(ranked[0]) if ranked else None

    def _ranked(self, live: list[int]) -> list[int]:
        """Return the steps with a metric, the best first; of equal metrics, the latest first."""
        sign = 1.0 if self._best == "min" else -1.0
        metrics = _steps.read_metrics(self.directory, live)
        return sorted(metrics, key=lambda step: (sign * metrics[step], -step))

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, also abandoned ones, in ascending order.
        Local.
        """
        found = _steps.read_steps(self.directory)
        return sorted(found.live + found.abandoned)

    def abandoned(self) -> list[int]:
        """Return the abandoned steps in ascending order: those later than a step to which the run
        has gone back. Local.
        """
        return sorted(_steps.read_steps(self.directory).abandoned)

    def _look(self, step: int | None) -> int | None:
        self._clean()
        found = _steps.read_steps(self.directory)
        complete = sorted(found.live + found.abandoned)
        if step is not None:
            if step not in complete + found.damaged:  # loading a damaged step tells what is damaged
                raise CheckpointError(f"no complete checkpoint of step {step}, only of {complete}")
            return step
        newest = self._newest(found)
        named = _steps.named_latest(self.directory)
        if named in complete and named != newest:
            logging.getLogger("fsdpc").warning(
                f"{self.directory / _steps.LATEST} names step {named}, but step {newest} "
                f"was published after it: going on from there (resume(step={named}) goes back)"
            )
        return newest

    def _newest(self, found: _steps.Steps) -> int | None:
        newest = found.live[0] if found.live else None
        if found.damaged and (newest is None or newest != _steps.named_latest(self.directory)):
            complete = sorted(found.live + found.abandoned)
            raise CheckpointError(
                f"{self.directory}: fsdpc.json of the steps {found.damaged} is damaged or missing, "
                f"so which step was saved last is not known: remove their folders, or go on from "
                f"one of {complete} by resume(step=...)"
            )
        return newest

    def _go_back(self, step: int) -> None:
        if step != _steps.read_steps(self.directory).live[0]:
            path = self.path(step) / _manifest.NAME
            known = _manifest.decode(path.read_bytes())
            number = _steps.next_number(self.path(step))
            known = dataclasses.replace(known, published=number)
            path.put(known.encode())
        self._name_latest(step)

    def _name_latest(self, step: int) -> _steps.Steps:
        (self.directory / _steps.LATEST).put(f"{self.path(step).name}\n".encode())
        found = _steps.read_steps(self.directory)
        left = [each for each in sorted(found.abandoned) if each not in self._told]
        if left:
            self._told.update(left)
            removed = "" if self.keep is None else f"; keep={self.keep} removes them first"
            logging.getLogger("fsdpc").warning(
                f"{self.directory}: the run has gone back, to step {step}: later steps {left} are "
                f"abandoned{removed}"
            )
        return found

    def _published(self, step: int) -> None:
        found = self._name_latest(step)
        if self.keep is None:
            return
        stay = {step, self._resumed, *self._protected}
        if self._keep_every is not None:
            stay |= {each for each in found.live if each % self._keep_every == 0}
        if self._best is not None:
            stay |= set(self._ranked(found.live)[: self._keep_best])
        for old in (found.live + found.abandoned)[self.keep :]:
            if old in stay:
                continue
            self._remove(self.path(old))
        for folder in _steps.incomplete(self.directory):
            self._remove(folder)

    def _remove(self, folder: AnyPath) -> None:
        try:
            folder.remove()
        except Exception as error:  # the new checkpoint is complete anyway
            logging.getLogger("fsdpc").warning(f"{folder} cannot be removed: {error}")

    def _clean(self) -> None:
        if self.directory.appears_whole and self.directory.is_dir():
            for step in self.directory.iterdir():
                match = re.match(r"\.(?:new|old)-(?:\.new-)?(step-\d{6,})-", step.name)
                if match:
                    _folders.clean(self.directory / match[1])
