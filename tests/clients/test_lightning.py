"""Tests of PyTorch Lightning's FSDPStrategy on fsdpc: the Trainer fits, validates and resumes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from torch import nn
from toys import Block, toy

import fsdpc

pytest.importorskip("lightning", reason="lightning is not installed")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

BATCHES, EPOCHS = 3, 3  # of each rank
ELASTIC = {"TORCHELASTIC_RUN_ID": "test"}  # tells Lightning that a launcher started the ranks
both_forms = pytest.mark.parametrize("form", ["full", "sharded"])


class OnCPURanks(FSDPStrategy):
    """A subclass of FSDPStrategy, because Lightning refuses FSDPStrategy itself without a GPU.

    Nothing in FSDPStrategy needs a GPU. This subclass is the only patch.
    """


class Tiny(pl.LightningModule):
    """A Lightning module around toy() that records its losses and gradient norms."""

    def __init__(self, clip: float | None = None, wrap_by_hand: bool = False) -> None:
        super().__init__()
        self.model = toy()
        self.clip, self.wrap_by_hand = clip, wrap_by_hand
        self.seen: list[float] = []
        self.validated: list[float] = []

    def configure_model(self):
        from torch.distributed.fsdp.wrap import wrap

        if self.wrap_by_hand and not isinstance(self.model, fsdpc.FSDP):
            self.model.blocks = nn.ModuleList(wrap(block) for block in self.model.blocks)
            self.model = wrap(self.model)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self):
        # With use_orig_params=False, Lightning requires the parameters of the wrapped model. With
        # use_orig_params=True, they work as well.
        params = self.trainer.model.parameters()
        optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def configure_gradient_clipping(self, optimizer, *_, **__):
        if self.clip is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.seen.append(float(nn.utils.clip_grad_norm_(params, self.clip)))


def loader(seed: int):
    data = torch.randint(13, (2 * 2 * BATCHES, 5), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(data, batch_size=2)


def trainer_of(
    kind: str,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    precision="32-true",
    strategy=None,
    **options,
) -> pl.Trainer:
    warnings.filterwarnings("ignore", category=UserWarning)  # about workers, loggers
    if strategy is not None:
        pass
    elif kind == "fsdpc":
        fsdpc.install()
        strategy = OnCPURanks(**options)
    else:
        strategy = "ddp"
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        precision=precision,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def fit(
    rank,
    world,
    kind,
    epochs=EPOCHS,
    clip=None,
    resume=None,
    save=None,
    wrap_by_hand=False,
    **options,
):
    """Train, and return training losses and norms, validation losses, state dict and unit count."""
    trainer = trainer_of(kind, epochs, **options)
    module = Tiny(clip, wrap_by_hand)
    trainer.fit(module, loader(7), loader(8), ckpt_path=resume)
    units = [m for m in trainer.model.modules() if isinstance(m, fsdpc.FSDP)]
    assert (len(units) > 0) == (kind == "fsdpc")
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen, module.validated, whole(trainer), len(units)


@functools.cache
def on_ddp(**options):
    """Return the results of ``fit`` on two ranks of DDP."""
    return run_ranks(fit, 2, env=ELASTIC, kind="ddp", **options)


def whole(trainer):
    """Return the state dict of the unsharded model on every rank."""
    model = trainer.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return {name: value.clone() for name, value in model.state_dict().items()}


def close(got, expected):
    """Check that results agree up to rounding: DDP and fsdpc average gradients differently."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"use_orig_params": False},
        {"auto_wrap_policy": {Block}, "sharding_strategy": "SHARD_GRAD_OP"},
        {"auto_wrap_policy": {Block}, "clip": 0.5, "accumulate": 2},
        {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}},
        {"wrap_by_hand": True},
        {"auto_wrap_policy": {Block}, "state_dict_type": "full", "cpu_offload": True},
    ],
    ids=lambda case: "-".join(case) or "default",
)
def test_losses_equal_ddp(case):
    general = {key: case[key] for key in ("clip", "accumulate") if key in case}
    expected = on_ddp(**general)
    got = run_ranks(fit, 2, env=ELASTIC, kind="fsdpc", **case)
    steps = EPOCHS * BATCHES
    norms = EPOCHS * 2 if "clip" in case else 0  # an epoch's 3 micro-batches make 2 steps
    for rank in range(2):
        assert len(got[rank][0]) == steps + norms
        assert got[rank][0][-1] != got[rank][0][0]
        close(got[rank], expected[rank])
        assert got[rank][3] == (3 if "auto_wrap_policy" in case or "wrap_by_hand" in case else 1)


def check_resumed(fit, folder, **options):
    """Check that a new Trainer continues a run that stopped after one epoch.

    Losses and weights equal, to the bit, those of a run without a stop.
    """
    file = str(folder / "checkpoint")
    straight = run_ranks(fit, 2, env=ELASTIC, **options)
    first = run_ranks(fit, 2, env=ELASTIC, epochs=1, save=file, **options)
    rest = run_ranks(fit, 2, env=ELASTIC, resume=file, **options)
    for rank in range(2):
        assert first[rank][0] + rest[rank][0] == straight[rank][0]
        assert first[rank][1] + rest[rank][1] == straight[rank][1]
        for name, value in straight[rank][2].items():
            assert torch.equal(rest[rank][2][name], value), name


@both_forms
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_resume(form, use_orig_params, tmp_path):
    options = {"state_dict_type": form, "use_orig_params": use_orig_params}
    check_resumed(fit, tmp_path, kind="fsdpc", auto_wrap_policy={Block}, **options)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_full_checkpoint_is_one_of_the_plain_module(tmp_path, use_orig_params):
    """DDP ranks, and Lightning without a strategy, can read a file that two fsdpc ranks wrote."""
    file = str(tmp_path / "checkpoint")
    options = {"auto_wrap_policy": {Block}, "use_orig_params": use_orig_params}
    straight = on_ddp()
    first = run_ranks(fit, 2, env=ELASTIC, kind="fsdpc", epochs=1, save=file, **options)
    rest = run_ranks(fit, 2, env=ELASTIC, kind="ddp", resume=file)
    for rank in range(2):
        torch.testing.assert_close(
            first[rank][0] + rest[rank][0], straight[rank][0], rtol=1e-5, atol=0.0
        )
    module = Tiny.load_from_checkpoint(file, weights_only=False)
    assert set(module.state_dict()) == set(first[0][2])
    for name, value in module.state_dict().items():
        assert torch.equal(value, first[0][2][name])


def test_a_ddp_checkpoint_is_continued_on_fsdpc(tmp_path):
    file = str(tmp_path / "checkpoint")
    straight = on_ddp()
    first = run_ranks(fit, 2, env=ELASTIC, kind="ddp", epochs=1, save=file)
    rest = run_ranks(fit, 2, env=ELASTIC, kind="fsdpc", resume=file, auto_wrap_policy={Block})
    for rank in range(2):
        torch.testing.assert_close(
            first[rank][0] + rest[rank][0], straight[rank][0], rtol=1e-5, atol=0.0
        )


@ranks(2, env=ELASTIC)
def test_bf16(rank, world):
    """bf16-mixed computes and reduces in bf16, so losses differ from fp32's by rounding errors."""
    seen, _, _, _ = fit(rank, world, "fsdpc", precision="bf16-mixed", auto_wrap_policy={Block})
    expected, _, _, _ = fit(rank, world, "ddp")
    torch.testing.assert_close(seen, expected, rtol=0.02, atol=0.0)
    assert seen != expected


@ranks(2, env=ELASTIC)
def test_validate_and_predict_without_fit(rank, world):
    trainer = trainer_of("fsdpc", auto_wrap_policy={Block})
    module = Tiny()
    trainer.validate(module, loader(8), verbose=False)
    plain = Tiny()
    batches = list(loader(8))
    own = torch.cat(batches)[rank::world].split(2)  # what Lightning's sampler gives this rank
    with torch.no_grad():
        expected = [plain.loss(batch).item() for batch in own]
    assert module.validated == expected
    assert dist.get_world_size() == world
