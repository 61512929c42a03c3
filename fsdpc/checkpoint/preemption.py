"""Agreement of all ranks to save and end when a scheduler is about to take machines away."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdpc.checkpoint.ranks import ranks_of


class Preemption:
    """Handles signals such as SIGTERM, and lets all ranks agree after a step whether to end. The
    ranks must agree, because they may get a signal in different steps, or only one may get it.

    ::

        with checkpoint.Preemption(within=30) as preemption:
            for step, batch in enumerate(batches, 1):
                ...
                ending = preemption.agreed()
                keeper.save(step, model, optimizer, force=ending)
                if ending:
                    break
        keeper.wait()

    Args:
        within: seconds from the signal until the process is killed. If the ``with`` block has not
            ended by then, an error is logged. ``None``: no limit is known.
        signals: the signals to handle. The previous handlers are restored at the end of the block.
        group: the ranks that agree; by default all ranks.

    Local. Raises ``ValueError`` outside of the main thread, because in Python only the main thread
    can set handlers. Raises ``OSError`` for a signal that no process can handle.
    """

    def __init__(
        self,
        *,
        within: float | None = None,
        signals: tuple[int, ...] = (signal.SIGTERM,),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.within, self._group = within, group
        self._asked: float | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}
        try:
            for number in dict.fromkeys(signals):
                self._before[number] = signal.signal(number, self._on_signal)
        except BaseException:
            self.close()
            raise

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
            if self.within is not None:
                self._timer = threading.Timer(self.within, self._late)
                self._timer.daemon = True
                self._timer.start()

    def _late(self) -> None:
        logging.getLogger("fsdpc").error(
            f"{self.within} s after the signal the run has not ended: its last checkpoint may be "
            "an earlier one"
        )

    @property
    def left(self) -> float | None:
        """Return the seconds that this rank has left, or ``None`` if there was no signal yet or
        there is no limit. Local.
        """
        if self._asked is None or self.within is None:
            return None
        return self.within - (time.monotonic() - self._asked)

    def agreed(self) -> bool:
        """Return True on every rank once at least one rank has got a signal. Collective over the
        group; costs one small message. Call this method after each step, or after every n-th step.
        """
        ranks = ranks_of(self._group, beside=True)
        if ranks.world == 1:
            return self._asked is not None
        with ranks.step("agreeing whether a rank was asked to end") as asked:
            asked.value = self._asked is not None
        return any(asked.values)

    def close(self) -> None:
        """Restore the previous handlers of the signals. Local."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
