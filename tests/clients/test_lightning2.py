"""Tests of PyTorch Lightning's ModelParallelStrategy, with fsdpc's ``fully_shard``."""

from __future__ import annotations

import pytest
from harness import run_ranks

import fsdpc

pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from test_lightning import (  # noqa: E402
    BATCHES,
    ELASTIC,
    EPOCHS,
    Tiny,
    check_resumed,
    close,
    loader,
    on_ddp,
    trainer_of,
)


class Sharded(Tiny):
    """A module that shards itself on Lightning's mesh, by ``fully_shard`` imported from torch."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if isinstance(self.model, fsdpc.FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def fit(rank, world, epochs=EPOCHS, accumulate=1, clip=None, resume=None, save=None, full=True):
    """Train, and return training losses and norms, validation losses and the whole model."""
    fsdpc.install("fully_shard")
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not full
    )
    trainer = trainer_of("fsdpc", epochs, accumulate, strategy=strategy)
    module = Sharded(clip)
    trainer.fit(module, loader(7), loader(8), ckpt_path=resume)
    units = [m for m in module.modules() if isinstance(m, fsdpc.FSDPModule)]
    assert len(units) == 3
    if save is not None:
        trainer.save_checkpoint(save)
    state = {key: value.full_tensor().clone() for key, value in module.state_dict().items()}
    return module.seen, module.validated, state


@pytest.mark.parametrize("options", [{}, {"clip": 0.5, "accumulate": 2}], ids=["plain", "clip"])
def test_losses_equal_ddp(options):
    expected = on_ddp(**options)
    got = run_ranks(fit, 2, env=ELASTIC, **options)
    for rank in range(2):
        assert len(got[rank][0]) >= EPOCHS * BATCHES
        close(got[rank], expected[rank])


@pytest.mark.parametrize("full", [True, False])
def test_resume(full, tmp_path):
    check_resumed(fit, tmp_path, full=full)
