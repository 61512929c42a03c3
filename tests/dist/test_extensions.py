"""Tests of parameters whose class has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

fsdpc's ``fully_shard`` is compared with torch's.
"""

from __future__ import annotations

import pytest
import torch
from extensions import Coded, CodedEven, Padded, Pair, Pair5, patch
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fsdpc
import fsdpc.checkpoint
import fsdpc.optim
from fsdpc import fully_shard

BOTH = (torch_fully_shard, fully_shard)


def model_of(kind, width=8, bias=False):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 2 * width, bias), nn.ReLU(), nn.Linear(2 * width, width, bias)
            )
            for _ in range(2)
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            made = kind(weight, weight.clone()) if issubclass(kind, Pair) else kind(weight)
            module.weight = nn.Parameter(made)
    return model


def shard(apply, model, **options):
    for block in model:
        apply(block, **options)
    apply(model, **options)
    return model


def plain(tensor):
    """Return the local values of a DTensor as a tensor of class torch.Tensor."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    return torch.empty(local.shape, dtype=local.dtype).copy_(local)


def train(model, rank, steps=4, width=8):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(rank + 1)
    for step in range(steps):
        loss = model(torch.randn(3, width)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(torch.empty(()).copy_(loss.detach()))
    return torch.stack(losses), [plain(p) for p in model.parameters()]


def assert_equal_runs(program):
    (losses, params), (ours, own) = (program(apply) for apply in BOTH)
    torch.testing.assert_close(ours, losses)
    for mine, theirs in zip(own, params, strict=True):
        torch.testing.assert_close(mine, theirs)


@ranks(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Pair, Pair5, Coded, Padded])
def test_training_is_torchs(rank, world, kind, reshard):
    uneven = kind is Padded and world == 3  # torch refuses uneven tensors of the other kinds
    width = 6 if world == 3 and not uneven else 8
    assert_equal_runs(
        lambda apply: train(
            shard(apply, model_of(kind, width), reshard_after_forward=reshard), rank, width=width
        )
    )


@ranks(1)
def test_one_rank(rank, world):
    """The reference is an unsharded model, because torch on one rank passes on only the first of
    several all-gather inputs.
    """
    model = model_of(Pair)
    losses, params = train(model, rank)
    ours, own = train(shard(fully_shard, model_of(Pair)), rank)
    assert torch.equal(ours, losses)
    assert all(map(torch.equal, own, params))


@ranks(2)
def test_biases_and_norms_travel_along(rank, world):
    def program(apply):
        model = model_of(Coded, bias=True)
        model.append(nn.LayerNorm(8))
        return train(shard(apply, model), rank)

    assert_equal_runs(program)


@ranks(2)
def test_meta_models_in_low_precision(rank, world):
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with torch.device("meta"):
        model = model_of(Pair)
    shard(fully_shard, model, mp_policy=low).to_empty(device="cpu")
    for param in model.parameters():
        assert type(param._local_tensor) is Pair
        nn.init.trunc_normal_(param)
    before = [plain(p) for p in model.parameters()]
    losses, after = train(model, rank)
    assert losses.isfinite().all()
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


@ranks(2)
@pytest.mark.parametrize("replicas", [False, True])
def test_patched_tensors(rank, world, replicas):
    """The all-gather functions are attributes of a tensor object, not methods of its class,
    and are set after ``fully_shard``.
    """

    def program(apply):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
        shard(apply, model, mesh=mesh if replicas else mesh["shard"])
        seen = []
        for name, param in model.named_parameters():
            if "weight" in name:
                patch(param._local_tensor, seen)
        result = train(model, rank)
        assert all(mesh.ndim == 1 and mesh.size() == 2 for mesh in seen)
        assert seen
        return result

    assert_equal_runs(program)


@ranks(2)
def test_gathers_are_counted_and_their_memory_is_given_back(rank, world):
    for reshard, gathers in ((True, 2), (False, 1)):
        model = shard(fully_shard, model_of(Coded), reshard_after_forward=reshard)
        for step in range(3):
            Coded.calls.update(pre=0, first=0, out=0)
            model(torch.ones(2, 8)).sum().backward()
            assert Coded.calls["pre"] == 4 * gathers
            assert Coded.calls["first"] == (4 if step == 0 else 0)
        units = [state._unit for state in fsdpc._fsdp2.state.states_below(model) if state._unit]
        for unit in units:
            assert all(begin == end for g in unit.gathered for begin, end in g.ranges())
            assert unit.flat.layout()["full_bytes"] and not unit.flat.readable
        assert fsdpc.memory_stats(model)["gather_slots"] == 1  # the slot of the empty root


@ranks(2)
def test_gradients_wait_without_sync(rank, world):
    def program(apply):
        model = shard(apply, model_of(Coded))
        torch.manual_seed(rank)
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            model(torch.randn(2, 8)).sum().backward()
        return torch.zeros(()), [plain(p.grad) for p in model.parameters()]

    assert_equal_runs(program)


@ranks(2)
def test_unshard_and_reshard(rank, world):
    model = shard(fully_shard, model_of(Pair))
    sharded = model[0][0].weight
    assert type(sharded) is DTensor and type(sharded._local_tensor) is Pair
    model[0].unshard()
    whole = model[0][0].weight
    assert type(whole) is Pair and whole.shape == (16, 8)
    torch.testing.assert_close(whole.a.detach(), model_of(Pair)[0][0].weight.a.detach())
    model[0].reshard()
    assert model[0][0].weight is sharded
    assert whole.a.untyped_storage().size() == 0


@ranks(2)
def test_outputs_that_are_weights_stay_readable(rank, world):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    layer = Reads(4, 4, bias=False)
    expected = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Coded(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=True)
    _, weight = layer(torch.ones(1, 4))
    torch.testing.assert_close(weight.detach(), expected, atol=0.02, rtol=0)


@ranks(2)
def test_states(rank, world):
    model = shard(fully_shard, model_of(Pair))
    train(model, rank)
    state = model.state_dict()
    assert all(type(value._local_tensor) is Pair for value in state.values())
    saved = [plain(value) for value in state.values()]
    other = shard(fully_shard, model_of(Pair))
    other.load_state_dict(state)
    for value, param in zip(saved, other.parameters(), strict=True):
        assert torch.equal(plain(param), value)
    x = torch.ones(2, 8)
    assert torch.equal(plain(other(x)), plain(model(x)))


# --- errors --------------------------------------------------------------------------------------


class Half(CodedEven):
    fsdp_post_all_gather = property()


class Strange(CodedEven):
    def fsdp_pre_all_gather(self, mesh, extra):
        return (self._data,), None


class Grows(CodedEven):
    def fsdp_pre_all_gather(self, mesh):
        self.more = getattr(self, "more", 0) + 1
        return (torch.zeros(self.more),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return (torch.zeros(16, 8), ()) if out is None else None


class Raises(CodedEven):
    def fsdp_pre_all_gather(self, mesh):
        if mesh.get_local_rank() == 1:
            raise KeyError("no scale")
        return super().fsdp_pre_all_gather(mesh)


@ranks(2)
def test_errors(rank, world):
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        fully_shard(model_of(Half))
    model = shard(fully_shard, model_of(Strange))
    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather"):
        model(torch.ones(1, 8))
    model = shard(fully_shard, model_of(Grows))
    with pytest.raises(RuntimeError, match="its buffers stay, so fsdp_pre_all_gather must"):
        model(torch.ones(1, 8)).sum().backward()
    model = shard(fully_shard, model_of(Raises))
    expected = KeyError if rank == 1 else fsdpc.MismatchError
    with pytest.raises(expected, match="no scale"):
        model(torch.ones(1, 8))
    layer = nn.Linear(4, 4)
    patch(layer.weight, [])
    with pytest.raises(NotImplementedError, match="set it on param._local_tensor after"):
        fully_shard(layer)


@ranks(2)
def test_what_knows_only_plain_memory_refuses(rank, world, tmp_path):
    model = shard(fully_shard, model_of(Coded))
    for kind in (fsdpc.optim.AdamW, fsdpc.optim.Muon):
        with pytest.raises(TypeError, match=r"is a Coded: use an optimizer of torch\.optim"):
            kind(model.parameters(), lr=0.1)
    with pytest.raises(fsdpc.checkpoint.CheckpointError, match="whose memory only its own"):
        fsdpc.checkpoint.save(tmp_path / "refused", model)


@ranks(3)
def test_sizes_that_differ_between_ranks(rank, world):
    """8 rows do not divide evenly over 3 ranks, and the gather of CodedEven does not pad."""
    model = shard(fully_shard, model_of(CodedEven))
    with pytest.raises(fsdpc.MismatchError, match=r"parameter .*weight sends"):
        model(torch.ones(1, 8))


@ranks(2)
def test_inputs_of_another_kind(rank, world):
    """A unit of plain parameters that follows a unit with ``Pair`` outputs gets gradients of class
    ``Pair``, which is an error.
    """
    model = model_of(Pair)
    model.append(nn.Linear(8, 8))
    shard(fully_shard, model)
    with pytest.raises(fsdpc.StateError, match=r"of unit .* is a Pair, which only its own code"):
        model(torch.ones(1, 8)).sum().backward()


@ranks(2)
def test_weights_changed_before_backward(rank, world):
    model = shard(fully_shard, model_of(Coded), reshard_after_forward=True)
    loss = model(torch.ones(1, 8)).sum()
    with torch.no_grad():
        model[0][0].weight.add_(1)
    with pytest.raises(fsdpc.StateError, match="between their forward and this backward"):
        loss.backward()
