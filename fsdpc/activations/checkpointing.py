"""Activation checkpointing of some of a model's blocks, and of some of a block's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fsdpc import _torch
from fsdpc._engine.modules import join

Blocks = type | Sequence[type] | Callable[[nn.Module], bool] | None

_ATEN = torch.ops.aten
# Matrix products, convolutions and attention, whose outputs cost most to compute again.
_COSTLY = {
    overload
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_ATEN, name)
    for overload in [getattr(_ATEN, name).default]
}


def checkpoint(
    model: nn.Module,
    *,
    ratio: float | str | Fraction | None = None,
    every: int | None = None,
    which: Iterable[int] | None = None,
    policy: str | Sequence[Any] | Callable[..., CheckpointPolicy] | None = None,
    blocks: Blocks = None,
    preserve_rng_state: bool = True,
) -> list[str]:
    """Checkpoint some of ``model``'s blocks in place and return their names, in order. Local. Call
    this function with the same arguments on every rank, before or after wrapping with FSDP.

    A checkpointed block keeps its inputs and computes its forward again in backward (torch's
    non-reentrant ``checkpoint``). The second forward has the buffers that the first one had, so
    that buffers (running statistics, counters, spectral norms) change once per forward. Under
    torch's ``checkpoint`` these buffers change twice.

    Choose blocks by at most one of ``ratio``, ``every`` and ``which``; by default all blocks are
    chosen. ``ratio`` is the fraction of blocks to choose, a number or a text like "2/3" between 0
    and 1. The chosen blocks are evenly spaced: of blocks 1 to n, block i is chosen if ``i * ratio``
    is the first product to reach 1/2, 3/2, 5/2 and so on. ``every`` chooses block 0 and each
    ``every``-th block after block 0. ``which`` lists the indices of blocks; negative indices count
    from the end.

    ``policy`` selects by operator what a checkpointed block keeps, through torch's
    ``create_selective_checkpoint_contexts``. It is "matmul", which keeps the outputs of matrix
    products, convolutions and attention, or one of torch's own forms: a list of operators to keep,
    or a function of ``(context, operator, *args, **kwargs)`` that returns a ``CheckpointPolicy``.
    If a policy returns one of torch's CPU offload values, the forward raises
    ``NotImplementedError``, because torch would recompute instead of offloading. torch raises
    ``RuntimeError`` in backward if a block changes a kept output in place, and for second
    derivatives.

    ``blocks``: the blocks' classes, or a function that is true for blocks; default: the items of
    the longest ``nn.ModuleList`` or ``nn.Sequential`` whose items are of one class. An FSDP
    instance around a block is checkpointed as a whole: its unit is still gathered only twice in a
    step.

    ``ValueError``: there are no blocks, the blocks are ambiguous, a number is invalid, or a block
    is inside another block or checkpointed already. The model does not change in these cases.
    """
    if sum(choice is not None for choice in (ratio, every, which)) > 1:
        raise ValueError("checkpoint() takes at most one of ratio=, every= and which=")
    places = _places(model, blocks)
    chosen = _chosen(len(places), ratio, every, which)
    picked = [places[i] for i in chosen]
    tools = import_module(_torch.CHECKPOINT_WRAPPER)
    for _, parent, _, block in picked:
        if any(isinstance(m, tools.CheckpointWrapper) for m in (parent, *block.modules())):
            raise ValueError(
                f"a block of class {type(block).__name__} is checkpointed already, or holds a "
                "module that is: call checkpoint() once per block"
            )
    contexts = None if policy is None else _contexts(policy)
    implementation = tools.CheckpointImpl.NO_REENTRANT
    for _, parent, attribute, block in picked:
        options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
        if policy is not None:
            options["context_fn"] = contexts
        if next(block.buffers(), None) is not None:
            options["checkpoint_fn"] = _OneChange()
        wrapped = tools.checkpoint_wrapper(block, checkpoint_impl=implementation, **options)
        parent._modules[attribute] = wrapped
    return [name for name, *_ in picked]


# --- which blocks --------------------------------------------------------------------------------

Place = tuple[str, nn.Module, str, nn.Module]  # name, parent, attribute in the parent, module


def _places(model: nn.Module, blocks: Blocks) -> list[Place]:
    is_block = _predicate(model, blocks)
    found: list[Place] = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, inside: str | None) -> None:
        for attribute, child in module._modules.items():
            if child is None:
                continue
            path = join(name, attribute)
            inner = getattr(child, "_fsdp_wrapped_module", child)
            hit = is_block(inner) or is_block(child)
            if hit and inside is not None:
                raise ValueError(f"block {path!r} is inside block {inside!r}: name one kind only")
            if hit and id(child) in seen:
                raise ValueError(f"block {path!r} is registered twice in the model")
            if hit:
                seen.add(id(child))
                found.append((path, module, attribute, child))
            if hit and inner is not child:
                visit(inner, path, path)
            else:
                visit(child, path, path if hit else inside)

    visit(model, "", None)
    if not found:
        raise ValueError("checkpoint() found no blocks in the model: name their class with blocks=")
    return found


def _predicate(model: nn.Module, blocks: Blocks) -> Callable[[nn.Module], bool]:
    if blocks is None:
        wanted = {id(block) for block in _longest_list(model)}
        return lambda module: id(module) in wanted
    if isinstance(blocks, type):
        return lambda module: isinstance(module, blocks)
    if callable(blocks):
        return blocks
    classes = tuple(blocks)
    return lambda module: isinstance(module, classes)


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            items = [getattr(item, "_fsdp_wrapped_module", item) for item in module]
            if len({type(item) for item in items}) == 1:
                lists.append(items)
    longest = [items for items in lists if len(items) == max(map(len, lists))]
    wrapper = import_module(_torch.CHECKPOINT_WRAPPER).CheckpointWrapper
    if not longest and any(isinstance(module, wrapper) for module in model.modules()):
        raise ValueError(
            "checkpoint() needs a list of blocks of one class, and some of the model's blocks are "
            "checkpointed already: call checkpoint() once, or name the blocks' class with "
            "blocks= and the indices of the other blocks with which="
        )
    if len(longest) != 1:
        raise ValueError(
            f"checkpoint() needs one longest list of blocks of one class, and the model has "
            f"{len(longest)}: name their class with blocks="
        )
    return longest[0]


def _chosen(count: int, ratio: Any, every: Any, which: Any) -> list[int]:
    if ratio is not None:
        share = _share(ratio)
        # Block i, counted from 1, is chosen if i * share is the first product to reach 1/2, 3/2 and
        # so on.
        passed = [math.floor(i * share + Fraction(1, 2)) for i in range(count + 1)]
        return [i for i in range(count) if passed[i + 1] > passed[i]]
    if every is not None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        return list(range(0, count, every))
    if which is None:
        return list(range(count))
    indices = list(which)
    if any(not -count <= i < count for i in indices):
        raise ValueError(f"which must be indices of {count} blocks, got {indices}")
    return sorted({i % count for i in indices})


def _share(ratio: Any) -> Fraction:
    try:
        share = Fraction(ratio) if isinstance(ratio, (str, Fraction)) else Fraction(float(ratio))
        share = share.limit_denominator(10**6)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        raise ValueError(f"ratio must be a number or a text like '2/3', got {ratio!r}") from None
    if not 0 <= share <= 1:
        raise ValueError(f"ratio must be between 0 and 1, got {ratio!r}")
    return share


# --- which operators -----------------------------------------------------------------------------


def _contexts(policy: Any) -> Callable[[], Any]:
    if isinstance(policy, str):
        if policy != "matmul":
            raise ValueError(f"policy must be 'matmul', a list or a function, got {policy!r}")
        return partial(create_selective_checkpoint_contexts, _keep_costly)
    if not callable(policy):
        return partial(create_selective_checkpoint_contexts, list(policy))
    return partial(create_selective_checkpoint_contexts, partial(_checked, policy))


def _keep_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator in _COSTLY
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _checked(policy: Any, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    choice = policy(context, operator, *args, **kwargs)
    if "OFFLOAD" in getattr(choice, "name", ""):
        raise NotImplementedError(
            f"the policy returned {choice} for {operator}: eager torch recomputes there instead of "
            "offloading; return one of its SAVE or RECOMPUTE values"
        )
    return choice


# --- buffers -------------------------------------------------------------------------------------

# Each entry has a module, the name of a buffer of the module, the buffer before the forward, and a
# copy of the buffer's values.
Before = list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]
# A buffer of at least this many bytes is not copied again after a training forward that did not
# change it.
LARGE = 1 << 20


class _OneChange:
    """A replacement of torch's checkpoint function, under which a block's buffers change only once
    per forward.
    """

    def __init__(self) -> None:
        self.constant: set[str] = set()  # large buffers that a training forward left unchanged

    @torch.compiler.disable(recursive=False)
    def __call__(
        self, block: nn.Module, *args: Any, context_fn: Any = noop_context_fn, **kwargs: Any
    ) -> Any:
        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            first, second = context_fn()
            before: Before = []
            return self._remembering(block, before, first), _AsBefore(before, second)

        return torch_checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    @contextmanager
    def _remembering(self, block: nn.Module, before: Before, inner: Any) -> Iterator[None]:
        """Fill ``before`` with the buffers that a forward changes."""
        copies: dict[int, torch.Tensor] = {}
        found = []
        for path, module in block.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    full = join(path, name)
                    if full not in self.constant and id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    found.append((full, module, name, buffer, buffer._version))
        with inner:
            yield
        for full, module, name, buffer, version in found:
            now = module._buffers.get(name)
            if now is None or (now.dtype, now.device) != (buffer.dtype, buffer.device):
                continue  # the buffer was converted to another dtype or device
            # Norm layers change their statistics without a change of the version counter.
            moves = module.training and getattr(module, "track_running_stats", False)
            if now is not buffer or buffer._version != version or moves:
                if buffer._version != version and full in self.constant:
                    kind = type(block).__name__
                    raise RuntimeError(
                        f"buffer {full!r} of a checkpointed {kind} changed in place, and "
                        "checkpoint() keeps no copy of it, because it did not change before: "
                        "change it outside of the block, or checkpoint other blocks (which=)"
                    )
                before.append((module, name, buffer, copies.get(id(buffer), buffer)))
            elif module.training and buffer.nbytes >= LARGE:
                self.constant.add(full)


class _AsBefore:
    """A context in which a block is computed again. The block's buffers are copies of what they
    were before the first forward. Each backward enters the context once, so a retained graph may
    enter it several times.
    """

    def __init__(self, before: Before, inner: AbstractContextManager[Any]) -> None:
        self.before, self.inner = before, inner
        self.now: list[list[Any]] = []

    def __enter__(self) -> None:
        copies = {id(buffer): copy.clone() for _, _, buffer, copy in self.before}
        self.now.append([module._buffers[name] for module, name, *_ in self.before])
        for module, name, buffer, _ in self.before:
            module._buffers[name] = copies[id(buffer)]
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.inner.__exit__(*error)
        finally:
            for (module, name, *_), buffer in zip(self.before, self.now.pop(), strict=True):
                module._buffers[name] = buffer
