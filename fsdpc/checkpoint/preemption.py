"""A save when the scheduler takes the machine away: SIGTERM, and a stated time until the end."""

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
    """Whether a rank was asked to end, agreed on by all of them after a step: ranks get the signal
    in different steps, or only one of them gets it.

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
        within: seconds from the signal until the end of the process; where the block has not ended
            by then, an error is logged that says so. ``None``: no limit is known.
        signals: which ones; the handlers that were there come back at the end of the block.
        group: the ranks that agree; default all.

    Local. ``ValueError``: not in the main thread, where Python handles signals. ``OSError``: a
    signal that no process can handle.
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
        """Seconds until the end, on this rank; ``None``: no signal yet, or no limit. Local."""
        if self._asked is None or self.within is None:
            return None
        return self.within - (time.monotonic() - self._asked)

    def agreed(self) -> bool:
        """True on every rank once one rank has had a signal. Collective over the group, one small
        message; call this after each step, or after every n-th.
        """
        ranks = ranks_of(self._group, beside=True)
        if ranks.world == 1:
            return self._asked is not None
        with ranks.step("agreeing whether a rank was asked to end") as asked:
            asked.value = self._asked is not None
        return any(asked.values)

    def close(self) -> None:
        """Give the signals back to the handlers that were there. Local."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
