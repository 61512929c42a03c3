"""Tests of gradients that are sent in fewer bits."""

from __future__ import annotations

import os

import env
import on_hosts
import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from test_quantized import through_codes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toys import PLACE

import fsdpc
from fsdpc import QuantizedPolicy, fully_shard
from fsdpc.sharded_grad_scaler import ShardedGradScaler

CODECS = {
    "ab": ["int8", "int4"],
    "abb": ["mxfp8", "int4_stochastic"],
    "abc": ["float8_e4m3", "float8_e5m2", "nvfp4"],
    "abba": ["int8", "int4_stochastic"],
}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(65, 100, bias=False), nn.Linear(100, 100, bias=False)

    def forward(self, x, both):
        x = self.one(x).tanh()
        return self.two(x) if both else x


class Parts(nn.Module):
    """A model with weights that are sent as codes and with weights that are sent without codes. The
    rows of one coded weight have two blocks of the largest block size.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.low = nn.Linear(300, 65), Pair(), nn.Linear(100, 8)
        self.scale = torch.ones(100)
        self.both, self.more = True, 0

    def forward(self, x):
        x = self.first(x).tanh()
        for _ in range(self.more):
            x = self.first(x.repeat(1, 5)[:, :300]).tanh()
        return self.low(self.second(x, self.both) * self.scale)


def shard(policy, model=None, **options):
    model = model or Parts()
    for part in (model.first, model.second):
        fully_shard(part, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def inputs(rank, step):
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, rank, step):
    (model(inputs(rank, step)) - 0.1).square().mean().backward()


def sum_of(grads, codec, hosts, lost):
    """Return the mean of the ranks' gradients of one parameter. Gradients are summed in each host,
    sent between hosts as codes, and added in the order of hosts; a host's own sum is not coded.
    ``lost`` holds the rounding errors of earlier sums, which are added before coding; it is None
    without error feedback.
    """
    sums = {}
    for host, grad in zip(hosts, grads, strict=True):
        sums[host] = sums[host] + grad if host in sums else grad.clone()
    pieces = []
    for owner in range(len(hosts)):
        parts = [s.chunk(len(hosts))[owner : owner + 1] for s in sums.values()]
        for host, part in zip(sums, parts, strict=True):
            if host != hosts[owner] and codec and part:
                before = 0 if lost is None else lost.get((host, owner), torch.zeros(()))
                value = part[0] + before * part[0].any(1, keepdim=True)
                decoded = through_codes(value, codec)
                if lost is not None:
                    lost[host, owner] = torch.where(part[0].any(1, True), value - decoded, before)
                parts[list(sums).index(host)] = (decoded,)
        total = sum(part[0] for part in parts) if parts[0] else None
        pieces += [] if total is None else [total * (1 / len(hosts))]
    return torch.cat(pieces)


def check(model, plain, codec, hosts, lost, before=()):
    """Check that the sharded gradients equal the expected gradients to the bit."""
    for i, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        own = torch.zeros_like(q) if q.grad is None else q.grad
        grads = [torch.empty_like(own) for _ in hosts]
        dist.all_gather(grads, own)
        coded = q.ndim == 2 and min(q.shape) >= 64
        kept = None if lost is None else lost.setdefault(i, {})
        expected = sum_of(grads, codec if coded else "", hosts, kept)
        expected = expected + before[i] if before else expected
        assert torch.equal(p.grad.full_tensor(), expected), (i, codec)


@pytest.mark.parametrize("hosts", CODECS)
def test_sums_are_those_of_decoded_pieces(hosts):
    """The programs accumulate gradients without sending them, add sums to existing gradients, and
    leave parameters unused; two runs agree to the bit. In each entry of CODECS, the second codec
    is tested with error feedback.
    """
    run_ranks(programs, len(hosts), env=on_hosts.counted_as(hosts), hosts=hosts)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_sums_of_gpus_are_those_of_a_wire(hosts):
    """Each GPU counts as a host, so that codes go from each GPU to all others. NCCL sums units
    without codes, here in the order of ranks.
    """
    run_ranks(programs, len(hosts), env=env.environment(SIMNCCL_RANK_ORDER="1"), hosts=hosts)


def programs(rank, world, hosts):
    for codec in CODECS[hosts]:
        program(rank, hosts, codec)


def program(rank, hosts, codec):
    lost = {} if codec == CODECS[hosts][1] else None
    policy = QuantizedPolicy(codec=None, reduce_codec=codec, error_feedback=lost is not None)
    model, plain = shard(policy), Parts()
    backward(model, rank, 0)
    backward(plain, rank, 0)
    check(model, plain, codec, hosts, lost)
    before = [p.grad.full_tensor() for p in model.parameters()]
    plain.zero_grad()
    model.set_requires_gradient_sync(False)
    model.both = plain.both = rank % 2 == 0
    for step in (1, 2):
        model.set_requires_gradient_sync(step == 2)
        backward(model, rank, step)
        backward(plain, rank, step)
    check(model, plain, codec, hosts, lost, before)
    again = shard(policy)
    backward(again, rank, 0)
    for p, value in zip(again.parameters(), before, strict=True):
        assert torch.equal(p.grad.full_tensor(), value)
    assert fsdpc.memory_report(model).equal


@ranks(2, env=on_hosts.counted_as("ab"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_frozen_weights_and_units_that_are_used_twice(rank, world, dtype):
    policy = QuantizedPolicy(reduce_codec="int8", reduce_dtype=dtype)
    model, plain = Parts().to(torch.float64), Parts().to(torch.float64)
    model.second.one.weight.requires_grad_(False)
    shard(policy, model)
    for _ in range(2):
        for each in (model, plain):
            each.more = 2
            each(inputs(rank, 0).double()).square().mean().backward()
        for q in plain.parameters():
            dist.all_reduce(q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if p.requires_grad:
                bound = 0.02 * q.grad.abs().max()
                assert (p.grad.full_tensor() - q.grad / world).abs().max() < bound
        model.second.one.weight.requires_grad_(True)
        model.zero_grad()
        plain.zero_grad()
    report = fsdpc.memory_report(model)
    line = next(line for line in report.lines if line.role == "reduce slots")
    assert line.planned == line.actual == fsdpc.memory_stats(model)["reduce_bytes"]


@ranks(2, env=on_hosts.counted_as("ab"))
def test_steps_with_what_is_not_finite_are_skipped(rank, world):
    for codec in ("int8", "mxfp8", "int4_stochastic"):
        skip(rank, codec)


def skip(rank, codec):
    model = shard(QuantizedPolicy(reduce_codec=codec))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = ShardedGradScaler(PLACE.type, init_scale=8.0)
    before = [p.full_tensor() for p in model.parameters()]
    if rank == 1:
        model.scale[3] = float("inf")
    scaler.scale(model(inputs(rank, 0)).sum()).backward()
    scaler.unscale_(optimizer)
    grad = model.second.two.weight.grad.full_tensor()
    assert grad[3].isnan().all() and grad.isfinite().all(1).sum() == 99
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value)


@ranks(2, env=on_hosts.counted_as("ab"))
def test_bytes_and_memory(rank, world):
    check_bytes_and_memory(rank, world)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(2, env=env.environment())
def test_bytes_and_memory_over_nccl(rank, world):
    check_bytes_and_memory(rank, world)


def check_bytes_and_memory(rank, world):
    """Check the bytes of gathers and gradients: memory equals the plan to the byte, and the trace
    has the bytes that were sent.
    """
    policy = QuantizedPolicy(reduce_codec="int4")
    model = nn.Sequential(shard(policy, reshard_after_forward=False))
    fully_shard(model, mp_policy=policy)
    loss = model(inputs(rank, 0)).sum()
    before = fsdpc.memory_stats(model)["sent_bytes"]
    loss.backward()
    sent = fsdpc.memory_stats(model)["sent_bytes"] - before
    coded, plain = 65 * 300 + 100 * 65 + 100 * 100, 65 + 8 * 100 + 8
    assert 1.0 < before / (coded * 8.2 + plain * 32) * 8 * world < 1.05
    assert 1.0 < sent / (coded * 4.3 + plain * 32) * 8 * world < 1.05
    tree = model._get_fsdp_state()._tree
    found = [event["bytes"] for event in tree.trace() if event["op"] == "send"]
    assert sum(found) == before + sent
    report = fsdpc.memory_report(model)
    assert report.equal, report


class Scaled(nn.Module):
    """A module for which the gradient of the weight is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 300))

    def forward(self, x):
        return (self.weight * x).sum()


@ranks(2, env=on_hosts.counted_as("ab"))
def test_error_feedback_sends_what_rounding_lost(rank, world, tmp_path):
    """int4 rounds small values to 0 in each step; with error feedback, their sum is sent in later
    steps. A gradient that is not finite does not spoil the kept errors, and loading a state dict
    drops the kept errors.
    """
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(rank))
    x[:, 0] = 40.0
    both = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(both, x)
    steps, off = 25, {}
    for kept in (False, True):
        policy = QuantizedPolicy(codec=None, reduce_codec="int4", error_feedback=kept)
        model = fully_shard(Scaled(), mp_policy=policy)
        found = []
        for step in range(steps + 1):
            skipped = step == steps - 1
            bad = torch.where(torch.rand_like(x) < 0.01, torch.inf, x) if skipped else x
            model(bad).backward()
            found += [] if skipped else [model.weight.grad.full_tensor()]
            model.zero_grad()
        off[kept] = (torch.stack(found).mean(0) - sum(both) / world).abs()[:, 1:].max()
        assert fsdpc.memory_report(model).equal
    assert off[False] > 1 and off[True] < 4 * off[False] / steps
    model.load_state_dict(model.state_dict())
    model(x).backward()
    assert torch.equal(model.weight.grad.full_tensor(), found[0])
    inner = Scaled()
    outer = fully_shard(nn.Sequential(fully_shard(inner, mp_policy=policy)), mp_policy=policy)
    fsdpc.checkpoint.save(tmp_path / "saved", outer)
    lost = []
    for load in (
        lambda: None,
        lambda: inner.load_state_dict(inner.state_dict()),  # not the root
        lambda: fsdpc.checkpoint.load_pretrained(outer, tmp_path / "saved"),
        lambda: None,
    ):
        load()
        outer.zero_grad()
        outer(x).backward()
        lost.append(torch.equal(inner.weight.grad.full_tensor(), found[0]))
    assert lost == [True, True, True, False]


@ranks(2, env=on_hosts.counted_as("ab"))
@pytest.mark.parametrize("frozen_first", [False, True])
def test_error_feedback_and_freezing(rank, world, frozen_first):
    """A parameter that is frozen for a while keeps its rounding errors. Unfreezing a parameter that
    was never sent drops the errors of the other parameters; from then on, this parameter is sent
    with feedback.
    """
    policy = QuantizedPolicy(codec=None, reduce_codec="int4", error_feedback=True)

    def grads(steps):
        model = Parts()
        model.first.weight.requires_grad_(not frozen_first)
        model = shard(policy, model)
        for step, trained in steps:
            model.zero_grad()
            model.first.weight.requires_grad_(trained)
            backward(model, rank, step)
        return [p.grad.full_tensor() for p in model.parameters()]

    def equal(a, b):
        return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]

    found = grads([(0, not frozen_first), (1, False), (2, True)])
    fresh = grads([(2, True)])
    if frozen_first:
        assert all(equal(found, fresh))
        assert not equal(grads([(0, True), (2, True)]), fresh)[0]
    else:
        assert equal(found, grads([(0, True), (2, True)]))[0]
        assert not equal(found, fresh)[0]


def test_error_feedback_needs_codes_and_one_scale():
    with pytest.raises(ValueError, match="error_feedback keeps what a reduce_codec loses"):
        QuantizedPolicy(error_feedback=True)
    with pytest.raises(ValueError, match="float16's loss scale"):
        QuantizedPolicy(torch.float16, reduce_codec="int8", error_feedback=True)


def gradients(rank, policy, **options):
    model = shard(policy, **options)
    backward(model, rank, 0)
    return [p.grad.full_tensor() for p in model.parameters()]


@ranks(4, env=on_hosts.counted_as("aabb"))
@pytest.mark.parametrize("way", ["replicas", "c10d"])
def test_where_nothing_is_sent_to_a_rank_that_sums_nothing_is_coded(rank, world, way):
    options = {}
    if way == "replicas":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    else:
        os.environ["FSDPC_COLLECTIVES"] = "c10d"
    coded = gradients(rank, QuantizedPolicy(codec=None, reduce_codec="int4"), **options)
    plain = gradients(rank, QuantizedPolicy(codec=None), **options)
    for a, b in zip(coded, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(4, env=env.environment(SIMNCCL_RANK_ORDER="1"))
def test_replicas_of_gpus_sum_what_is_decoded(rank, world):
    """Gradients are coded between the two shards of a replica, but not between the replicas."""
    policy = QuantizedPolicy(codec=None, reduce_codec="int4", reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    model, plain = shard(policy, mesh=mesh), Parts()
    backward(model, rank, 0)
    backward(plain, rank, 0)
    for name in ("first", "second.two"):
        own = plain.get_submodule(name).weight.grad.bfloat16().float()
        grads = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(grads, own)
        sums = [2 * sum_of(grads[r : r + 2], "int4", "ab", None) for r in (0, 2)]
        found = model.get_submodule(name).weight.grad.full_tensor()
        assert torch.equal(found, (sums[0] + sums[1]) * 0.25)
    assert fsdpc.memory_report(model).equal
    sent = [e for e in model._get_fsdp_state()._tree.trace() if e["op"] == "send"]
    # A unit's last send is the one between replicas.
    last = {event["unit"]: event["bytes"] for event in sent}
    stats = fsdpc.memory_stats(model)
    assert sum(last.values()) == stats["master_bytes"]
    assert sum(event["bytes"] for event in sent) == stats["sent_bytes"]


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(2, env=env.environment(FSDPC_COLLECTIVES="shm"))
def test_gpus_that_stage_through_the_host_refuse(rank, world):
    with pytest.raises(NotImplementedError, match="over NCCL only, not over 'shm': leave red"):
        fully_shard(nn.Linear(300, 64), mp_policy=QuantizedPolicy(reduce_codec="int8"))


@ranks(2)
def test_ranks_must_have_one_codec(rank, world):
    with pytest.raises(fsdpc.MismatchError, match="gradients sent as int"):
        policy = QuantizedPolicy(reduce_codec=["int8", "int4"][rank])
        fully_shard(nn.Linear(300, 64), mp_policy=policy)


def test_a_codec_must_exist():
    with pytest.raises(ValueError, match="unknown reduce_codec 'nf4': choose None or one of int8"):
        QuantizedPolicy(reduce_codec="nf4")
