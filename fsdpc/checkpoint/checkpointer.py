"""A folder of checkpoints, one per step: the newest, how many are kept, and going on from it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpc.checkpoint import background as _background
from fsdpc.checkpoint import folders as _folders
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.background import SaveHandle
from fsdpc.checkpoint.loading import Loaded, Verify, run_load
from fsdpc.checkpoint.names import Only, lasting
from fsdpc.checkpoint.progress import bar
from fsdpc.checkpoint.ranks import ranks_of
from fsdpc.checkpoint.saving import make_plan, write_plan

_NAME = re.compile(r"step-(\d{6,})")
_LATEST = "latest"


class Checkpointer:
    """Checkpoints ``directory/step-000100``. Every rank makes one with the same arguments.

    Args:
        directory: made if it is not there.
        keep: this many of the newest stay; ``None`` keeps all. One is removed only when a newer
            one is durable, and never the one that ``latest`` names or that was resumed from.
        every: ``save`` does nothing at steps that it does not divide.
        async_: save in the background; see ``fsdpc.checkpoint.save``.
        dtype: of the model's floats in the files.
        when_busy, progress: see ``fsdpc.checkpoint.save``.
        only: what is saved and loaded; see ``fsdpc.checkpoint.save`` and ``load``.
        group: the ranks that save together; default all.

    Local. ``ValueError``: ``keep`` or ``every`` below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        async_: bool = False,
        dtype: torch.dtype | None = None,
        when_busy: _background.WhenBusy = "wait",
        progress: bool = False,
        only: Only = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.directory = Path(os.path.abspath(directory))
        self.keep, self.every, self.async_ = keep, every, async_
        self._dtype, self._group = dtype, group
        self._when_busy: _background.WhenBusy = when_busy
        self._progress, self._only = progress, lasting(only)
        self._resumed: Path | None = None

    def path(self, step: int) -> Path:
        """The folder of a step. Local."""
        return self.directory / f"step-{step:06d}"

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save a step, then remove the oldest. Collective; waits for a save in the background.

        Returns ``None`` at steps that ``every`` does not divide (unless ``force``) and for saves
        that are complete. ``CheckpointError`` as ``fsdpc.checkpoint.save``, also that of the save
        before, if it has failed in the background.
        """
        if not force and self.every is not None and step % self.every:
            return None
        ranks = ranks_of(self._group)

        def after() -> None:
            with ranks.step(f"naming checkpoint {self.path(step)} the latest"):
                if ranks.rank == 0:
                    self._published(step)

        with ranks.together():
            _background.make_room(self._when_busy, self._group)
            plan = make_plan(
                self.path(step),
                ranks,
                model,
                optimizer,
                scheduler,
                extra,
                dtype=self._dtype,
                step=step,
                overwrite=True,
                only=self._only,
            )
            advance = bar(plan, ranks, self._progress)
            if self.async_:
                return _background.start(plan, ranks, advance=advance, after=after)
            write_plan(plan, ranks, advance=advance)
            after()
        return None

    def wait(self) -> None:
        """Wait for the save in the background; its error is raised. Local."""
        _background.finish_running()

    def resume(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        *,
        strict: bool = True,
        verify: Verify = "before",
    ) -> Loaded | None:
        """Load the newest complete checkpoint; ``None`` without one. Collective.

        Leftovers of saves that were killed are removed first. ``CheckpointError``: the newest one
        is damaged; an older one is loaded only by its path.
        """
        ranks = ranks_of(self._group)
        with ranks.together():
            _background.finish_running()
            with ranks.step(f"looking for checkpoints in {self.directory}") as looked:
                if ranks.rank == 0:
                    self._clean()
                    found = self.latest()
                    looked.value = None if found is None else found.name
            if looked.values[0] is None:
                return None
            self._resumed = self.directory / looked.values[0]
            return run_load(
                self._resumed,
                ranks,
                model,
                optimizer,
                scheduler,
                strict=strict,
                cast=False,
                verify=verify,
                only=self._only,
            )

    def latest(self) -> Path | None:
        """The newest complete checkpoint: the one that the file ``latest`` names, or, without a
        usable one, the highest step with a manifest. Local.
        """
        try:
            name = (self.directory / _LATEST).read_text().strip()
        except FileNotFoundError:
            name = ""
        named = self.directory / name
        steps = self.steps()
        if _NAME.fullmatch(name) and int(name[5:]) in steps:
            newer = [step for step in steps if step > int(name[5:])]
            return self.path(newer[-1]) if newer else named  # killed before `latest` was written
        return self.path(steps[-1]) if steps else None

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending. Local."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / _manifest.NAME).is_file():
                found.append(int(match[1]))
        return sorted(found)

    def _published(self, step: int) -> None:
        _folders.replace_durably(self.directory / _LATEST, f"{self.path(step).name}\n".encode())
        if self.keep is None:
            return
        for old in [s for s in self.steps() if s != step][: -self.keep + 1 or None]:
            if old < step and self.path(old) != self._resumed:
                _folders.remove(self.path(old))

    def _clean(self) -> None:
        if self.directory.is_dir():
            for step in self.directory.iterdir():
                match = re.match(r"\.(?:new|old)-(?:\.new-)?(step-\d{6,})-", step.name)
                if match:
                    _folders.clean(self.directory / match[1])
