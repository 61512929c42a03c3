"""Tests of fsdpc's optimizers and packed activations on the simulated GPU. Results equal those of
the CPU, and a step needs no host synchronization. If a test leaves out a wait, the simulator
reports a race.
"""

from __future__ import annotations

from unittest import mock

import env
import pytest
import torch
from harness import ranks, run_ranks
from test_clip_gpu import Unread
from test_device_waits import ON_GPU, Run, leave_out_each_wait
from test_optim_steps import OPTIONS, Model, alone, make, same, train
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from toys import full_parameters, wrap

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import ShardingStrategy, optim
from fsdpc._companions.saved import bytes_per_element
from fsdpc.activations import compress, compression

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))


def losses(rank: int, world: int, kind: str) -> list[float]:
    run = Run(rank, "fp32", "FSDP")
    run.optimizer = getattr(optim, kind)(run.model.parameters())
    return [run.step(i) for i in range(4)]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "AdamWBF16"])
def test_losses_equal_those_of_the_processor(kind: str):
    """Losses on the GPU equal those on the CPU to the bit, because ranks of one host without a GPU
    add gradients in the same order as two ranks on GPUs.
    """
    found = [run_ranks(losses, 2, env=on, kind=kind) for on in (ON_GPU, {})]
    assert found[0] == found[1]
    assert found[0][0][-1] < found[0][0][0]


@ranks(2, env=ON_GPU)
def test_every_optimizer_steps_by_kernels(rank: int, world: int):
    """The reference is a model in host memory, whose optimizer steps on the CPU."""
    import simgpu

    for name in OPTIONS:
        dtype = torch.bfloat16 if name == "AdamWBF16" else torch.float32
        for use_orig_params in {True, name == "AdamWBF16"}:
            model = wrap("fsdpc", Model(dtype), use_orig_params=use_orig_params)
            optimizer = make(name, model)
            train(model, optimizer, range(2), False)
            optimizer.zero_grad()
            model(2).backward()
            with simgpu.counting() as cost:
                optimizer.step()
            by_torch = name == "Adafactor"  # Adafactor is made of torch's operators
            assert by_torch or cost["launches"] >= 2, name
            expected = dict(alone(name, dtype)[0].named_parameters())
            for key, value in full_parameters(model).items():
                same(name, value, expected[key].detach())


@ranks(1, 2, env=ON_GPU)
def test_a_step_needs_no_host_sync(rank: int, world: int):
    import simgpu

    run = Run(rank, "fp32", "FSDP", "fsdpc.optim")
    for i in range(2):
        run.step(i)
    expected = None
    for clip in (False, True, True):
        with simgpu.counting() as cost, Unread():
            norm = run.optimizer.step_and_clip(0.1) if clip else run.optimizer.step()
        assert cost["host_syncs"] == 0 and cost["launches"] > 0
        if clip:
            expected = run.model.clip_grad_norm_(1e9)
            torch.testing.assert_close(norm.float(), expected.float())


@ranks(1, 2, env=ON_GPU, alone=True)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_adam_mini_needs_no_host_sync(rank: int, world: int, use_orig_params: bool):
    """AdamMini steps blocks that several ranks share, with clipping and a loss scale. The values
    are those of the CPU. Two runs, one of which keeps first moments in host memory, are equal to
    the bit. A step with an infinity changes nothing.
    """
    import simgpu

    ends, synced = [], []
    for offload in (None, optim.Host()):
        model = wrap("fsdpc", Model(torch.float32), use_orig_params=use_orig_params)
        mini = optim.AdamMini(
            [{"params": []}, {"params": list(model.parameters())}],
            lr=1e-2,
            block=lambda name, shape: BLOCKS[name[-1]],
            offload=offload,
        )
        assert mini._communicates() == (world > 1)
        for step, found in enumerate((0.0, 0.0, 1.0, 0.0)):
            mini.zero_grad()
            (4 * model(step)).backward()
            mini.grad_scale, mini.found_inf = torch.tensor(4.0), torch.tensor(found)
            before = [state_of(mini, p) for p in model.parameters()]
            with simgpu.counting() as cost, Unread():
                norm = mini.step_and_clip(8.0) if step else mini.step()
            synced.append(cost["host_syncs"])
            after = [state_of(mini, p) for p in model.parameters()]
            if found:
                assert before == after
            elif step:
                assert before != after and float(norm) > 8.0
        ends.append(full_parameters(model))
    assert synced == [0] * 8, synced
    alike = Model(torch.float32)
    mini = optim.AdamMini(alike.named_parameters(), lr=1e-2, block=lambda name, shape: BLOCKS[name])
    for step in (0, 1, 3):
        mini.zero_grad()
        alike(step).backward()
        mini.step_and_clip(8.0) if step else mini.step()
    for name, value in alike.named_parameters():
        assert torch.equal(ends[0][name], ends[1][name])
        torch.testing.assert_close(ends[0][name], value, rtol=1e-6, atol=1e-7)
    assert simgpu.take_reports() == []


BLOCKS = {"a": 131, "b": 1, "c": 5000, "d": 7}


def state_of(optimizer: optim.AdamMini, param: torch.Tensor) -> list[list[float]]:
    state = optimizer.state[param]
    tensors = [param, *([state["step"], state["exp_avg"], *state["means"]] if state else [])]
    return [tensor.detach().flatten().tolist() for tensor in tensors]


@ranks(1, env=ON_GPU)
def test_a_norm_that_fails_leaves_gradients_in_low_precision(rank: int, world: int):
    """With ``keep_low_precision_grads``, the norm is computed from float32 gradients; if the norm
    fails, the gradients are bfloat16 again.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    low = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    sharded = wrap("fsdpc", model, mixed_precision=low, use_orig_params=True)
    sharded(torch.ones(2, 4)).sum().backward()
    optimizer = optim.AdamW(sharded.parameters())

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the norm")

    for name, call in (
        ("fsdpc.optim._device", lambda: optimizer.step_and_clip(1.0)),
        ("fsdpc._clip.clip", lambda: sharded.clip_grad_norm_(1.0)),
    ):
        with mock.patch(f"{name}.norm_and_factor", fail), pytest.raises(MemoryError):
            call()
        assert {p.grad.dtype for p in sharded.parameters()} == {torch.bfloat16}, name


@ranks(2, env=ON_GPU)
def test_infinities_skip_a_step_on_the_gpu(rank: int, world: int):
    """The optimizer is called as ``GradScaler`` calls it: the scale and the flag for infinities are
    tensors that the host does not read.
    """
    scaled, plain = (
        Run(rank, "fp32", "FSDP", "fsdpc.optim"),
        Run(rank, "fp32", "FSDP", "fsdpc.optim"),
    )
    for run in (scaled, plain):
        run.step(0)
    scale, flag = torch.tensor(4.0), torch.tensor(0.0)
    for found in (1.0, 0.0):
        before = [p.detach().clone() for p in scaled.model.parameters()]
        for param in scaled.model.parameters():
            if param.grad is not None and found:
                param.grad.mul_(4.0)
        scaled.optimizer.grad_scale, scaled.optimizer.found_inf = scale, flag.fill_(found)
        with Unread():
            scaled.optimizer.step()
        after = [p.detach() for p in scaled.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == bool(found)
    plain.optimizer.step()
    for a, b in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    for state in scaled.optimizer.state.values():
        assert state["step"] == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_wait_that_is_left_out_is_found(precision: str):
    """The test leaves out one stream wait at a time, and the simulator must report a race.

    In at least one report, the optimizer's kernel is part of the race.
    """
    options = {"precision": precision, "door": "FSDP", "library": "fsdpc.optim"}
    found = run_ranks(leave_out_each_wait, 2, env=ON_GPU, **options)[0]
    assert found[0][1] == [] and len(found) > 6
    assert [which for which, reports in found[1:] if not reports] == []
    assert any("fsdpc_cuda_step" in text for _, reports in found for text in reports), found


@ranks(1, env=ON_GPU)
def test_what_a_gpu_does_not_have_is_refused(rank: int, world: int):
    run = Run(rank, "fp32", "FSDP")
    run.model(torch.ones(2, 16)).sum().backward()
    stored = optim.AdamW(run.model.parameters(), offload=optim.Disk("/tmp"))
    with pytest.raises(NotImplementedError, match=r"Disk.*is on a GPU.*CPUOffload"):
        stored.step()


@ranks(1, env=ON_GPU)
def test_activations_are_packed_by_kernels(rank: int, world: int):
    import simgpu

    torch.manual_seed(0)
    model = FSDP(torch.nn.Linear(64, 64), sharding_strategy=ShardingStrategy.NO_SHARD)
    grads = []
    for dtype in (None, "int8", "bf16"):
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with simgpu.counting() as cost:
            if dtype is None:
                model(x).square().sum().backward()
            else:
                with compress(model, dtype):
                    loss = model(x).square().sum()
                loss.backward()
                planned = bytes_per_element(dtype, 4) * 64 * 64  # 64 rows of 64 elements
                assert compression._Packed(torch.ones(64, 64), dtype).nbytes == planned
        grad = next(model.parameters()).grad
        assert grad is not None
        grads.append((cost["launches"], grad.clone()))
        model.zero_grad()
    assert grads[1][0] >= grads[0][0] + 2
    for _, grad in grads[1:]:
        limit = 0.05 * float(grads[0][1].abs().max())
        torch.testing.assert_close(grad, grads[0][1], rtol=0, atol=limit)
