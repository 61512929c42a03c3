"""What the wrapper shows to users: attributes, names, buffers, inputs, outputs and hooks."""

from __future__ import annotations

import collections
import dataclasses

import torch
from suite import BOTH, Cases, S
from torch import nn
from torch.distributed.fsdp import FlatParameter
from toys import loss_of, toy

case = Cases(__name__, __file__)

Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Result:
    x: torch.Tensor
    label: str


# --- attributes ----------------------------------------------------------------------------------


@case()
def missing_attributes_come_from_the_wrapped_module(lib):
    model = lib.wrap_blocks(toy())
    model.module.note = "here"
    return model.note, model.embed.num_embeddings, model.blocks[0].up.in_features


@case()
def a_name_that_is_nowhere(lib):
    return lib.refuses(
        AttributeError, getattr, lib.wrap(toy()), "no_such_name", words="no_such_name"
    )


@case()
def methods_of_the_wrapped_module(lib):
    class Named(nn.Linear):
        def title(self):
            return f"{self.in_features}x{self.out_features}"

    return lib.wrap(Named(2, 3)).title()


@case()
def attributes_set_on_the_wrapper_stay_there(lib):
    model = lib.wrap(nn.Linear(2, 2))
    model.epoch = 3
    return model.epoch, hasattr(model.module, "epoch")


@case()
def indexing_reaches_a_sequential(lib):
    model = lib.wrap(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    return type(model[0]).__name__, type(model[1]).__name__, model[1] is model.module[1]


@case()
def length_of_a_wrapped_sequential(lib):
    return lib.refuses(TypeError, len, lib.wrap(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))


PRIVATE = ["_is_root", "_use_orig_params", "_has_params", "_comm_hook", "_comm_hook_state"]


@case(over={"name": ["rank", "world_size", "training_state", "compute_device", "training"]})
def public_attributes(lib, name):
    return getattr(lib.wrap_blocks(toy()), name)


@case(over={"name": PRIVATE})
def private_attributes_that_others_read(lib, name):
    return getattr(lib.wrap_blocks(toy()), name)


@case()
def a_flat_parameter_is_recognised(lib):
    model = lib.wrap_blocks(toy())
    kinds = [isinstance(p, FlatParameter) for p in model.parameters()]
    assert model._flat_param is model.params[0]
    return kinds, [p.dim() for p in model.params]


@case()
def the_handle_tells_of_parameters(lib):
    with_params, without = lib.wrap(nn.Linear(2, 2)), lib.wrap(nn.ReLU())
    return with_params._handle is not None, without._handle is None, without._flat_param is None


@case()
def it_is_a_module_of_its_class(lib):
    model = lib.wrap(toy())
    return isinstance(model, nn.Module), isinstance(model, lib.FSDP), "Block" in repr(model)


# --- names ---------------------------------------------------------------------------------------


@case()
def names_of_original_parameters(lib):
    return [n for n, _ in lib.wrap_blocks(toy(), use_orig_params=True).named_parameters()]


@case()
def names_of_flat_parameters(lib):
    return sorted(n for n, _ in lib.wrap_blocks(toy()).named_parameters())


@case(over={"orig": BOTH})
def names_inside_summon(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    with lib.FSDP.summon_full_params(model):
        inside = [(n, p.shape) for n, p in model.named_parameters()]
    assert [n for n, _ in inside] == [n for n, _ in toy().named_parameters()]
    return inside


@case()
def names_of_modules(lib):
    return [n for n, _ in lib.wrap_blocks(toy()).named_modules()]


@case()
def names_with_a_prefix(lib):
    model = lib.wrap(nn.Linear(2, 2), use_orig_params=True)
    return [n for n, _ in model.named_parameters(prefix="p", recurse=True)]


@case(over={"orig": BOTH})
def parameters_are_kept_as_objects(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    before = list(model.parameters())
    lib.train(model)
    return all(p is q for p, q in zip(before, model.parameters(), strict=True))


@case()
def shards_of_original_parameters_add_up(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    assert all(p.dim() == 1 for p in model.parameters())
    torch.distributed.all_reduce(sizes)
    return sizes


@case()
def original_shapes_without_sharding(lib):
    model = lib.wrap(toy(), use_orig_params=True, sharding_strategy=S.NO_SHARD)
    return [(n, p.shape) for n, p in model.named_parameters()]


@case()
def parameters_inside_forward_are_whole(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    seen = []
    model.blocks[0].up.register_forward_pre_hook(
        lambda m, args: seen.append((m.weight.shape, m.bias.shape))
    )
    model(lib.batch())
    return seen


# --- buffers -------------------------------------------------------------------------------------


def with_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@case()
def names_of_buffers(lib):
    model = lib.wrap(with_norm())
    with lib.FSDP.summon_full_params(model):
        inside = [n for n, _ in model.named_buffers()]
    return [n for n, _ in model.named_buffers()], inside


@case()
def buffers_are_updated_in_training_only(lib):
    model = lib.wrap(with_norm())
    x = torch.arange(12.0).reshape(4, 3) + lib.rank
    model(x)
    after_training = [b.clone() for b in model.buffers()]
    model.eval()
    model(x)
    return after_training, [b.clone() for b in model.buffers()]


@case()
def buffers_are_not_sharded(lib):
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.arange(6.0).reshape(2, 3))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    model = lib.wrap(model)
    return model.table, model.hidden, list(model.state_dict())


# --- outputs and inputs --------------------------------------------------------------------------

OUTPUTS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, 1, None),
    "list": lambda y: [y, y * 2],
    "dict": lambda y: {"y": y, "n": "text"},
    "ordered dict": lambda y: collections.OrderedDict(y=y),
    "namedtuple": lambda y: Pair(y, y + 1),
    "dataclass": lambda y: Result(y, "label"),
    "nested": lambda y: {"a": [y, (y, {"b": y})]},
    "set": lambda y: {y},
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from leaves(list(vars(value).values()))
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from leaves(item)


@case(over={"kind": list(OUTPUTS)})
def containers_as_outputs(lib, kind):
    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return OUTPUTS[kind](self.linear(x))

    model = lib.wrap(nn.Sequential(Outputs()), auto_wrap_policy=None)
    inner = lib.wrap_blocks(nn.Sequential(Outputs()), Outputs)
    result = []
    for m in (model, inner):
        output = m(torch.full((2, 3), 1.0 + lib.rank))
        sum(leaf.sum() for leaf in leaves(output)).backward()
        result.append((type(output).__name__, lib.gradients(m)))
    return result


@case()
def an_output_without_gradient(lib):
    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    return lib.wrap(Counts(3, 4))(torch.ones(2, 3)).dtype


@case()
def keyword_arguments(lib):
    class Scaled(nn.Linear):
        def forward(self, x, *, scale=1.0, extra=None):
            return super().forward(x) * scale + (0 if extra is None else extra["bias"])

    model = lib.wrap(Scaled(2, 2))
    return model(torch.ones(1, 2), scale=2.0, extra={"bias": torch.ones(1)}).detach()


@case()
def inputs_come_through_as_the_same_objects(lib):
    class Keep(nn.Linear):
        def forward(self, x, other):
            self.seen = (x, other)
            return super().forward(x)

    model, x, other = lib.wrap(Keep(2, 2)), torch.ones(1, 2), object()
    model(x, other)
    return model.seen[0] is x, model.seen[1] is other


# --- hooks of the user ---------------------------------------------------------------------------


@case()
def forward_hooks_and_their_order(lib):
    order = []
    model = lib.wrap_blocks(toy())
    for name, module in (
        ("root", model),
        ("module", model.module),
        ("block", model.blocks[0]),
        ("inside", model.blocks[0].module),
        ("up", model.blocks[0].up),
    ):
        module.register_forward_pre_hook(lambda m, a, name=name: order.append(f"before {name}"))
        module.register_forward_hook(lambda m, a, o, name=name: order.append(f"after {name}"))
    model(lib.batch())
    return order


@case()
def backward_hooks_and_their_order(lib):
    order = []
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    for name, module in (("root", model), ("block", model.blocks[1]), ("head", model.head)):
        module.register_full_backward_hook(lambda m, i, o, name=name: order.append(name))
    loss_of(model, lib.batch()).backward()
    return order, lib.gradients(model)


@case()
def a_forward_hook_changes_the_output(lib):
    model = lib.wrap(nn.Linear(2, 2))
    model.register_forward_hook(lambda m, a, output: output * 2)
    output = model(torch.ones(1, 2))
    output.sum().backward()
    return output.detach(), lib.gradients(model)


@case()
def tensor_hooks_on_activations(lib):
    model, seen = lib.wrap_blocks(toy()), []
    model.blocks[0].register_forward_hook(
        lambda m, a, output: output.register_hook(lambda g: seen.append(g.clone())) and None
    )
    loss_of(model, lib.batch()).backward()
    return seen


test_torch, test_fsdpc = case.tests()
