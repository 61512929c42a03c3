"""``fully_shard`` as programs and frameworks use it: outputs of any type, weights that are read
outside of their modules, models that get their values on the meta device.
"""

from __future__ import annotations

import collections
import dataclasses

import torch
from harness import ranks
from torch import nn

from fsdpc import MixedPrecisionPolicy, fully_shard

LOW = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)

# --- outputs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)


class Registered:
    def __init__(self, x):
        self.x = x


torch.utils._pytree.register_pytree_node(
    Registered, lambda value: ([value.x], None), lambda items, context: Registered(*items)
)


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        if self.kind == "dataclass":
            output = Output(y)
            output.twice = 2 * y
            return output
        return Registered(y) if self.kind == "registered" else collections.deque([y])


@ranks(2)
def test_outputs_of_any_type_are_cast_and_train(rank, world):
    """torch loses the gradients of the last two, and raises for the first."""
    for kind in ("dataclass", "registered", "deque"):
        model = Returns(kind)
        with torch.no_grad():
            model.inner.weight.fill_(1)
        fully_shard(model.inner, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model, mp_policy=LOW)
        output = model(torch.ones(2, 4) * (rank + 1))
        tensor = output[0] if kind == "deque" else getattr(output, "twice", None)
        tensor = output.x if tensor is None else tensor
        assert tensor.dtype == torch.float32, kind
        tensor.sum().backward()
        scale = 2 if kind == "dataclass" else 1
        grad = model.inner.weight.grad.full_tensor()
        assert torch.equal(grad, torch.full_like(grad, 3.0 * scale)), kind
