"""Random delays in the ranks, which make races more likely to show.

FSDPC_TEST_JITTER=seed or `pytest --jitter seed` sets the seed. If no seed is set, only the test
files in ALWAYS have delays, with seed 1. An empty FSDPC_TEST_JITTER disables all delays.

A rank sleeps for up to a few milliseconds before and after the forwards of modules, and before and
after the optimizer's step. It also sleeps before some nodes of the autograd graph: nodes that made
the outputs of modules, and nodes a few levels further, also those that accumulate gradients.
The seed and the rank decide where. Each rank is sometimes quick and sometimes slow, so that the
ranks drift apart. The delays must not change any result of a test.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

LONGEST_S = 0.004
PHASE = 25  # after this many calls of wait(), a rank draws a new probability of sleeping
BUDGET_S = 4.0  # a rank that has slept this long in one test sleeps no more
ABOVE = 3  # number of levels of the graph, from an output upwards, whose nodes may be delayed
ALWAYS = ("test_features_graph", "test_features_experts", "test_late_")  # starts of file names


class Delays:
    """The random delays of this rank."""

    def __init__(self, seed: str, rank: int, budget: float = BUDGET_S) -> None:
        self.budget = budget
        self.random = random.Random(f"{seed}:{rank}")
        self.passed, self.slept, self.chance = 0, 0.0, 0.0

    def wait(self, *_: Any) -> None:
        """Sleep for a random time, or not at all."""
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
        """Return some of the autograd nodes that made an output."""
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
    """Return the context in which a rank runs a module's tests, with delays if there is a seed."""
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
