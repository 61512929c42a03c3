"""Backwards whose inputs are sharded parameters: ``loss.backward(inputs=parameters)`` and
``torch.autograd.grad(loss, parameters)``.

The graph of a loss leads to the gathered tensors, not to the sharded parameters, unless the loss
reads a sharded parameter directly, as a penalty on weights does. A backward with sharded parameters
as inputs therefore also computes the gradients of the gathered tensors, which the engine sums over
the ranks into ``.grad`` as in every backward. All ranks must ask for the same parameters.
``autograd.grad`` moves the sums from ``.grad`` into its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fsdpc import _C
from fsdpc._comm.channel import this_rank
from fsdpc._engine.interop import put_grad
from fsdpc._engine.writeback import gathered_of, owner_of
from fsdpc._torch import RUN_BACKWARD, current_graph_task_id, is_batched


def asked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function ``run``, which every backward calls, so that the inputs of a backward
    may be sharded parameters.

    The wrapped function raises ``StateError`` if the gradients cannot be returned; the error says
    why.
    """

    @functools.wraps(run)
    def through(*args: Any, **kwargs: Any) -> Any:
        inputs = args[4] if len(args) > 4 else kwargs.pop("inputs", ())
        places = _places(inputs) if inputs else {}
        if not places:
            return run(*args, **kwargs)
        outputs, grads, retain, create = args[:4]
        unused = args[5] if len(args) > 5 else kwargs.get("allow_unreachable", True)
        if kwargs.get("accumulate_grad"):
            made = (*inputs, *_gathered(places))
            return run(outputs, grads, retain, create, made, unused, accumulate_grad=True)
        why = _refusal(places, grads, create, inputs)
        if why:
            result = _of_direct_reads(run, places, why, outputs, grads, retain, create, inputs)
        else:
            result = _summed(run, places, outputs, grads, retain, inputs)
        missing = next((n for n, grad in enumerate(result) if grad is None), None)
        if missing is not None and not unused:
            raise RuntimeError(
                f"The differentiated Tensor at index {missing} appears to not have been used in "
                "the graph. Set allow_unused=True if this is the desired behavior."
            )
        return result

    return through


@functools.cache
def install() -> None:
    """Wrap torch's backward by ``asked``; later calls do nothing. Local."""
    setattr(torch.autograd, RUN_BACKWARD, asked(getattr(torch.autograd, RUN_BACKWARD)))


Places = dict[int, tuple[Any, Any, int]]


def _variable(one: Any) -> Any:
    """Return the leaf if ``one`` is a gradient edge, and the sharded parameter if ``one`` is a
    placeholder of the parameter.

    Any other input is returned unchanged.
    """
    if isinstance(one, Tensor):
        return getattr(one, "_fsdpc_sharded", None) or one
    return getattr(one.node, "variable", one)


def _places(inputs: Sequence[Any]) -> Places:
    """Return {position: (parameter, unit, index in ``unit.optim_params``)} of those inputs that are
    trainable sharded parameters.
    """
    places: Places = {}
    numbers: dict[int, dict[int, int]] = {}
    for position, one in enumerate(inputs):
        param = _variable(one)
        unit = owner_of(param)
        if unit is None or not param.requires_grad:
            continue
        if id(unit) not in numbers:
            rows = enumerate(unit.optim_params)
            numbers[id(unit)] = {id(row[0]): number for number, row in rows}
        number = numbers[id(unit)].get(id(param))
        if number is not None:
            places[position] = (param, unit, number)
    return places


def _gathered(places: Places) -> list[Tensor]:
    """Return the gathered tensors of these parameters, without duplicates."""
    found = {}
    for _, unit, number in places.values():
        for i in unit.optim_params[number][2]:
            if unit.full[i].requires_grad:
                found[id(unit.full[i])] = unit.full[i]
    return list(found.values())


def _refusal(places: Places, grads: Sequence[Any], create: bool, inputs: Sequence[Any]) -> str:
    """Return the reason why ``autograd.grad`` cannot return these gradients; "" if it can."""
    units = {id(unit): unit for _, unit, _ in places.values()}.values()
    if create:
        return "as a graph (create_graph=True): compute them in the forward of the parameter's unit"
    if current_graph_task_id() >= 0:
        return (
            "inside another backward, as by an adjoint method: let autograd record the "
            "forward (torchdiffeq.odeint for odeint_adjoint), or leave the module unsharded "
            "(ignored_states)"
        )
    if any(gathered_of(_variable(one)) for one in inputs):
        return (
            "beside gathered parameters, which a root shows after its forward and whose gradients "
            "are not summed: take list(model.parameters()) before the forward"
        )
    if any(is_batched(grad) for grad in grads if grad is not None):
        return "for a batch (is_grads_batched=True or vmap): ask for them one by one"
    if any(unit.state == "forward" for unit in units):
        return "inside the model's forward: ask for them behind it"
    if not all(unit.flat.sync for unit in units):
        return "inside no_sync, where nothing is summed over the ranks: call backward()"
    if any(unit.stepper is not None for unit in units):
        return "under fsdpc.optim.in_backward, which steps them: call backward()"
    listened = ("_post_accumulate_grad_hooks", "_in_backward_optimizers")
    if any(getattr(param, name, None) for param, _, _ in places.values() for name in listened):
        return "while they have post-accumulate hooks or optimizers in backward: call backward()"
    return ""


def _of_direct_reads(
    run: Callable[..., Any],
    places: Places,
    why: str,
    outputs: Any,
    grads: Any,
    retain: bool,
    create: bool,
    inputs: Sequence[Any],
) -> tuple[Any, ...]:
    """Return the gradients if the loss reads the sharded parameters directly.

    ``StateError``: the loss depends on a gathered tensor.
    """
    made = (*inputs, *_gathered(places))
    found = run(outputs, grads, retain, create, made, True, accumulate_grad=False)
    if any(grad is not None for grad in found[len(inputs) :]):
        _, unit, number = next(iter(places.values()))
        name = unit.infos[unit.optim_params[number][2][0]].name
        raise _C.StateError(
            f"torch.autograd.grad was asked for the gradient of sharded parameter {name!r} of unit "
            f"{unit.name!r} on rank {this_rank(unit.groups.shard)}. Gradients of sharded "
            f"parameters cannot be returned {why}"
        )
    return tuple(found[: len(inputs)])


def _summed(
    run: Callable[..., Any],
    places: Places,
    outputs: Any,
    grads: Any,
    retain: bool,
    inputs: Sequence[Any],
) -> tuple[Any, ...]:
    """Return one gradient per input. For a sharded parameter, this is the gradient that a backward
    puts into ``.grad``.
    """
    targets = [_variable(one) for one in inputs]
    leaves = [one for one in targets if isinstance(one, Tensor) and one.is_leaf]
    others = [one for one in targets if not (isinstance(one, Tensor) and one.is_leaf)]
    edges = [get_gradient_edge(one) if isinstance(one, Tensor) else one for one in others]
    with _without_grads(leaves), _caught(edges) as caught:
        made = (*leaves, *edges, *_gathered(places))
        run(outputs, grads, retain, False, made, True, accumulate_grad=True)
        by_id = dict(zip(map(id, others), caught, strict=True))
        result = [by_id[id(one)] if id(one) in by_id else one.grad for one in targets]
    for position, (param, unit, _) in places.items():
        if result[position] is None and unit.holds_nothing(param):
            result[position] = torch.zeros_like(param)
    return tuple(result)


@contextmanager
def _without_grads(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Set ``.grad`` of every leaf to None for the block, and restore it afterwards."""
    before = {id(leaf): (leaf, leaf.grad) for leaf in leaves}.values()
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in before:
            put_grad(leaf, grad)


@contextmanager
def _caught(edges: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield a list that receives the gradients of these edges when a backward computes them."""
    caught: list[Any] = [None] * len(edges)

    def catch(number: int, grads: Sequence[Any]) -> None:
        caught[number] = grads[edges[number].output_nr]

    handles = [
        edge.node.register_prehook(functools.partial(catch, number))
        for number, edge in enumerate(edges)
    ]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()
