"""Losses, gradients and parameters of training steps, under every strategy and option."""

from __future__ import annotations

import torch
import torch.distributed as dist
from outcome import any_of, raises, wrong
from suite import BOTH, HYBRIDS, SHARDED, Cases, S
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from toys import Block, Reference, difference, loss_of, toy

case = Cases(__name__, __file__)


@case(over={"strategy": SHARDED, "orig": BOTH})
def training(lib, strategy, orig):
    return lib.train(lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig))


@case(world=3, over={"strategy": SHARDED})
def training_on_three_ranks(lib, strategy):
    return lib.train(lib.wrap_blocks(toy(), sharding_strategy=strategy))


@case(world=4, over={"strategy": HYBRIDS, "orig": BOTH})
def training_with_replicas(lib, strategy, orig):
    mesh = init_device_mesh("cpu", (2, 2))
    return lib.train(
        lib.wrap_blocks(toy(), sharding_strategy=strategy, device_mesh=mesh, use_orig_params=orig)
    )


@case(over={"prefetch": [None, *BackwardPrefetch], "forward": BOTH})
def prefetching_changes_no_result(lib, prefetch, forward):
    return lib.train(lib.wrap_blocks(toy(), backward_prefetch=prefetch, forward_prefetch=forward))


@case()
def limiting_gathers_changes_no_result(lib):
    return lib.train(lib.wrap_blocks(toy(blocks=4), limit_all_gathers=False))


@case(over={"dtype": [torch.float64, torch.bfloat16, torch.float16]}, rtol=2e-2)
def models_in_other_dtypes(lib, dtype):
    model = lib.wrap_blocks(toy(dtype=dtype))
    loss_of(model, lib.batch()).backward()
    gradients = lib.gradients(model)
    assert {g.dtype for g in gradients.values()} == {dtype}
    return gradients


@case()
def gradients_are_means_over_ranks(lib):
    model = lib.wrap(nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), 1.0 + lib.rank)).sum().backward()
    assert lib.gradients(model)["weight"].tolist() == [[1.5, 1.5]]


@case(over={"orig": BOTH})
def no_gradient_before_backward(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    model(lib.batch())
    return all(p.grad is None for p in model.parameters())


@case(over={"strategy": SHARDED})
def two_forwards_then_one_backward(lib, strategy):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy)
    (loss_of(model, lib.batch(0)) + loss_of(model, lib.batch(1))).backward()
    return lib.gradients(model)


@case(torch=any_of(raises(RuntimeError, "storage"), wrong("gradients")), over={"strategy": SHARDED})
def two_forwards_then_two_backwards(lib, strategy):
    reference = Reference(toy())
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy)
    losses = [loss_of(model, lib.batch(step)) for step in range(2)]
    for step, loss in enumerate(losses):
        loss.backward()
        reference.backward(lib.batch(step))
    lib.check_gradients(model, reference)


@case(
    torch=raises(RuntimeError, "storage"),
    fsdpc_does="adds the same gradient twice",
    over={"orig": BOTH},
)
def backward_twice_through_one_graph(lib, orig):
    """backward(retain_graph=True), then backward again"""
    model, reference = lib.wrap_blocks(toy(), use_orig_params=orig), Reference(toy())
    loss = loss_of(model, lib.batch())
    loss.backward(retain_graph=True)
    loss.backward()
    reference.backward(lib.batch(), times=2)
    lib.check_gradients(model, reference)


@case(over={"name": ["SGD", "Adam", "Adagrad", "RMSprop"], "orig": BOTH})
def optimizers(lib, name, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, weight_decay=0.01)
    return lib.full_after(model, optimizer=optimizer)


@case()
def an_optimizer_made_before_wrapping(lib):
    """With use_orig_params the Parameter objects stay the same."""
    model = toy()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = lib.wrap_blocks(model, use_orig_params=True)
    assert all(p is q for p, q in zip(before.values(), model.parameters(), strict=True))
    loss_of(model, lib.batch()).backward()
    optimizer.step()
    return lib.full(model)


@case(over={"orig": BOTH})
def evaluation(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig).eval()
    with torch.no_grad():
        return model(lib.batch()), model(lib.batch(1))


@case()
def inference_mode(lib):
    model = lib.wrap_blocks(toy())
    with torch.inference_mode():
        return model(lib.batch()).clone()


@case(over={"orig": BOTH})
def tied_weights_in_one_unit(lib, orig):
    model = toy(width=6, vocabulary=13)
    model.head.weight = model.embed.weight
    model = lib.wrap_blocks(model, use_orig_params=orig)
    with lib.FSDP.summon_full_params(model):
        assert model.head.weight is model.embed.weight
    return lib.train(model)


@case(over={"orig": BOTH})
def a_module_used_twice_in_a_forward(lib, orig):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(6)
            self.head = nn.Linear(6, 1)

        def forward(self, x):
            return self.head(self.block(self.block(x)))

    model = lib.wrap_blocks(Twice(), use_orig_params=orig)
    model(torch.full((2, 6), 0.1 * (1 + lib.rank))).sum().backward()
    return lib.gradients(model)


class Branches(nn.Module):
    """A module with two branches. The caller chooses the branch that forward uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x, which):
        return self.head((self.first, self.second)[which](x))


@case(over={"orig": BOTH})
def a_unit_that_no_rank_uses(lib, orig):
    model = lib.wrap_blocks(Branches(), nn.Linear, use_orig_params=orig)
    model(torch.ones(1, 3), 0).sum().backward()
    assert all(p.grad is None for p in model.second.parameters())
    return lib.gradients(model)


@case(torch=wrong("decay"), fsdpc_does="leaves it without gradient")
def weight_decay_and_a_parameter_that_no_rank_used(lib):
    """Weight decay must not change a parameter that no rank used."""
    model = lib.wrap(Branches(), use_orig_params=True)
    before = lib.full(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.ones(1, 3), 0).sum().backward()
    optimizer.step()
    after = lib.full(model)
    assert torch.equal(after["second.weight"], before["second.weight"]), "weight decay moved it"


@case(torch=wrong("gradients"), fsdpc_does="equals the unsharded model", alone=25)
def ranks_that_use_different_units(lib):
    """Ranks choose different experts of a mixture of experts."""
    torch.manual_seed(3)
    model = Branches()
    reference = Reference(model, loss_of=lambda m, x: m(x, lib.rank).sum())
    model = lib.wrap_blocks(model, nn.Linear)
    x = torch.full((1, 3), 1.0 + lib.rank)
    model(x, lib.rank).sum().backward()
    reference.backward(x)
    got = lib.gradients(model)
    text = difference(got, reference.gradients(), rtol=1e-5)
    assert not text, f"gradients: {text}"


@case(torch=raises(RuntimeError), fsdpc_does="trains; the shards are on the CPU anyway")
def offloading_parameters(lib):
    """CPUOffload(offload_params=True)"""
    model = lib.wrap_blocks(toy(), cpu_offload=CPUOffload(offload_params=True))
    reference = lib.train(lib.wrap_blocks(toy()))
    text = difference(lib.train(model)["parameters"], reference["parameters"])
    assert not text, text


@case(over={"orig": BOTH})
def frozen_units(lib, orig):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model = lib.wrap_blocks(model, use_orig_params=orig)
    loss_of(model, lib.batch()).backward()
    assert all(p.grad is None for p in model.blocks[0].parameters())
    return lib.gradients(model)


@case(over={"orig": BOTH})
def a_frozen_unit_before_everything_trainable(lib, orig):
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2))
    model = lib.wrap_blocks(model, nn.Linear, use_orig_params=orig)
    model(torch.full((2, 3), 1.0 + lib.rank)).sum().backward()
    return lib.gradients(model), [p.requires_grad for p in model.parameters()]


@case()
def a_loss_of_two_outputs(lib):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.a, self.b = Block(6), nn.Linear(6, 1), nn.Linear(6, 2)

        def forward(self, x):
            x = self.block(x)
            return self.a(x), {"b": [self.b(x)]}

    model = lib.wrap_blocks(Heads(), Block, nn.Linear)
    a, rest = model(torch.full((2, 6), 0.2 + lib.rank))
    (a.sum() + rest["b"][0].square().sum()).backward()
    return lib.gradients(model)


@case()
def an_output_that_the_loss_does_not_use(lib):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = lib.wrap_blocks(Heads(), nn.Linear)
    a, _ = model(torch.full((2, 6), 0.2 + lib.rank))
    a.sum().backward()
    return lib.gradients(model), [p.grad is None for p in model.b.parameters()]


@case()
def an_exception_in_forward_comes_through(lib):
    class Faulty(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            raise KeyError("mine")

    return lib.refuses(KeyError, lib.wrap(Faulty()), torch.ones(2), words="mine")


@case()
def a_step_after_an_exception_in_forward(lib):
    model = lib.wrap_blocks(toy())
    down, model.blocks[1].module.down = model.blocks[1].module.down, None
    lib.refuses(TypeError, model, lib.batch())
    model.blocks[1].module.down = down
    return lib.train(model)


@case(over={"strategy": SHARDED})
def equal_to_an_unsharded_model(lib, strategy):
    """Losses and gradients of both libraries equal those of an unsharded model."""
    reference = Reference(toy())
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy)
    loss = loss_of(model, lib.batch())
    loss.backward()
    expected = reference.backward(lib.batch())
    assert torch.allclose(loss, expected)
    lib.check_gradients(model, reference)


@case(over={"dtype": [torch.bfloat16, torch.float16]}, rtol=2e-2)
def reducing_in_a_narrow_dtype(lib, dtype):
    return lib.train(lib.wrap_blocks(toy(), mixed_precision=MixedPrecision(reduce_dtype=dtype)))


@case()
def ranks_hold_equal_losses_for_equal_batches(lib):
    model = lib.wrap_blocks(toy())
    batch = torch.arange(10).reshape(2, 5)
    loss = loss_of(model, batch).detach()
    everyone = [torch.empty(()) for _ in range(lib.world)]
    dist.all_gather(everyone, loss)
    assert all(torch.equal(other, loss) for other in everyone)
    return loss


# --- faults of torch's fully_shard, under the class ----------------------------------------------


@case(
    torch=raises(AssertionError, "`grad_fn` is needed"),
    fsdpc_does="trains",
    over={"orig": BOTH},
)
def training_after_a_first_forward_in_inference_mode(lib, orig):
    """the first forward under torch.inference_mode, then training"""
    model, reference = lib.wrap_blocks(toy(), use_orig_params=orig), Reference(toy())
    with torch.inference_mode():
        model(lib.batch())
    loss_of(model, lib.batch()).backward()
    reference.backward(lib.batch())
    lib.check_gradients(model, reference)


@case(over={"orig": BOTH})
def a_step_after_a_validation_forward(lib, orig):
    """a validation forward between backward and optimizer.step()"""
    model = lib.wrap_blocks(toy(), use_orig_params=orig, sharding_strategy=S.SHARD_GRAD_OP)
    plain = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, lib.batch()).backward()
    with torch.no_grad():
        model(lib.batch(1))
    optimizer.step()
    with torch.no_grad():
        after = model(lib.batch(1))
    plain.load_state_dict(lib.full(model))
    assert torch.allclose(after, plain(lib.batch(1)), rtol=1e-5, atol=1e-6), "old weights"


class Box:
    def __init__(self, value):
        self.value = value


class Boxed(nn.Linear):
    def forward(self, x):
        return Box(super().forward(x))


@case(
    torch=raises(ValueError, "current state is TrainingState.IDLE"),
    fsdpc=raises(RuntimeError, "was computed while the unit was not gathered"),
)
def an_output_in_an_object_of_the_users(lib):
    """the root returns an object of the user's class"""
    model, plain = lib.wrap(Boxed(3, 3), use_orig_params=True), Boxed(3, 3)
    plain.load_state_dict(lib.full(model))
    x = torch.ones(2, 3)
    model(x).value.sum().backward()
    plain(x).value.sum().backward()
    text = difference(lib.gradients(model), {n: p.grad for n, p in plain.named_parameters()})
    assert not text, text


test_torch, test_fsdpc = case.tests()
