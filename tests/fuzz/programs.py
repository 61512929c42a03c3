"""Random training programs, run in the same way on a sharded model and on its unsharded copy.

Each operation records named values; the records of both sides must be equal.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
import toys
from habits import HABITS, WITH_CHOICE
from kinds import STATE
from sides import Records, Side
from torch import Tensor


def run(side: Side) -> Records:
    for number, op in enumerate(side.case.ops):
        STATE.step, STATE.fail = number, ""
        side.refresh()
        (train if op.name == "train" else OPERATIONS[op.name])(side, number, **op.arguments)
    side.record("at the end", side.values())
    side.record("buffers", {toys.clean(n): b for n, b in side.model.named_buffers()})
    return side.records


def batch(side: Side, number: int, micro: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * number + 101 * micro + STATE.rank)
    x = torch.randn(side.case.rows, side.case.width, generator=generator)
    return x.requires_grad_() if grad else x


def train(
    side: Side,
    number: int,
    style: str,
    micros: int,
    no_sync: bool,
    input_grad: bool,
    clip: float | None,
    norm: float,
    zero: str,
    grads: bool,
    step: bool,
    by_utils: bool,
) -> None:
    label = f"op {number} ({style})"
    if zero == "before":
        side.optimizer.zero_grad()
    for micro in range(micros):
        last = micro == micros - 1
        with nullcontext() if last or not no_sync else side.no_sync():
            inputs = [
                batch(side, number, micro, input_grad or style in NEED_INPUT_GRAD),
                batch(side, number, micro + 50, input_grad),
            ]
            backward(side, style, inputs, f"{label} micro {micro}", last or not no_sync)
            side.record(
                f"{label} micro {micro} input",
                {str(i): x.grad for i, x in enumerate(inputs) if x.grad is not None},
            )
    side.average()
    if grads:
        side.record(f"{label} gradients", side.gradients())
    if clip is not None:
        side.record(f"{label} norm", {"norm": side.clip(clip, norm, by_utils)})
    if step:
        side.optimizer.step()
        side.record(f"{label} parameters", side.values())
    side.optimizer.zero_grad(set_to_none=zero != "zeros")


NEED_INPUT_GRAD = {"penalty", "penalty_each", "grad_input", "inputs_only"}


def backward(side: Side, style: str, inputs: list[Tensor], label: str, sync: bool) -> None:
    """Runs forward and backward of a micro-batch in one of many ways."""
    first, second = inputs

    def forward(x: Tensor) -> Tensor:
        out = side.forward(x)
        side.record(f"{label} output", {"out": out})
        return out

    def loss(out: Tensor) -> Tensor:
        return (out * out).mean() + 0.3 * out.sum(0).tanh().sum()

    if style in ("two_forwards", "reversed"):
        a, b = loss(forward(first)), loss(forward(second))
        for part in (b, a) if style == "reversed" else (a, b):
            side.backward(part)
        return
    if style == "two_forwards_sum":
        side.backward(loss(forward(first)) + 0.5 * loss(forward(second)))
        return
    if style in ("asked", "asked_into"):
        side.ask(lambda: loss(forward(first)), style == "asked_into")
        return
    if style == "head_weight":
        out, weight = forward(first), side.head_weight()
        if weight is not None:
            out = out + 0.1 * F.linear(first.to(weight.dtype), weight).float()
        side.backward(loss(out))
        return
    if style == "discarded":
        forward(second)
    if style == "no_grad_first":
        with torch.no_grad():
            forward(second)
    out = forward(first)
    if style == "two_losses":
        side.backward((out * out).mean(), retain_graph=True)
        side.backward(out.sum(0).tanh().sum())
    elif style == "retain_twice":
        side.backward(loss(out), retain_graph=True)
        side.backward(loss(out))
    elif style == "penalty":
        (grad,) = torch.autograd.grad(out.sum(), first, create_graph=True)
        side.backward(loss(out) + (grad * grad).sum())
    elif style == "penalty_each":
        (grad,) = torch.autograd.grad(loss(out), first, create_graph=True)
        side.backward(((grad.norm(dim=-1) - 1.0) ** 2).mean())
    elif style == "grad_input":
        (grad,) = torch.autograd.grad(loss(out), first, retain_graph=True)
        side.record(f"{label} grad", {"grad": grad})
        side.backward(loss(out) * (1.0 + grad.abs().mean()))
    elif style == "part_of_output":
        side.backward(out[:, 0].sum())
    elif style == "inputs_only":
        (grad,) = torch.autograd.grad(loss(out), first)
        side.record(f"{label} grad", {"grad": grad})
        side.backward(loss(forward(second)))
    else:
        side.backward(loss(out))


def evaluate(side: Side, number: int, choice: float, again: float) -> None:
    if choice < 0.5:
        side.model.eval()
    with torch.no_grad():
        for i in range(1 + (again < 0.4)):
            side.record(f"op {number} eval", {"out": side.forward(batch(side, number, i))})
    side.model.train()


def inference(side: Side, number: int, choice: float, again: float) -> None:
    side.model.train(choice < 0.5)
    with torch.inference_mode():
        out = side.forward(batch(side, number))
    side.record(f"op {number} inference", {"out": out})
    side.model.train()


def fail(side: Side, number: int, choice: float, again: float) -> None:
    STATE.fail = "forward" if choice < 0.6 else "backward"
    try:
        side.backward((side.forward(batch(side, number)) ** 2).mean())
    except RuntimeError as error:
        if "planted" not in str(error):
            raise
    STATE.fail = ""
    side.optimizer.zero_grad()


def freeze(side: Side, number: int, choice: float, again: float) -> None:
    """Freeze some parameters, train, and in most cases let these parameters train again."""
    if not side.case.config.use_orig:
        return
    side.freeze(choice, True)
    side.refresh()
    out = side.forward(batch(side, number, 0, True))
    if out.requires_grad:
        side.backward((out * out).mean())
        side.average()
        side.optimizer.step()
    side.optimizer.zero_grad()
    side.record(f"op {number} frozen", side.values())
    if again < 0.7:
        side.freeze(choice, False)


def summon_read(side: Side, number: int, choice: float, again: float) -> None:
    side.record(f"op {number} summon", side.values())


def summon_write(side: Side, number: int, choice: float, again: float) -> None:
    side.write(0.8 + 0.3 * choice)


def user_set(side: Side, number: int, choice: float, again: float) -> None:
    side.set_by_user(0.8 + 0.3 * choice)


def save_load(side: Side, number: int, choice: float, again: float, sharded: bool = False) -> None:
    state = side.save(sharded)
    if not sharded:
        side.record(f"op {number} state", {toys.clean(k): v for k, v in state.items()})
    if again < 0.5:
        file = io.BytesIO()
        if not sharded:
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=False)
    side.set_by_user(0.5)
    side.load(state, sharded)
    side.record(f"op {number} loaded", side.values())


def save_sharded(side: Side, number: int, choice: float, again: float) -> None:
    save_load(side, number, choice, again, sharded=True)


def swap_optimizer(side: Side, number: int, choice: float, again: float) -> None:
    side.make_optimizer(side.case.optimizer)


def ema(side: Side, number: int, choice: float, again: float) -> None:
    with torch.no_grad():
        side.record(f"op {number} ema", {"out": side.copy_average()(batch(side, number)).float()})


def rebuild_graph_late(side: Side, number: int, choice: float, again: float) -> None:
    """Keep a graph of this step, and run its backward after the backward of a later graph."""
    kept = side.forward(batch(side, number, 0))
    with torch.no_grad():
        side.record(f"op {number} between", {"out": side.forward(batch(side, number, 1))})
    side.backward((side.forward(batch(side, number, 2)) ** 2).mean())
    side.backward((kept * kept).mean())
    side.average()
    side.record(f"op {number} gradients", side.gradients())
    side.optimizer.step()
    side.optimizer.zero_grad()


def unfreeze(side: Side, number: int, choice: float, again: float) -> None:
    """From here on, train the parameters that were frozen when the model was wrapped."""
    if side.case.config.use_orig:
        side.unfreeze(choice)


def optim_state(side: Side, number: int, choice: float, again: float) -> None:
    side.reload_optimizer(side.case.optimizer)


def habit(side: Side, number: int, choice: float, again: float) -> None:
    name = side.case.ops[number].name
    HABITS[name](side, batch(side, number), *([choice] if name in WITH_CHOICE else []))


OPERATIONS: dict[str, Callable[..., None]] = {
    "eval": evaluate, "inference": inference, "fail": fail, "freeze": freeze,
    "summon_read": summon_read, "summon_write": summon_write, "save_load": save_load,
    "save_sharded": save_sharded, "user_set": user_set, "swap_optimizer": swap_optimizer,
    "ema": ema, "rebuild_graph_late": rebuild_graph_late, "optim_state": optim_state,
    "unfreeze": unfreeze, **{name: habit for name in HABITS},
}  # fmt: skip
