"""Activations of any model, by running one forward and backward on fake tensors.

Fake tensors have shapes and dtypes but no bytes. The model runs unsharded; parameters do not count,
because the engine owns them, and whole gradients go as soon as a unit's are complete, as the engine
packs them. Of a list of equal blocks three are traced and the middle one stands for the rest; a
trace of four must confirm that, else all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpc._plan.live import LiveBytes
from fsdpc._plan.model import Moment
from fsdpc._torch import tree_leaves, tree_map_only

KEPT = 3  # blocks of a list that are traced


@dataclass(frozen=True)
class Run:
    """One step of a model. ``inputs``: positional arguments, or a dict of keywords. ``loss``: of
    (output, inputs), a scalar; None: ``loss_of_output``.
    """

    module: nn.Module
    inputs: Any
    loss: Callable[[Any, Any], Tensor] | None = None

    def forward(self, inputs: Any) -> Tensor:
        """The loss of one forward."""
        if isinstance(inputs, dict):
            output = self.module(**inputs)
        else:
            output = self.module(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        return self.loss(output, inputs) if self.loss else loss_of_output(output)


def loss_of_output(output: Any) -> Tensor:
    """``output.loss`` if it has one, a scalar output itself, else the mean of the first tensor."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf if leaf.dim() == 0 else leaf.float().mean()
    raise TypeError(
        f"the model returned {type(output).__name__}, in which there is no floating tensor: return "
        "(model, inputs, loss) with a function loss(output, inputs)"
    )


@dataclass(frozen=True)
class Piece:
    """A moment, and whether it begins the pass through a repeated block: (list, index)."""

    moment: Moment
    block: tuple[str, int] | None = None


class _Recorder:
    """Cuts a step into moments at the borders of units and of repeated blocks."""

    def __init__(self, run: Run, units: dict[str, list[nn.Parameter]], blocks: dict[str, int]):
        self.run, self.units = run, units
        self.blocks = {
            block_path(name, i): (name, i) for name, count in blocks.items() for i in range(count)
        }
        self.pieces: list[Piece] = []
        self.live: LiveBytes
        self.backward = False
        self.stack: list[str] = [""]
        self.grads = self.top_grads = 0
        self._open: tuple[str, str, tuple[str, int] | None] = ("forward", "", None)
        self._begin = 0

    # --- moments

    def begin(self, phase: str, unit: str, block: tuple[str, int] | None = None) -> None:
        self.end()
        self._open, self._begin = (phase, unit, block), self.live.bytes
        self.live.start()
        self.top_grads = self.grads

    def end(self) -> None:
        phase, unit, block = self._open
        rise, delta = self.live.top - self._begin, self.live.bytes - self._begin
        if rise or delta or block:
            grads = min(self.top_grads, self.live.top)
            self.pieces.append(Piece(Moment(phase, unit, rise, delta, grads), block))

    # --- hooks

    def enter(self, name: str) -> None:
        if not self.backward:
            self.stack.append(name)
            self.begin("forward", self.unit_at(name), self.blocks.get(name))

    def leave(self, name: str, output: Any) -> None:
        if self.backward:
            return
        self.stack.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad, name=name: self.back(name))
                break
        self.begin("forward", self.unit_at(self.stack[-1]))

    def back(self, name: str) -> None:
        self.begin("backward", self.unit_at(name), self.blocks.get(name))

    def unit_at(self, name: str) -> str:
        while name not in self.units and name:
            name = name.rpartition(".")[0]
        return name

    def watch_gradients(self, stack: ExitStack) -> None:
        for params in self.units.values():
            waiting: set[int] = set()
            trained = [p for p in params if p.requires_grad]
            for param in trained:
                handle = param.register_post_accumulate_grad_hook(
                    lambda p, waiting=waiting, trained=trained: self.arrived(p, waiting, trained)
                )
                stack.callback(handle.remove)

    def arrived(self, param: nn.Parameter, seen: set[int], trained: list[nn.Parameter]) -> None:
        seen.add(id(param))
        assert param.grad is not None
        self.grads += param.grad.untyped_storage().nbytes()
        self.top_grads = max(self.top_grads, self.grads)
        if len(seen) == len(trained):
            seen.clear()
            for one in trained:
                if one.grad is not None:
                    self.grads -= one.grad.untyped_storage().nbytes()
                one.grad = None


def trace_once(
    run: Run, units: dict[str, list[nn.Parameter]], blocks: dict[str, int], cast: Any = None
) -> list[Piece]:
    """The pieces of one forward and backward. ``units``: parameters by the name of the unit's
    module; ``blocks``: lists of repeated blocks, by name, and their lengths; ``cast``: dtype of
    floating inputs. Everything must be fake already; parameters' gradients are None afterwards.
    """
    recorder = _Recorder(run, units, blocks)
    owned = [*run.module.parameters(), *run.module.buffers()]
    known = [*owned, *(t for t in tree_leaves(run.inputs) if isinstance(t, Tensor))]
    names = dict(run.module.named_modules())
    with ExitStack() as stack:
        for name in dict.fromkeys([*units, *recorder.blocks]):
            if name and name in names:
                module = names[name]
                pre = module.register_forward_pre_hook(lambda m, a, name=name: recorder.enter(name))
                post = module.register_forward_hook(
                    lambda m, a, out, name=name: recorder.leave(name, out)
                )
                stack.callback(pre.remove)
                stack.callback(post.remove)
        recorder.watch_gradients(stack)
        recorder.live = stack.enter_context(LiveBytes(known))
        inputs = run.inputs
        if cast is not None:
            inputs = tree_map_only(
                Tensor, lambda t: t.to(cast) if t.is_floating_point() else t, inputs
            )
        loss = run.forward(inputs)
        recorder.begin("backward", "")
        recorder.backward = True
        loss.backward()
        recorder.end()
    for param in run.module.parameters():
        param.grad = None
    return recorder.pieces


# --- repeated blocks ------------------------------------------------------------------------------


def block_path(name: str, index: int) -> str:
    """The module name of one block of a list; the list may be the root."""
    return f"{name}.{index}" if name else str(index)


def repeated(module: nn.Module) -> dict[str, int]:
    """Lists of more than three equal blocks: name and length. Lists within lists are left alone."""
    found: dict[str, int] = {}
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > KEPT and not inside:
            signs = {_signature(block) for block in child}
            if len(signs) == 1 and list(child._modules) == [str(i) for i in range(len(child))]:
                found[name] = len(child)
    return found


def _signature(block: nn.Module) -> tuple[Any, ...]:
    return (
        repr(block),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
    )


@contextmanager
def _shortened(module: nn.Module, lists: dict[str, int], keep: int) -> Iterator[None]:
    before = {}
    for name in lists:
        child = module.get_submodule(name)
        before[name] = (child, dict(child._modules))
        for i in range(keep, lists[name]):
            del child._modules[str(i)]
    try:
        yield
    finally:
        for child, modules in before.values():
            child._modules.clear()
            child._modules.update(modules)


def expand(pieces: list[Piece], name: str, count: int, keep: int = KEPT) -> list[Piece]:
    """The pieces of ``count`` blocks from those of ``keep``: the second is repeated.
    ``ValueError``: the blocks did not run once each, one after the other.
    """

    def at(phase: str, index: int) -> int:
        found = [
            k for k, p in enumerate(pieces) if p.moment.phase == phase and p.block == (name, index)
        ]
        if len(found) != 1:
            raise ValueError(f"block {index} of {name} ran {len(found)} times in {phase}")
        return found[0]

    def renamed(part: list[Piece], old: int, new: int) -> list[Piece]:
        path, to = block_path(name, old), block_path(name, new)
        return [_rename(p, path, to, (name, new)) for p in part]

    extra = count - keep
    one, two = at("forward", 1), at("forward", 2)
    back_one, back_zero = at("backward", 1), at("backward", 0)
    if not one < two < back_one < back_zero:
        raise ValueError(f"the blocks of {name} do not run in order")
    forward, backward = pieces[one:two], pieces[back_one:back_zero]
    last = keep - 1
    middle = renamed(pieces[two:back_one], last, last + extra)
    more = [p for i in range(1, extra + 1) for p in renamed(forward, 1, 1 + i)]
    less = [p for i in reversed(range(1, extra + 1)) for p in renamed(backward, 1, 1 + i)]
    return [*pieces[:two], *more, *middle, *less, *pieces[back_one:]]


def _rename(piece: Piece, path: str, to: str, block: tuple[str, int]) -> Piece:
    unit = piece.moment.unit
    if unit == path or unit.startswith(path + "."):
        piece = replace(piece, moment=replace(piece.moment, unit=to + unit[len(path) :]))
    return (
        replace(piece, block=block) if piece.block and block_path(*piece.block) == (path) else piece
    )


def trace(
    run: Run, units: dict[str, list[nn.Parameter]], *, cast: Any = None, shorten: bool = True
) -> tuple[list[Moment], bool]:
    """The moments of one forward and backward, and whether blocks were repeated. Local; the model
    is unchanged afterwards. Errors of the model's own forward pass through.
    """
    lists = repeated(run.module) if shorten else {}
    lists = {name: count for name, count in lists.items() if count > KEPT + 1}
    if lists:
        pieces = _trace_short(run, units, lists, cast)
        if pieces is not None:
            return [p.moment for p in pieces], True
    return [p.moment for p in trace_once(run, units, {}, cast)], False


def _trace_short(
    run: Run, units: dict[str, list[nn.Parameter]], lists: dict[str, int], cast: Any
) -> list[Piece] | None:
    traces = []
    for keep in (KEPT, KEPT + 1):
        with _shortened(run.module, lists, keep):
            here = dict(run.module.named_modules())
            some = {n: p for n, p in units.items() if n in here}
            try:
                traces.append(trace_once(run, some, dict.fromkeys(lists, keep), cast))
            except (IndexError, KeyError, AttributeError, RuntimeError, TypeError):
                return None  # the model counts its blocks itself; all of them are traced
    three, four = traces
    try:
        confirmed = three
        for name in lists:
            confirmed = expand(confirmed, name, KEPT + 1)
        if _plain(confirmed) != _plain(four):
            return None
        for name, count in lists.items():
            three = expand(three, name, count)
    except ValueError:
        return None
    return three


def _plain(pieces: list[Piece]) -> list[Moment]:
    return [p.moment for p in pieces]


# --- preparation ------------------------------------------------------------------------------


def checkpointed(blocks: list[nn.Module]) -> ExitStack:
    """Recompute these modules in backward, as ``torch.utils.checkpoint`` does, until the returned
    stack is closed.
    """
    stack = ExitStack()
    for block in blocks:
        plain = block.forward

        def forward(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(
                _plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        block.forward = forward  # type: ignore[method-assign]
        stack.callback(block.__dict__.pop, "forward", None)
    return stack


def chosen_blocks(blocks: list[nn.Module], ratio: float) -> list[nn.Module]:
    """``round(ratio * len(blocks))`` of the blocks, evenly spread."""
    total, count = len(blocks), round(ratio * len(blocks))
    return [b for i, b in enumerate(blocks) if (i + 1) * count // total > i * count // total]


def bytes_of_tensors(value: Any) -> int:
    """Bytes of all tensors in a structure, each storage once."""
    storages = {
        id(t.untyped_storage()): t.untyped_storage().nbytes()
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor)
    }
    return sum(storages.values())
