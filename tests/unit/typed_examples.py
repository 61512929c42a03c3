"""Public names as users write them, for type checkers. mypy and pyright accept this file;
test_stub.py runs mypy where mypy is installed. No code of this file runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import fsdpc
from fsdpc import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    activations,
    checkpoint,
    optim,
)
from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc.sharded_grad_scaler import ShardedGradScaler
from fsdpc.wrap import ModuleWrapPolicy


def wrapped(model: nn.Module, blocks: list[nn.Linear]) -> FSDP:
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        cpu_offload=CPUOffload(offload_params=False),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        ignored_modules=blocks,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def steps_by_the_class(model: FSDP, batches: list[Tensor]) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = ShardedGradScaler()
    with model.no_sync():
        scaler.scale(model(batches[0]).sum()).backward()
    norm = model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    with FSDP.summon_full_params(model, writeback=False):
        print(sum(p.numel() for p in model.parameters()))
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        torch.save(model.state_dict(), "model.pt")
    state = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    assert_type(norm, Tensor)
    assert_type(FSDP.fsdp_modules(model), list[FullyShardedDataParallel])
    return norm


def sharded(blocks: nn.ModuleList, model: nn.Sequential) -> nn.Sequential:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fsdpc.fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fsdpc.fully_shard(blocks[2], mp_policy=fsdpc.QuantizedPolicy(param_dtype=torch.bfloat16))
    assert_type(fsdpc.fully_shard([blocks[0], blocks[1]]), list[nn.Module])
    fsdpc.register_fsdp_forward_method(model, "generate")
    root = fsdpc.fully_shard(model, reshard_after_forward=False)
    assert_type(root, nn.Sequential)  # at run time, root is also an FSDPModule
    assert isinstance(root, fsdpc.FSDPModule)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(True, recurse=False)
    handle = root.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    root.reshard()
    return model


def setters(model: nn.Module, averages: Tensor) -> None:
    def hook(gradients: Tensor) -> None:
        gradients.mul_(averages)

    for module in model.modules():
        if isinstance(module, fsdpc.FSDPModule):
            module.set_all_reduce_hook(hook)
            module.set_modules_to_forward_prefetch([module])


def optimizers(model: nn.Module) -> float:
    disk = optim.Disk("/scratch", buffer_bytes=1 << 26)
    every: list[torch.optim.Optimizer] = [
        optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), offload=disk),
        optim.AdamW([{"params": [p], "lr": 0.1} for p in model.parameters()]),
        optim.Adam(model.parameters(), fused=True),
        optim.AdamW8bit(model.parameters(), min_8bit_size=0, offload=optim.Host(ratio=0.5)),
        optim.AdamWBF16(model.parameters(), seed=1),
        optim.AdamMini(model.named_parameters(), head_dim=64, block=lambda name, shape: shape[-1]),
        optim.Lion(model.parameters(), lr=torch.tensor(1e-4)),
        optim.SGD(model.parameters(), momentum=0.9),
        optim.Muon(model.named_parameters(), lr=0.02, adamw_lr=3e-4, split={"attn.c_attn": (1, 3)}),
        optim.Muon([{"params": model.parameters(), "use_muon": False}], ns_dtype=torch.float32),
        optim.Adafactor(model.parameters(), lr=1e-2, eps=(None, 1e-3), split=lambda name, shape: 3),
        optim.SOAP(model.named_parameters(), betas=(0.9, 0.95), split={"attn": 3}, adamw_lr=1e-3),
        optim.Shampoo(model.named_parameters(), max_precondition_dim=4096, grafting=False),
    ]
    for one in every:
        one.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(every[0], T_max=10)
    scheduler.step()
    early = optim.in_backward(model, lambda named: optim.AdamW(named, lr=1e-3))
    early.step()
    early.write_copies(None)
    average = optim.Average(every[0], optim.Average.warm_up(0.99), every=2, after=10)
    with average.applied(model):
        mean = average.of(next(model.parameters())).mean()
    norm = optim.SGD(model.parameters()).step_and_clip(1.0) + mean
    return float(norm)


def checkpoints(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
    checkpoint.save(path, model, optimizer, extra={"position": 3}, dtype=torch.bfloat16)
    handle = checkpoint.save("out", model, async_=True, only=["*lora_*"], overwrite=True)
    if handle is not None:
        handle.join()
        handle.wait(timeout=60)
    found = checkpoint.load(path, model, optimizer, verify="during", rename={"old": "new"})
    checkpoint.load(path, model, only=lambda name: "head" in name, strict=False)
    assert_type(found, checkpoint.Loaded)
    rule = checkpoint.KeyMap(["{p}.q", "{p}.k"], "{p}.qk", lambda q, k: torch.cat((q, k)))
    made = checkpoint.load_pretrained(model, "org/name", keys=[rule], strict=True, cache_dir=path)
    assert_type(made, checkpoint.Pretrained)
    several = {"model": model, "ema": model}
    checkpoint.save(path, several, {"model": optimizer}, states={"loader": handle}, rng=True)
    checkpoint.save(path, model, hf=True, tokenizer=rule)
    checkpoint.load(path, several, rng=True)
    keeper = checkpoint.Checkpointer(path, keep=2, every=100, best="min", keep_every=9)
    checkpoint.save("s3://bucket/run", model, staging=path)
    with checkpoint.stream(model, dtype=torch.bfloat16, only="*.weight") as tap:
        names = [name for name, tensor in tap if tensor.is_cpu]
        tap.send(lambda bucket: names.append(bucket[0][0]))
        tap.publish("run/weights.sock", readers=2, deadline=60, step=3)
        assert_type(tap.metadata(), list[checkpoint.WeightInfo])
    with checkpoint.StreamReader("run/weights.sock", deadline=60) as reader:
        for weights in reader:
            assert_type(weights.step, int | None)
            print(dict(weights))
    with checkpoint.Preemption(within=30) as preemption:
        keeper.save(100, model, optimizer, metric=0.5, force=preemption.agreed())
    assert_type(keeper.best(), Path | checkpoint.Url | None)
    try:
        resumed = keeper.resume(model, optimizer)
    except checkpoint.CheckpointError as error:
        raise SystemExit(str(error)) from error
    assert_type(keeper.latest(), Path | checkpoint.Url | None)
    return None if resumed is None else resumed.step


def smaller_activations(model: nn.Module, batch: Tensor) -> Tensor:
    names = activations.checkpoint(model, ratio="1/2", policy="matmul", blocks=[nn.Linear])
    activations.checkpoint(model, which=[0, -1], blocks=lambda m: isinstance(m, nn.Linear))
    assert_type(names, list[str])
    with activations.compress(model, "bf16"), activations.offload(model) as moved:
        loss = model(batch).sum()
    print(moved.nbytes, moved.pinned_bytes)
    assert isinstance(loss, Tensor)
    return loss


def around_a_run(model: nn.Module, head: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    assert_type(fsdpc.__version__, str)
    fsdpc.install("fully_shard")
    fsdpc.uninstall()
    fsdpc.set_collectives("c10d", trust_order=True)
    assert_type(fsdpc.mark_replicated(head), nn.Linear)
    assert_type(fsdpc.mark_data_dependent(head), nn.Linear)
    assert_type(fsdpc.memory_stats(model), dict[str, int])
    assert_type(fsdpc.barrier(model), None)
    report = fsdpc.memory_report(model, optimizer)
    assert_type(report.equal, bool)
    with fsdpc.profile_memory(model, tensors=False) as profile:
        model(torch.zeros(1))
    profile.save("profile.json")
    try:
        model(torch.zeros(1))
    except fsdpc.PeerError as error:
        print(error)
    except (fsdpc.CommTimeout, fsdpc.MismatchError, fsdpc.StateError, fsdpc.OutOfMemoryError):
        raise
