"""On the simulated GPU: ranks that run different units, which they say."""

from __future__ import annotations

import env
import pytest
from harness import ranks
from test_features_experts import loss_of as mixture_loss
from test_features_experts import mixture, random_batch
from toys import Reference, check_gradients, wrap_blocks

import fsdpc

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
ON_GPU = env.environment()


@ranks(2, 3, env=ON_GPU)
def test_marked_experts(rank, world):
    """A marked mixture of experts trains like the unsharded one."""
    model = mixture(count=3)
    reference = Reference(model, loss_of=mixture_loss)
    for layer in model.layers:
        fsdpc.mark_data_dependent(layer)
    sharded = wrap_blocks("fsdpc", model, use_orig_params=True)
    for step in range(4):
        batch = random_batch(rank, step, 1, 3)
        mixture_loss(sharded, batch).backward()
        reference.backward(batch)
        check_gradients("nccl", sharded, reference, f"of step {step}")
