"""The engines that bench_step.py compares: ways to train one model, with one interface.

Each engine starts from the same weights and returns a `Training`: a module to call, an optimizer,
and what has to happen before the forward and after the backward. `local` is the lower bound: every
rank trains its own unsharded copy without communication. In bf16, the step of `local` does what
mixed precision does in the sharded engines: fp32 weights are cast into a bf16 copy of the model,
which computes, and the bf16 gradients are cast to fp32 for the optimizer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """A model and the size of one rank's batch. `steps` steps are timed together."""

    config: GPTConfig
    batch: int
    seq: int
    steps: int
    dtype: torch.dtype = torch.float32  # of gathered weights and computation; the rest is fp32
    device: torch.device = CPU
    checkpointing: bool = False  # True: backward computes each block's activations again


SMALL, LARGE = GPTConfig(), GPTConfig(layers=12, width=768, heads=12)
TINY = GPTConfig(layers=32, width=32, heads=2, context=32)

# Sequences are short, so that a step is dominated by weights rather than by activations. This is
# the hard case for sharding. `tiny` is 32 blocks of 12 parameters (13 thousand elements per block)
# and the root's unit. These units compute almost nothing, so that a step consists of host time.
WORKLOADS = {
    "10m": Workload(SMALL, batch=4, seq=128, steps=3),
    "10m-bf16": Workload(SMALL, batch=4, seq=128, steps=3, dtype=torch.bfloat16),
    "85m": Workload(LARGE, batch=2, seq=128, steps=1),
    "85m-bf16": Workload(LARGE, batch=2, seq=128, steps=1, dtype=torch.bfloat16),
    "tiny": Workload(TINY, batch=1, seq=32, steps=20),
}


def nothing() -> None:
    """Do nothing, in place of a part of the step that an engine does not need."""


@dataclass
class Training:
    """A model with its optimizer, as one engine trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    before_forward: Callable[[], None] = nothing
    after_backward: Callable[[], None] = nothing
    # Returns a context manager, inside which the steps of a timed round run.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Run forward and backward on (inputs, targets), int64 [batch, length]; return the loss."""
        self.before_forward()
        logits = self.model(batch[0]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        loss.backward()
        self.after_backward()
        return loss.detach()

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Run one whole training step and return its loss."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def plain_model(work: Workload) -> GPT:
    """Return the model on ``work``'s device with the weights that every engine starts from."""
    torch.manual_seed(0)
    with work.device:
        model = GPT(work.config)
    if work.checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def adamw(model: nn.Module, work: Workload) -> torch.optim.Optimizer:
    """Return torch's AdamW with the same options for each engine, fused on a GPU."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=work.device.type == "cuda" or None)


def local(work: Workload) -> Training:
    """Build the unsharded training. Weights are fp32; another dtype computes on a cast copy."""
    master = plain_model(work)
    if work.dtype is torch.float32:
        return Training(master, adamw(master, work))
    low = plain_model(work).to(work.dtype)
    pairs = list(zip(master.parameters(), low.parameters(), strict=True))

    @torch.no_grad()
    def cast_weights() -> None:
        torch._foreach_copy_([half for _, half in pairs], [full for full, _ in pairs])

    def cast_gradients() -> None:
        for full, half in pairs:
            full.grad, half.grad = half.grad.float(), None

    return Training(low, adamw(master, work), cast_weights, cast_gradients)


def bare(work: Workload) -> Training:
    """Build the unsharded module in the computing dtype, without master weights and casts."""
    model = plain_model(work).to(work.dtype)
    return Training(model, adamw(model, work))


def unit_class(work: Workload) -> type[nn.Module]:
    """Return the class that becomes a unit: the block, or the checkpoint wrapper around a block."""
    return CheckpointWrapper if work.checkpointing else Block


def wrapper(work: Workload, module: Any, wrap: Any, **options: object) -> Training:
    """Wrap with the FSDP1 interface, whose classes are in `module` and whose policies in `wrap`."""
    policy = functools.partial(
        wrap.transformer_auto_wrap_policy, transformer_layer_cls={unit_class(work)}
    )
    precision = module.MixedPrecision(param_dtype=work.dtype, reduce_dtype=torch.float32)
    model = module.FullyShardedDataParallel(
        plain_model(work),
        auto_wrap_policy=policy,
        mixed_precision=None if work.dtype is torch.float32 else precision,
        device_id=work.device,
        **{"use_orig_params": True, **options},
    )
    return Training(model, adamw(model, work))


def fsdp1(work: Workload, **options: object) -> Training:
    """Build torch.distributed.fsdp.FullyShardedDataParallel, which uses gloo on the CPU."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp import wrap

    return wrapper(work, fsdp, wrap, **options)


def fsdpc(work: Workload, **options: object) -> Training:
    """Build fsdpc.FullyShardedDataParallel, which uses shared memory on the CPU of one host."""
    import fsdpc
    from fsdpc import wrap

    return wrapper(work, fsdpc, wrap, **options)


def stepped_by(work: Workload, make: str) -> Training:
    """Build fsdpc with another AdamW: torch's fused one, or fsdpc.optim's."""
    from fsdpc import optim

    training = fsdpc(work)
    kinds = {"torch": functools.partial(torch.optim.AdamW, fused=True), "fsdpc": optim.AdamW}
    training.optimizer = kinds[make.removesuffix(" average")](training.model.parameters(), lr=1e-3)
    if make.endswith(" average"):
        optim.Average(training.optimizer)
    return training


def profiled(work: Workload, **options: bool) -> Training:
    """Build fsdpc whose timed rounds run inside fsdpc.profile_memory(model, **options)."""
    import fsdpc as library

    training = fsdpc(work)
    training.around = lambda: library.profile_memory(training.model, **options)
    return training


def fsdp2(work: Workload) -> Training:
    """Build torch.distributed.fsdp.fully_shard, which uses gloo on the CPU."""
    from torch.distributed.fsdp import fully_shard

    return sharded_in_place(work, fully_shard)


def fsdpc2(work: Workload) -> Training:
    """Build fsdpc.fully_shard, which uses shared memory on the CPU of one host."""
    import fsdpc

    return sharded_in_place(work, fsdpc.fully_shard)


def sharded_in_place(work: Workload, fully_shard: Callable[..., Any]) -> Training:
    """Shard with the FSDP2 interface: each block is a unit, and the root has the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = plain_model(work)
    low = None if work.dtype is torch.float32 else work.dtype
    options = {
        "mesh": init_device_mesh(work.device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Training(model, adamw(model, work))


ENGINES: dict[str, Callable[[Workload], Training]] = {
    "local": local,
    "bare": bare,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdpc": fsdpc,
    "fsdpc2": fsdpc2,
    "fsdpc-torch-fused": functools.partial(stepped_by, make="torch"),
    "fsdpc-optim-average": functools.partial(stepped_by, make="fsdpc average"),
    "fsdpc-optim": functools.partial(stepped_by, make="fsdpc"),
    "fsdpc-events": functools.partial(profiled, tensors=False),
    "fsdpc-tensors": profiled,
}


def build(name: str, work: Workload) -> Training:
    """Build an engine by name. Collective over the default process group.

    `fsdpc-flat` and `fsdp1-flat` have one flat parameter per unit (`use_orig_params=False`).
    """
    if name.endswith("-flat"):
        wrapping = {"fsdp1": fsdp1, "fsdpc": fsdpc}[name.removesuffix("-flat")]
        return wrapping(work, use_orig_params=False)
    return ENGINES[name](work)


def random_batch(work: Workload, seed: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets, which are equal for equal seeds."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, work.config.vocab, (work.batch, work.seq + 1), generator=rng)
    tokens = tokens.to(work.device)
    return tokens[:, :-1], tokens[:, 1:]
