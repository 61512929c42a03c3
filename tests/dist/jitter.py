"""Random delays in the ranks, so that races show: FSDPC_TEST_JITTER=seed, `pytest --jitter seed`.
Tests whose graphs race most always have delays (seed 1). An empty FSDPC_TEST_JITTER disables all.

A rank sleeps for up to a few milliseconds before and after modules' forwards, before nodes of the
autograd graph (those of outputs, and some above them, gradient accumulation too) and around the
optimizer's step. Which ones is drawn from the seed and the rank, in phases in which a rank is quick
or slow, so that ranks drift apart. No value may change.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

LONGEST_S = 0.004
PHASE = 25  # places a rank passes before it draws again whether it is slow
BUDGET_S = 4.0  # all sleeps of a rank together
ABOVE = 3  # levels of the graph above an output whose nodes may be delayed
ALWAYS = ("test_features_graph", "test_features_experts", "test_late_")  # begins of files' names


class Delays:
    """When this rank sleeps."""

    def __init__(self, seed: str, rank: int, budget: float = BUDGET_S) -> None:
        self.budget = budget
        self.random = random.Random(f"{seed}:{rank}")
        self.passed, self.slept, self.chance = 0, 0.0, 0.0

    def wait(self, *_: Any) -> None:
        """A place where this rank may be late."""
        if self.passed % PHASE == 0:
            self.chance = self.random.choice([0.0, 0.05, 0.3, 0.6])
        self.passed += 1
        if self.random.random() < self.chance and self.slept < self.budget:
            seconds = self.random.random() * LONGEST_S
            self.slept += seconds
            time.sleep(seconds)

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        self.wait()
        for node in self.nodes_of(output):
            node.register_prehook(self.before_node)

    def before_node(self, grads: Any) -> None:
        self.wait()

    def nodes_of(self, output: Any) -> list[Any]:
        """Some of the nodes that made an output."""
        import torch
        from torch.utils._pytree import tree_leaves

        level = [
            t.grad_fn
            for t in tree_leaves(output)
            if isinstance(t, torch.Tensor) and t.grad_fn is not None
        ]
        found: list[Any] = []
        for _ in range(ABOVE):
            found += [node for node in level if self.random.random() < 0.4]
            level = [above for node in level[:8] for above, _ in node.next_functions if above]
        return found


def delays_of(rank: int, module: str) -> Any:
    """The context in which a rank runs a test of the module; does nothing without a seed."""
    always = "1" if module.rpartition(".")[2].startswith(ALWAYS) else ""
    seed = os.environ.get("FSDPC_TEST_JITTER", always)
    return jittered(seed, rank) if seed else nullcontext()


@contextmanager
def jittered(seed: str, rank: int, budget: float = BUDGET_S) -> Iterator[Delays]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    delays = Delays(seed, rank, budget)
    handles = [
        module.register_module_forward_pre_hook(delays.wait),
        module.register_module_forward_hook(delays.after_forward),
        optimizer.register_optimizer_step_pre_hook(delays.wait),
        optimizer.register_optimizer_step_post_hook(delays.wait),
    ]
    try:
        yield delays
    finally:
        for handle in handles:
            handle.remove()
