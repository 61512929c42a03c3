"""Tests of ShardedGradScaler: ranks agree on infinities,
and results equal those of a local scaler on an unsharded model.
"""

from __future__ import annotations

import importlib
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks, shorten_deadlines
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from toys import (
    Precision,
    Reference,
    check_equal,
    full_parameters,
    loss_of,
    tokens,
    toy,
    wrap_blocks,
)

FP16 = Precision("fp16", param=torch.float16)
BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


def scaler_of(engine="fsdpc", **options):
    if engine != "fsdpc":
        options["device"] = "cpu"
    return importlib.import_module(f"{engine}.sharded_grad_scaler").ShardedGradScaler(**options)


def test_names_and_defaults_are_torchs():
    from fsdpc.sharded_grad_scaler import ShardedGradScaler

    ours, theirs = (inspect.signature(kind).parameters for kind in (ShardedGradScaler, TorchScaler))
    assert list(ours) == list(theirs)
    for name in ours:
        if name not in ("device", "process_group"):
            assert ours[name].default == theirs[name].default, name
    assert issubclass(ShardedGradScaler, torch.amp.GradScaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ShardedGradScaler().is_enabled(), "the default device is there"
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="Disabling"):
            assert not ShardedGradScaler("cuda").is_enabled()


def test_a_disabled_scaler_does_nothing():
    from fsdpc.sharded_grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler(enabled=False)
    x = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0)
    assert scaler.scale(x) is x
    x.grad = torch.full((2,), float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0 and not bool(x.isfinite().any())


def test_without_process_groups_it_is_local():
    scaler = scaler_of(init_scale=4.0)
    x = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([x], lr=1.0)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(x.detach(), torch.zeros(2))


GRADIENTS = {
    "finite": (torch.ones(3), False, True),
    "inf": (torch.tensor([1.0, float("inf")]), True, False),
    "nan": (torch.tensor([1.0, float("nan")]), True, False),
    "half": (torch.full((2,), 6e4, dtype=torch.float16), False, True),
    "squares_overflow": (torch.full((2,), 1e200, dtype=torch.float64), False, False),
    "not_contiguous": (torch.ones(4, 4)[:, ::2], False, False),
    "sparse": (torch.ones(3, 2).to_sparse(), False, False),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_step_skips_for_infinities_and_only_reads_finite_gradients(kind, monkeypatch):
    """fsdpc first sums the gradients. If the sums show that all gradients are finite, fsdpc does
    not call torch's check, which writes every gradient; otherwise it calls torch's check.
    """
    grad, skips, only_read = GRADIENTS[kind]
    param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad.clone() if kind == "sparse" else grad
    found, checks = [], []
    by_torch = torch.amp.GradScaler._unscale_grads_

    def check(*args):
        checks.append(kind)
        return by_torch(*args)

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", check)

    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True  # the scaler only checks the gradients, without dividing

        def step(self):
            found.append(float(self.found_inf))

    optimizer = Fused([param], lr=1.0)
    scaler = scaler_of(device="cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert found == [float(skips)] and checks == [kind] * (not only_read)


@ranks(1, 2)
@BOTH
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
def test_training_equals_an_unsharded_model(rank, world, engine, use_orig_params, strategy):
    """With fp16 compute and a scale that grows and falls, losses, scales, skipped steps and
    parameters equal those of an unsharded model.
    """
    options = {"init_scale": 2.0**13, "growth_interval": 2}
    model = wrap_blocks(
        engine,
        toy(),
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
        **FP16.options(),
    )
    reference = Reference(toy(), FP16)
    scaler, plain = scaler_of(engine, **options), torch.amp.GradScaler("cpu", **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    expected = torch.optim.Adam(reference.master.parameters(), lr=0.01, eps=1e-3)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        expected.zero_grad()
        batch = tokens(rank, step)
        scaler.scale(loss_of(model, batch)).backward()
        reference.loss_of = lambda m, b: plain.scale(loss_of(m, b))
        reference.backward(batch)
        scaler.step(optimizer)
        plain.step(expected)
        scaler.update()
        plain.update()
        assert scaler.get_scale() == plain.get_scale(), f"step {step}"
        scales.append(scaler.get_scale())
        check_equal(full_parameters(model), reference.parameters(), f"step {step}", rtol=1e-2)
    assert max(scales) > 2.0**13


def skip_together(rank, world, engine, fused, use_orig_params):
    model = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = scaler_of(engine, init_scale=256.0)
    before = full_parameters(model)
    scaler.scale(loss_of(model, tokens(rank, 0))).backward()
    if rank == 1:
        grad = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
        grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0, "every rank lowers the scale"
    check_equal(full_parameters(model), before, "skipped")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, tokens(rank, 1))).backward()
    scaler.step(optimizer)
    scaler.update()
    after = full_parameters(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(bool(value.isfinite().all()) for value in after.values())


@ranks(2, 3)
@BOTH
def test_an_infinity_on_one_rank_skips_the_step_on_all(rank, world, engine, use_orig_params):
    skip_together(rank, world, engine, False, use_orig_params)


@ranks(2)
@BOTH
def test_a_fused_optimizer_skips_with_the_others(rank, world, use_orig_params):
    skip_together(rank, world, "fsdpc", True, use_orig_params)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
def test_over_a_wire(rank, world):
    skip_together(rank, world, "fsdpc", False, True)


@ranks(3)
def test_a_rank_without_any_gradient(rank, world, engine):
    """The only parameter has fewer elements than there are ranks."""
    model = wrap_blocks(engine, nn.Linear(1, 1, bias=False), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = scaler_of(engine, init_scale=8.0)
    before = full_parameters(model)["weight"]
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    check_equal(full_parameters(model), {"weight": before - 1.0}, "stepped")


@ranks(2)
def test_unscaled_before_clipping_and_only_once(rank, world, engine):
    model = wrap_blocks(engine, toy(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = scaler_of(engine, init_scale=1024.0)
    loss = loss_of(model, tokens(0, 0))
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.unscale_(optimizer)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    plain = toy()
    loss_of(plain, tokens(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-5, atol=0)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


@ranks(2)
@BOTH
def test_gradients_kept_in_half_precision(rank, world, engine, use_orig_params):
    """With keep_low_precision_grads, fp16 gradients are unscaled in place and can accumulate."""
    model = wrap_blocks(
        engine,
        toy(),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True),
    )
    scaler = scaler_of(engine, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reference = Reference(toy(), FP16)
    for micro in range(2):
        scaler.scale(loss_of(model, tokens(rank, 0, micro))).backward()
        reference.backward(tokens(rank, 0, micro))
    scaler.unscale_(optimizer)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(grad.dtype == torch.float16 for grad in grads)
    total = model.clip_grad_norm_(1e9)
    expected = nn.utils.clip_grad_norm_(reference.master.parameters(), 1e9)
    torch.testing.assert_close(total.float(), expected, rtol=1e-2, atol=0)


@ranks(4)
def test_ranks_of_one_group_agree_and_others_do_not_matter(rank, world, engine):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    model = wrap_blocks(engine, toy(), process_group=mine)
    scaler = scaler_of(engine, init_scale=256.0, process_group=mine)
    scaler.scale(loss_of(model, tokens(rank, 0))).backward()
    if rank == 3:
        model.params[0].grad[0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (256.0 if rank < 2 else 128.0)


def one_does_not_step(rank, world):
    model = wrap_blocks("fsdpc", toy())
    scaler = scaler_of()
    scaler.scale(loss_of(model, tokens(rank, 0))).backward()
    shorten_deadlines(here=rank == 0)
    if rank == 0:
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        dist.barrier()  # wait until rank 0 has ended


def test_a_rank_that_does_not_come_is_named():
    outcomes = run_ranks(one_does_not_step, 2, faults=True)
    assert not outcomes[0].returned
    assert "ShardedGradScaler" in outcomes[0].error and "rank 1" in outcomes[0].error


@ranks(2)
def test_flags_on_a_device_need_no_host_sync(rank, world):
    """The CPU runs the code that is meant for GPUs; torch must not read the value of a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdpc.sharded_grad_scaler import _agree_on_device

    class Unread(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in func.name()
            return func(*args, **(kwargs or {}))

    for bad in range(world + 1):
        found = [torch.zeros(()), torch.tensor(float(rank == bad))]
        with Unread():
            _agree_on_device(dist.group.WORLD, found, torch.device("cpu"))
        assert [float(value) for value in found] == [float(bad < world)] * 2
