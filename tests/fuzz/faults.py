"""Faults that the fuzzer must find. Each fault is put into the ranks before their first case."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import sides
import torch


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(sides.Sharded, name, make(getattr(sides.Sharded, name)))


def gradient_of_one_rank_is_off(rank: int) -> None:
    def make(average: Any) -> Any:
        def scaled(side: Any) -> None:
            average(side)
            for p in side.model.parameters():
                if p.grad is not None and rank == 0:
                    p.grad.mul_(1.02)

        return scaled

    replace("average", make)


def one_nan(rank: int) -> None:
    def make(average: Any) -> Any:
        def spoilt(side: Any) -> None:
            average(side)
            for p in side.model.parameters():
                if p.grad is not None and p.grad.numel() and rank == 0:
                    p.grad.view(-1)[0] = float("nan")

        return spoilt

    replace("average", make)


def stale_weights(rank: int) -> None:
    """Make the root's stem compute with the values of its first forward, as if later gathers were
    dropped. After the stem's forward the gathered values are restored, because the engine itself
    refuses weights that a forward has changed.
    """

    def make(forward: Any) -> Any:
        def stale(side: Any, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(side, "old"):
                side.old = None
                flat = side.model._unit.flat

                def before(module: Any, args: Any) -> None:
                    side.now = flat.full.copy()
                    if rank == 0 and torch.is_grad_enabled():
                        if side.old is None:
                            side.old = side.now
                        flat.full[:] = side.old

                def after(module: Any, args: Any, output: Any) -> None:
                    flat.full[:] = side.now

                side.model.module.stem.register_forward_pre_hook(before)
                side.model.module.stem.register_forward_hook(after)
            return forward(side, x)

        return stale

    replace("forward", make)


def released_early(rank: int) -> None:
    """Overwrite the root's slot while the backward of its head runs, as if the slot had been
    released early."""

    def make(forward: Any) -> Any:
        def early(side: Any, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(side, "poisons"):
                side.poisons = True
                flat = side.model._unit.flat

                def drop(grad: torch.Tensor) -> None:
                    side.now = flat.full.copy()
                    flat.full[:] = float("nan")

                def gather(grad: torch.Tensor) -> None:
                    flat.full[:] = side.now

                def watch(module: Any, args: Any, output: torch.Tensor) -> None:
                    if output.requires_grad and args[0].requires_grad:
                        args[0].register_hook(gather)
                        output.register_hook(drop)

                side.model.module.head.register_forward_hook(watch)
            return forward(side, x)

        return early

    replace("forward", make)


def dies(rank: int) -> None:
    def make(forward: Any) -> Any:
        def dead(side: Any, x: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            return forward(side, x)

        return dead

    replace("forward", make)


def sleeps(rank: int) -> None:
    def make(forward: Any) -> Any:
        def asleep(side: Any, x: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                time.sleep(8)
            return forward(side, x)

        return asleep

    replace("forward", make)
