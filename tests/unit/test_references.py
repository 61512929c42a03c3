"""Operations of the extension's Python side leak neither references nor memory.

Each operation runs many times. A reference that an operation does not give back shows in the
reference counts of the objects that the operation was given, in the number of tracked objects, or
in the interpreter's memory blocks.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdpc import _probe
from fsdpc._engine.inputs import alias_arguments

ROUNDS = 300
SLACK = ROUNDS // 2  # caches grow by up to 130 in all; a leak grows by one or more a round

SPECS = [
    ("w", 4, "float32", "float32", "float32", True),
    ("b", 3, "float32", "float32", "float32", True),
]


TRIES = 4  # the interpreter's free lists grow now and then; a leak grows every time


def assert_balanced(operation: Callable[[], Any], *watched: Any) -> None:
    """Check that the operation leaks nothing. ``watched`` are the objects that the operation is
    given, whose reference counts must not grow.
    """
    for _ in range(20):
        operation()
    for _ in range(TRIES):
        changes, grown, tracked = growth(operation, watched)
        if all(abs(change) < SLACK for change in changes) and max(grown, tracked) < SLACK:
            return
    raise AssertionError(f"references: {changes}, {grown} blocks more, {tracked} objects more")


def growth(operation: Callable[[], Any], watched: tuple[Any, ...]) -> tuple[list[int], int, int]:
    """Return the growth over all rounds: of the reference counts of ``watched``, of memory blocks,
    and of tracked objects.
    """
    gc.collect()
    gc.disable()
    try:
        before = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
        objects = len(gc.get_objects())
        for _ in range(ROUNDS):
            operation()
        gc.collect()  # frees exceptions and their frames
        counts = [sys.getrefcount(one) for one in watched]
        grown = sys.getallocatedblocks() - before[1]
        tracked = len(gc.get_objects()) - objects
    finally:
        gc.enable()
    return [now - old for now, old in zip(counts, before[0], strict=True)], grown, tracked


@dataclasses.dataclass
class Pair:
    one: Any
    other: Any
    unset: Any = dataclasses.field(init=False)


class Stepped:
    """A unit in a tree, bound to torch objects as in a sharded module."""

    def __init__(self) -> None:
        self.flat = _probe.FlatParameter("u", _probe.Comm.self_(), SPECS)
        self.full = [torch.zeros(s[1], requires_grad=True) for s in SPECS]
        self.params = [torch.nn.Parameter(torch.zeros(s[1])) for s in SPECS]
        self.grads = [torch.zeros(s[1]) for s in SPECS]
        self.module: dict[str, Any] = {}
        self.task = -1
        self.bind()
        self.tree = _probe.Tree([self.flat], [0], torch=self.functions())
        self.pre, self.post = self.flat.hook("pre_forward"), self.flat.hook("post_forward")
        self.pre_backward, self.grad = self.flat.hook("pre_backward"), self.flat.hook("grad", 0)
        self.ends: list[Any] = []

    def functions(self) -> tuple[Any, ...]:
        return (
            torch.Tensor, torch.is_grad_enabled, lambda: self.task,
            lambda: False, lambda params: True, lambda end: self.ends.append(end),
            lambda params: None, lambda tensors, numbers: None, lambda tensors: None,
            lambda args, kwargs: (args, kwargs or {}), lambda output, begin, end: output, {},
            lambda: None, lambda output: [], lambda: None, {}, None,
        )  # fmt: skip

    def rows(self) -> tuple[list[Any], ...]:
        sites = [(self.module, s[0], i, self.params[i]) for i, s in enumerate(SPECS)]
        seen = [(self.params[i], self.grads[i], (i,)) for i in range(len(SPECS))]
        return list(self.full), sites, seen, [0]

    def bind(self) -> None:
        self.flat.bind(*self.rows())

    def forward(self, inputs: Any, output: Any) -> None:
        self.pre(None, inputs)
        self.post(None, inputs, output)

    def step(self) -> None:
        self.forward((), None)
        for full in self.full:
            full.grad = torch.ones_like(full)
        self.pre_backward(None)
        self.grad(None)
        self.ends.pop()()


@pytest.fixture
def stepped() -> Stepped:
    return Stepped()


def containers(leaf: Any) -> list[Any]:
    return [
        leaf,
        [leaf, leaf],
        (leaf, [leaf]),
        {"a": leaf, "b": [leaf]},
        Pair(leaf, [leaf]),
        [Pair(Pair(leaf, None), (leaf,))],
        {1, 2},
        [None, 1, "text", object()],
    ]


@pytest.mark.parametrize("number", range(8))
def test_walk_over_outputs(stepped, number):
    """Nothing is registered on tensors without autograd nodes, so no reference to such tensors may
    stay.
    """
    leaf = torch.ones(2)
    output = containers(leaf)[number]
    assert_balanced(lambda: stepped.forward((leaf,), output), leaf, output)


@pytest.mark.parametrize("number", range(8))
def test_walk_over_outputs_with_nodes(stepped, number):
    source = torch.ones(2, requires_grad=True)

    def once() -> None:
        leaf = (source * 2)[:1]  # the node of a view's base is watched, too
        stepped.forward((source * 3,), containers(leaf)[number])

    assert_balanced(once, source, stepped.flat)


def test_walk_over_sets_and_fields():
    """While the walk visits the items, only the walk holds a reference to them."""
    stepped = Stepped()
    leaf = torch.ones(2)
    items = {leaf, torch.ones(1)}
    fields = Pair.__dataclass_fields__
    keys = list(fields)
    assert_balanced(
        lambda: stepped.forward((), [items, Pair(leaf, items)]), leaf, items, fields, *keys
    )


def test_bind_and_unbind(stepped):
    stepped.tree.close()
    watched = [*stepped.full, *stepped.params, *stepped.grads, stepped.module]

    def once() -> None:
        stepped.bind()
        stepped.flat.unbind()

    assert_balanced(once, *watched)


def test_bind_that_is_refused(stepped):
    stepped.tree.close()
    full, sites, seen, watched = stepped.rows()

    def once() -> None:
        for rows in (
            (full, sites + [1], seen, watched),
            (full, sites, seen + [1], watched),
            (full, sites, seen, [7]),
        ):
            with pytest.raises((TypeError, ValueError)):
                stepped.flat.bind(*rows)

    assert_balanced(once, *stepped.full, *stepped.params, *stepped.grads, stepped.module)


def test_whole_steps(stepped):
    watched = [*stepped.full, *stepped.params, *stepped.grads, stepped.module, stepped.flat]
    assert_balanced(stepped.step, *watched, stepped.tree)


def test_steps_with_gradients_that_the_user_put_there(stepped):
    def once() -> None:
        stepped.step()
        for param in stepped.params:
            param.grad = torch.ones_like(param)
        stepped.flat.adopt_grads()

    assert_balanced(once, *stepped.params, *stepped.grads)


def test_steps_without_synchronisation(stepped):
    stepped.flat.sync = False
    assert_balanced(stepped.step, *stepped.full, *stepped.params, *stepped.grads)


def test_parameters_with_listeners(stepped):
    for param in stepped.params:
        param.register_post_accumulate_grad_hook(lambda p: None)
    assert_balanced(stepped.step, *stepped.params)


def test_replaced_parameters(stepped):
    other = torch.nn.Parameter(torch.zeros(4))

    def once() -> None:
        stepped.flat.replace_param(0, other)
        stepped.flat.replace_param(0, stepped.params[0])

    assert_balanced(once, other, stepped.params[0])


def test_units_and_trees_that_come_and_go():
    comm, torch_functions = _probe.Comm.self_(), Stepped().functions()

    def once() -> None:
        flats = [_probe.FlatParameter(f"u{i}", comm, SPECS) for i in range(3)]
        tree = _probe.Tree(flats, [0, 1, 1], torch=torch_functions)
        with pytest.raises(_probe.StateError):
            _probe.Tree(flats, [0, 1, 1])
        tree.close()

    assert_balanced(once, comm, *torch_functions)


@pytest.mark.long
def test_reports(stepped):
    for _ in range(300):
        stepped.step()
    flat, tree = stepped.flat, stepped.tree
    specs = [tuple(spec) for spec in SPECS]
    assert_balanced(lambda: (tree.trace(), tree.memory(), flat.layout()), flat, tree)
    assert_balanced(lambda: _probe.layout(specs, 3, 64, True), specs, *specs)
    assert_balanced(lambda: (flat.shard_part(0), flat.full_param(0, (2, 2)), flat.shard), flat)
    assert_balanced(lambda: _probe.kernel_names())


@pytest.mark.parametrize("refused", [False, True])
def test_values_in_and_out(refused):
    flat = _probe.FlatParameter("u", _probe.Comm.self_(), SPECS)
    arrays: list[Any] = [np.ones(4, np.float32), torch.ones(5 if refused else 3)]

    def once() -> None:
        for call in (
            lambda: flat.read(arrays),
            lambda: _probe.reduce(flat, arrays),
            lambda: flat.read_blocks([4, 3], arrays),
            lambda: flat.write_blocks([4, 3], arrays),
            lambda: flat.write(1, arrays[1]),
        ):
            try:
                call()
                assert not refused
            except ValueError:
                assert refused

    assert_balanced(once, *arrays, arrays)


@pytest.mark.parametrize("refused", [False, True])
def test_kernels(refused):
    acc, src = np.zeros(4, np.float32), np.ones(5 if refused else 4, np.float32)
    targets = [(4, 0, "float32"), (4, 64, "float32")]

    def once() -> None:
        plan = _probe.kernel_pack_plan(targets, 128)
        for call in (
            lambda: _probe.kernel_reduce(acc, "float32", [acc, None, src], "float32"),
            lambda: _probe.kernel_cast(acc, "float32", src, "float32"),
            lambda: _probe.kernel_pack(plan, np.zeros(128, np.uint8), [acc, src]),
        ):
            try:
                call()
                assert not refused
            except ValueError:
                assert refused

    assert_balanced(once, acc, src, targets, *targets)


@pytest.mark.long
def test_views_of_tensors():
    tensor, array = torch.ones(3, 2), np.ones((3, 2), np.float32)
    for how in ("any", "torch", "methods"):
        assert_balanced(lambda how=how: _probe.tensor_info(tensor, how), tensor)
    assert_balanced(lambda: _probe.tensor_info(array), array)
    assert_balanced(lambda: _probe.export_dlpack(array), array)


def test_collectives_with_callbacks():
    class Calls:
        def all_gather(self, *args: Any) -> None:
            pass

        reduce_scatter = all_reduce = broadcast = barrier = all_gather

    calls, array = Calls(), np.ones(4, np.float32)
    comm = _probe.Comm.c10d(0, 1, calls)

    def once() -> None:
        comm.all_gather(array)
        comm.reduce_scatter(array)
        comm.all_reduce(array)
        comm.broadcast(array)
        comm.barrier()
        _probe.Comm.c10d(0, 1, calls)

    assert_balanced(once, calls, array)


def test_views_of_arguments_go_with_their_forward():
    """Views of arguments are freed when their forward ends, not at Python's next collection. Such
    views replace the inputs of a unit that has a frozen parameter and no nested unit.
    """
    tensor = torch.ones(4, requires_grad=True) * 2
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        args, kwargs = alias_arguments((tensor, (tensor,)), {"x": tensor})
        assert args[0] is args[1][0] is kwargs["x"] is not tensor
        del args, kwargs, tensor
        assert gone() is None
    finally:
        gc.enable()
