"""Activations of any model, from a trace of one forward and backward on fake tensors.

Fake tensors have shapes and dtypes but no bytes. The model runs unsharded. Parameters are not
counted, because the engine owns them. The whole gradients of a unit are freed when all of them are
complete, because the engine packs them at that time. Every block is traced, because blocks that
look alike may compute different things.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpc._engine.inputs import cast_arguments
from fsdpc._torch import tree_leaves
from fsdpc.plan.model import Moment
from fsdpc.plan.sources.live import LiveBytes

FEW = 3  # a list of this many modules or fewer does not count as repeated blocks


@dataclass(frozen=True)
class Training:
    """The training that a user's function returns. The function may return a dict whose keys are
    names of these fields, or a tuple of the first one, two or three fields.

    ``inputs``: positional arguments, or a dict of keywords. ``loss``: a function of (output,
    inputs), or of the output, that returns a scalar; None: ``loss_of_output``. ``shard(model)``
    returns the sharded model (default: FSDP with a unit per repeated block). ``fsdpc check`` also
    uses ``optimizer``, an optimizer or a function that makes one from the sharded model (default:
    SGD with lr 0.1), and ``clip(model)``, which it calls for both models between backward and step.
    """

    model: nn.Module
    inputs: Any = None
    loss: Callable[..., Tensor] | None = None
    shard: Callable[[nn.Module], nn.Module] | None = None
    optimizer: Any = None
    clip: Callable[[nn.Module], Any] | None = None

    def forward(self, model: nn.Module | None = None) -> Tensor:
        """Return the loss of one forward of ``model`` (None: of the training's model)."""
        inputs, run = self.inputs, self.model if model is None else model
        if isinstance(inputs, dict):
            output = run(**inputs)
        else:
            output = run(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        if self.loss is None:
            return loss_of_output(output)
        return self.loss(output) if _takes_one(self.loss) else self.loss(output, inputs)


def _takes_one(loss: Callable[..., Tensor]) -> bool:
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return True
    except ValueError:  # no signature is known
        pass
    return False


def loss_of_output(output: Any) -> Tensor:
    """Return ``output.loss`` if there is one. Otherwise take the first floating tensor in the
    output. Return this tensor if it is a scalar, else its mean.
    """
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


class _Recorder:
    """Divides a step into moments, at the beginning and the end of units."""

    def __init__(self, units: dict[str, list[nn.Parameter]]) -> None:
        self.units = units
        self.moments: list[Moment] = []
        self.live: LiveBytes
        self.backward = False
        self.stack: list[str] = [""]
        self.grads = self.top_grads = 0
        self._open = ("forward", "")
        self._begin = 0

    # --- moments

    def begin(self, phase: str, unit: str) -> None:
        self.end()
        self._open, self._begin = (phase, unit), self.live.bytes
        self.live.start()
        self.top_grads = self.grads

    def end(self) -> None:
        rise, delta = self.live.top - self._begin, self.live.bytes - self._begin
        if rise or delta:
            grads = min(self.top_grads, self.live.top)
            self.moments.append(Moment(*self._open, rise, delta, grads))

    # --- hooks

    def enter(self, name: str) -> None:
        if not self.backward:
            self.stack.append(name)
            self.begin("forward", name)

    def leave(self, name: str, output: Any) -> None:
        if self.backward:
            return
        self.stack.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad, name=name: self.back(name))
                break
        self.begin("forward", self.stack[-1])

    def back(self, name: str) -> None:
        self.begin("backward", name)

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


def trace(run: Training, units: dict[str, list[nn.Parameter]], cast: Any = None) -> list[Moment]:
    """Return one forward and backward as a list of ``Moment``. ``units``: parameters by the name of
    the unit's module. ``cast``: the dtype of floating inputs. All tensors must be fake. Afterwards
    the gradients of all parameters are None. Local. Exceptions of the forward are not caught.
    """
    recorder = _Recorder(units)
    owned = [*run.model.parameters(), *run.model.buffers()]
    known = [*owned, *(t for t in tree_leaves(run.inputs) if isinstance(t, Tensor))]
    names = dict(run.model.named_modules())
    with ExitStack() as stack:
        for name in (n for n in units if n and n in names):
            module = names[name]
            pre = module.register_forward_pre_hook(lambda m, a, name=name: recorder.enter(name))
            post = module.register_forward_hook(
                lambda m, a, out, name=name: recorder.leave(name, out)
            )
            stack.callback(pre.remove)
            stack.callback(post.remove)
        recorder.watch_gradients(stack)
        recorder.live = stack.enter_context(LiveBytes(known))
        if cast is not None:  # cast inside the forward, which then frees the copies
            inner = run.model.register_forward_pre_hook(
                lambda m, args, kwargs: cast_arguments(cast, args, kwargs), with_kwargs=True
            )
            stack.callback(inner.remove)
        loss = run.forward()
        recorder.begin("backward", "")
        recorder.backward = True
        loss.backward()
        recorder.end()
    for param in run.model.parameters():
        param.grad = None
    return recorder.moments


# --- repeated blocks ------------------------------------------------------------------------------


def repeated(module: nn.Module) -> dict[str, int]:
    """Return the name and the length of each list of more than three blocks of one kind. Lists
    inside such a list are left out. Blocks are of one kind if they are of the same class, or, for
    classes of torch, if they are equal modules.
    """
    found: dict[str, int] = {}
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > FEW and not inside:
            signs = {_signature(block) for block in child}
            if len(signs) == 1 and list(child._modules) == [str(i) for i in range(len(child))]:
                found[name] = len(child)
    return found


def _signature(block: nn.Module) -> Any:
    if not type(block).__module__.startswith("torch.nn."):
        return type(block)
    return (
        repr(block),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
    )


# --- preparation ------------------------------------------------------------------------------


def checkpointed(blocks: list[nn.Module]) -> ExitStack:
    """Let these modules recompute their activations in backward, by ``torch.utils.checkpoint``,
    until the returned stack is closed.
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


def bytes_of_tensors(value: Any) -> int:
    """Return the bytes of all tensors in a structure. A shared storage counts once."""
    storages = {
        id(t.untyped_storage()): t.untyped_storage().nbytes()
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor)
    }
    return sum(storages.values())
