"""Gradients of sharded parameters that a program asks for: ``loss.backward(inputs=parameters)`` and
``torch.autograd.grad(loss, parameters)``.

The graph of a loss leads to the gathered tensors, not to the sharded parameters (unless the loss
reads these directly, as a penalty on weights does). So a backward that is asked for sharded
parameters also makes the gradients of the gathered tensors, which the engine sums over the ranks
into ``.grad`` as in every backward; all ranks must ask for the same parameters. ``autograd.grad``
moves the sums from ``.grad`` into its result.
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
    """Wrap ``run``, which every backward of torch goes through, so that its inputs may be sharded
    parameters. ``StateError``: their gradients cannot be returned; its text says why.
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
    """Let torch's backward come through ``asked``, once. Local."""
    setattr(torch.autograd, RUN_BACKWARD, asked(getattr(torch.autograd, RUN_BACKWARD)))


Places = dict[int, tuple[Any, Any, int]]


def _variable(one: Any) -> Any:
    """The leaf that an input stands for, or the input."""
    if isinstance(one, Tensor):
        return getattr(one, "_fsdpc_sharded", None) or one
    return getattr(one.node, "variable", one)


def _places(inputs: Sequence[Any]) -> Places:
    """Which inputs are trainable sharded parameters: parameter, unit and number in
    ``unit.optim_params``, by position.
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
    """The gathered tensors of these parameters, each once."""
    found = {}
    for _, unit, number in places.values():
        for i in unit.optim_params[number][2]:
            if unit.full[i].requires_grad:
                found[id(unit.full[i])] = unit.full[i]
    return list(found.values())


def _refusal(places: Places, grads: Sequence[Any], create: bool, inputs: Sequence[Any]) -> str:
    """Why ``autograd.grad`` cannot return these gradients; "" if it can."""
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
    """The gradients of a loss that reads sharded parameters themselves and no gathered tensor."""
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
    """One gradient per input; for sharded parameters what ``.grad`` shows after a backward."""
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
    """Inside the block every leaf's ``.grad`` is None; afterwards it is what it was."""
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
    """Yields a list that gets the gradients that come to these edges."""
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
