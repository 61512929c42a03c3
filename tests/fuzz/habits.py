"""Operations beyond training: what programs do between two steps with weights, modules and child
processes. fsdpc must refuse some of these operations; the program then goes on.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import sides
import torch
import torch.distributed as dist
import toys
from kinds import STATE
from sides import Plain, Side
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

FORK_S = 10  # seconds that a child may take; other ranks wait longer for its parent
REFUSED = "refused"  # a record that has a value of this name counts as equal


def refused(side: Side, text: str, call: Callable[[], Any]) -> None:
    """Check that ``call`` raises an error with ``text`` on a sharded model. The unsharded copy does
    not call it."""
    if isinstance(side, Plain):
        side.optimizer.zero_grad()
        return
    try:
        call()
    except Exception as error:
        if text not in str(error):
            raise
    else:
        side.record(f"not refused: {text}", {})
    side.optimizer.zero_grad()


def sharded(side: Side) -> bool:
    """Return True if the weights are sharded, so that the engine gathers them."""
    return side.case.config.world > 1 and side.case.config.strategy != "NO_SHARD"


def inner(side: Side) -> nn.Module:
    return getattr(side.model, "module", side.model)


def loss_of(out: Tensor) -> Tensor:
    return (out * out).mean()


def learn(side: Side, label: str, loss: Tensor | None = None) -> None:
    """Run the rest of a step, and record the gradients. If ``loss`` is given, run the backward of
    ``loss`` first."""
    if loss is not None and loss.requires_grad:
        side.backward(loss)
    side.average()
    side.record(label, side.gradients())
    side.optimizer.step()
    side.optimizer.zero_grad()


def write_lost(side: Side, x: Tensor) -> None:
    """Write into a weight during a forward, without putting the old value back."""
    if not sharded(side):
        return

    def write(module: nn.Module, args: Any) -> None:
        module.weight.data.mul_(1.5)

    def step() -> None:
        handle = inner(side).stem.register_forward_pre_hook(write)
        try:
            side.backward(loss_of(side.forward(x)))
        finally:
            handle.remove()

    kept = [buffer.clone() for buffer in side.model.buffers()]  # a forward changes running means
    if isinstance(side, Plain):
        side.forward(x)
    refused(side, "changed in place during forward", step)
    for buffer, before in zip(side.model.buffers(), kept, strict=True):
        buffer.copy_(before)


def changed_before_backward(side: Side, x: Tensor) -> None:
    """Change weights before backward. Backward must raise an error, or give the gradients of the
    old weights."""
    label = "changed between forward and backward"
    if not side.case.config.in_place or not everywhere(side) or not sharded(side):
        return  # some ranks might not notice the change, or use the new weights in backward
    params = [p for p in side.trained().parameters() if p.is_floating_point()]
    loss = loss_of(side.forward(x))
    if not loss.requires_grad:
        return
    if isinstance(side, Plain):
        side.backward(loss)
        side.average()
        side.record(label, side.gradients())
    else:
        dist.barrier()  # a rank that is late in its forward must not see the change
        change(params, 2.0)
        kept = True
        try:
            side.backward(loss)
        except Exception as error:
            kept = "was changed on rank" not in str(error)
            if kept:
                raise
        kept = sides.agree(kept)
        change(params, 0.5)
        side.record(label, side.gradients() if kept else {REFUSED: torch.zeros(())})
    side.optimizer.zero_grad()


def everywhere(side: Side) -> bool:
    """Return True if every rank has a shard of each parameter, and therefore notices each
    change."""
    world = side.case.config.world
    rows = [p.shape[0] if p.dim() else 0 for p in side.trained().parameters()]
    return all(n >= world and -(-n // -(-n // world)) == world for n in rows)


def change(params: list[Tensor], factor: float) -> None:
    for p in params:
        p.data.mul_(factor)


def added(side: Side, x: Tensor) -> None:
    """Add a module that no unit manages. A forward must be refused until the module is marked as
    replicated."""
    import fsdpc

    if isinstance(side, Plain):
        if side.case.config.world > 1:
            side.optimizer.zero_grad()  # as `refused` does for the sharded model
        side.forward(x)
        return
    module = inner(side)
    module.added = nn.Linear(2, 2)
    if side.case.config.world > 1:
        refused(side, "were added after", lambda: side.forward(x))
    fsdpc.mark_replicated(module.added)
    side.forward(x)
    del module.added


def status_of(pid: int, begun: int) -> int:
    """Wait for a forked child and return its status, 0 for success.

    Python 3.11 can leave a child in ``os.fork`` for ever: before Python makes its locks anew, the
    child waits for a lock that another thread held at the fork (``_PyThreadState_DeleteExcept``).
    That fault is Python's, so the status of such a child is 0, too. ``begun``: a pipe into which
    the child writes as soon as the child runs.
    """
    end = os.pidfd_open(pid)
    ended = select.select([end], [], [], FORK_S)[0]
    os.close(end)
    stuck = not ended and not select.select([begun], [], [], 0)[0] and sys.version_info < (3, 12)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return 0 if stuck else status


def fork(side: Side, x: Tensor) -> None:
    """Fork a child, which writes to its copy of the model between a forward and its backward."""
    loss = loss_of(side.forward(x))
    begun, begins = os.pipe()
    pid = 0 if isinstance(side, Plain) else os.fork()
    if pid == 0 and not isinstance(side, Plain):
        os.write(begins, b"1")
        signal.alarm(60)
        for p in side.trained().parameters():
            if p.is_floating_point():
                p.data.mul_(0.0)
        os._exit(0)
    if loss.requires_grad:
        side.backward(loss)
    status = status_of(pid, begun) if pid else 0
    os.close(begun)
    os.close(begins)
    side.record(f"child ended with {status}" if status else "child ended", {})
    learn(side, "gradients beside a child")


def flags(side: Side, x: Tensor) -> None:
    """Record which parameters are frozen, if the sharded model has the original parameters."""
    if side.case.config.use_orig:
        side.record("requires_grad", side.flags())


def func(side: Side, x: Tensor, choice: float) -> None:
    """Call torch.func's transforms, if the unsharded model supports them."""

    def run(model: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        if choice < 0.5:
            out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            return {"out": out, "tangent": tangent}
        with torch.no_grad():
            return {"out": torch.func.vmap(model)(torch.stack([x, 0.5 * x]))}

    taken: list[bool] = side.case.taken
    if isinstance(side, Plain):
        tried = copy.copy(side)
        tried.model = copy.deepcopy(side.model)
        try:
            run(tried.forward)
        except Exception:
            taken.append(sides.agree(False))
        else:
            taken.append(sides.agree(True))
        going = taken[-1]
    else:
        going = taken.pop(0)
    if going:
        side.record("func", run(side.forward))


def load_part(side: Side, x: Tensor, choice: float) -> None:
    """Loads a full state dict in which some keys are missing."""
    state = side.save(False)
    rng = random.Random(choice)
    for key in sorted(state, key=toys.clean):
        if rng.random() < 0.3:
            del state[key]
    side.write(0.5)
    side.load_part(state)
    side.record("loaded in part", side.values())


def unshard(side: Side, x: Tensor, choice: float) -> None:
    """Gather some units explicitly, before a step or an evaluation."""
    units = [m for m in side.model.modules() if isinstance(m, FSDPModule)]
    rng = random.Random(choice)
    if side.case.config.in_place and not isinstance(side, Plain):
        chosen = [unit for unit in units if rng.random() < 0.5]
        waits = [unit.unshard(async_op=True) for unit in chosen]
        for wait in waits:
            if choice < 0.5:
                wait.wait()
    with torch.set_grad_enabled(choice > 0.3):
        out = side.forward(x)
    side.record("out of gathered units", {"out": out})
    if out.requires_grad:
        side.backward(loss_of(out))
        side.average()
    if side.case.config.in_place and not isinstance(side, Plain):
        for unit in chosen:
            unit.reshard()
    side.optimizer.step()
    side.optimizer.zero_grad()


def part_of(side: Side, choice: float) -> list[Tensor]:
    """Return some of the parameters that train now, the same ones for both models."""
    named = {toys.clean(n): p for n, p in side.trained().named_parameters()}
    return [p for p in sides.chosen(named, choice) if p.requires_grad]


def set_flags(side: Side, params: list[Tensor], trained: bool) -> None:
    for p in params:
        p.requires_grad_(trained)
    side.refresh()


def freeze_summoned(side: Side, x: Tensor, choice: float) -> None:
    """Freeze parameters, and then train them again, each time while full parameters are
    summoned."""
    if not side.case.config.use_orig:
        return
    shown = isinstance(side, sides.Sharded)
    for trained in (False, True):
        with toys.summon(side.model) if shown else contextlib.nullcontext():
            if not trained:
                params = part_of(side, choice)
            set_flags(side, params, trained)
        learn(side, "gradients of what is frozen in summon", loss_of(side.forward(x)))


def switched(side: Side, x: Tensor, choice: float) -> None:
    """Between a forward and its backward, run another forward while some parameters are frozen, as
    programs with adapters do."""
    if not side.case.config.use_orig:
        return
    loss, params = loss_of(side.forward(x)), part_of(side, choice)
    set_flags(side, params, False)
    with torch.set_grad_enabled(choice > 0.7):
        side.record("a pass between", {"out": side.forward(0.5 * x)})
    set_flags(side, params, True)
    learn(side, "gradients after a pass between", loss)


def uncalled(side: Side, x: Tensor) -> None:
    """In the root's forward, use the weights of modules outside of those modules' own forwards."""
    STATE.uncalled = True
    try:
        out = side.forward(x)
    finally:
        STATE.uncalled = False
    side.record("with weights of modules", {"out": out})
    learn(side, "gradients of weights of modules", loss_of(out))


HABITS: dict[str, Callable[..., None]] = {
    "write_lost": write_lost, "changed_before_backward": changed_before_backward,
    "added": added, "fork": fork, "flags": flags, "func": func, "load_part": load_part,
    "unshard": unshard, "freeze_summoned": freeze_summoned, "switched": switched,
    "uncalled": uncalled,
}  # fmt: skip
WITH_CHOICE = {"func", "load_part", "unshard", "freeze_summoned", "switched"}
