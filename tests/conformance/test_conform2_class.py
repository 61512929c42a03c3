"""The class that fully_shard gives a module, its hooks, and methods that run like forward."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
from outcome import AFTER_A_FAILED_BACKWARD, wrong
from rows_library import RowsLibrary, linear
from suite import Cases
from torch import nn
from torch.distributed.tensor import DTensor
from toys import Block, Reference, Toy, loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- the class -----------------------------------------------------------------------------------


@case()
def the_names_of_classes(lib):
    model = lib.shard_blocks(toy())
    return {name: type(module).__name__ for name, module in model.named_modules()}


@case()
def instances_of_both_classes(lib):
    model = lib.shard_blocks(toy())
    classes = (Toy, nn.Module, lib.FSDPModule, torch.distributed.fsdp.FSDPModule, Block)
    return [[isinstance(m, c) for c in classes] for m in model.modules()]


@case()
def the_original_class_in_the_order_of_bases(lib):
    kind = type(lib.fully_shard(linear()))
    return kind.__mro__[2] is nn.Linear, issubclass(lib.FSDPModule, nn.Module)


@case()
def one_class_for_equal_modules(lib):
    a, b = lib.fully_shard(linear()), lib.fully_shard(linear())
    return type(a) is type(b)


@case(over={"part": [slice(0, 1), slice(1, 3), slice(None, None, 2)]})
def slices_of_a_sequential_are_plain(lib, part):
    model = lib.fully_shard(nn.Sequential(linear(), nn.Tanh(), linear(2, 5)))
    found = model[part]
    return type(found).__name__, len(found), isinstance(found[0], nn.Module)


@case(raises=AssertionError, words="deepcopy")
def copying(lib):
    copy.deepcopy(lib.fully_shard(linear()))


@case(raises=AssertionError, words="deepcopy")
def copying_a_model_with_a_sharded_part(lib):
    model = toy()
    lib.fully_shard(model.blocks[0])
    copy.deepcopy(model)


@case(over={"protocol": [2, 4]})
def pickling(lib, protocol):
    model = lib.fully_shard(linear())
    return lib.refuses(Exception, pickle.dumps, model, protocol)


@case()
def state_of_modules(lib):
    model = toy()
    none = lib.fully_shard.state(model)
    lib.fully_shard([model.norm, model.head])
    lib.fully_shard(model)
    state = lib.fully_shard.state
    together = state(model.norm) is state(model.head)
    return none is None, together, state(model) is state(model.head), state(model.embed) is None


@case()
def attributes_and_methods_of_the_original_class(lib):
    class Counter(nn.Linear):
        kind = "counter"

        def __init__(self):
            super().__init__(3, 2)
            self.calls = 0

        @property
        def double(self):
            return 2 * self.calls

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

        def __len__(self):
            return 7

    model = lib.fully_shard(Counter())
    model(torch.ones(1, 3))
    return model.kind, model.calls, model.double, len(model), type(model).__qualname__


@case()
def names_types_and_order_are_kept(lib):
    plain, model = toy(), lib.shard_blocks(toy())
    names = [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in plain.parameters()] == [p.shape for p in model.parameters()]
    return names, shapes, [*plain.state_dict()] == [*model.state_dict()]


@case()
def modules_and_texts(lib):
    model = lib.shard_blocks(toy())
    return [n for n, _ in model.named_modules()], repr(model), model.head.extra_repr()


@case(over={"training": [True, False]})
def modes(lib, training):
    model = nn.Sequential(linear(3, 3), nn.Dropout(0.5))
    lib.fully_shard(model)
    model.train(training)
    torch.manual_seed(3)
    return model(torch.ones(4, 3)), model[1].training


@case()
def a_submodule_added_later(lib):
    """A submodule that is added after fully_shard stays unsharded until another call shards it."""
    model = lib.fully_shard(linear(3, 3))
    model.more = linear(2, 3)
    return [type(p).__name__ for p in model.parameters()]


@case()
def a_buffer_added_later(lib):
    model = lib.fully_shard(linear())
    model.register_buffer("scale", torch.full((2,), 3.0))
    return [*model.state_dict()], model.scale


@case()
def apply_visits_each_module_once(lib):
    seen = []
    lib.shard_blocks(toy()).apply(lambda m: seen.append(type(m).__name__))
    return seen


@case()
def deleting_a_model_frees_it(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    modules = [weakref.ref(m) for m in model.modules()]
    del model
    gc.collect()
    return sum(m() is not None for m in modules)


@case()
def get_and_set_by_name(lib):
    model = lib.shard_blocks(toy())
    p = model.get_parameter("blocks.0.up.weight")
    return isinstance(p, DTensor), model.get_submodule("blocks.0") is model.blocks[0]


# --- hooks ---------------------------------------------------------------------------------------


def kind_of(p):
    return "sharded" if isinstance(p, DTensor) else "full"


@case(over={"order": ["before", "after"], "prepend": [True, False]})
def what_forward_pre_hooks_see(lib, order, prepend):
    model, seen = linear(), []

    def look():
        model.register_forward_pre_hook(
            lambda m, args: seen.append(kind_of(m.weight)), prepend=prepend
        )

    if order == "before":
        look()
    lib.fully_shard(model)
    if order == "after":
        look()
    model(torch.ones(1, 3))
    return seen


@case(over={"order": ["before", "after"]})
def what_forward_hooks_see(lib, order):
    model, seen = linear(), []

    def look(m):
        m.register_forward_hook(lambda m, args, out: seen.append(kind_of(m.weight)))

    if order == "before":
        look(model)
    lib.fully_shard(model, reshard_after_forward=True)
    if order == "after":
        look(model)
    model(torch.ones(1, 3))
    return seen


def look_at_weights(model, kind, names=None):
    """Register backward hooks on modules below the root, and return the list that the hooks fill.

    Each item has the module's name, whether the weight of the first Linear inside the module is
    "full" or "sharded", and the sum of that weight if it is full.
    """
    seen = []
    for name, module in model.named_modules():
        weights = [child for child in module.modules() if isinstance(child, nn.Linear)]
        if weights and name and (names is None or name in names):

            def look(module, *gradients, name=name, linear=weights[0]):
                full = kind_of(linear.weight)
                seen.append((name, full, linear.weight.sum().item() if full == "full" else None))

            getattr(module, f"register_full_backward_{kind}")(look)
    return seen


@case(over={"reshard": [None, True, False], "input_grad": [True, False]})
def what_full_backward_hooks_see(lib, reshard, input_grad):
    """Full backward hooks of blocks and of the modules inside of blocks see full weights."""
    names = {n for n, _ in toy().named_modules() if n.startswith("blocks.1")}
    model = lib.shard_blocks(toy(), reshard_after_forward=reshard)
    seen = look_at_weights(model, "hook", names)
    x = lib.batch()
    loss_of(model, x.requires_grad_() if input_grad and x.is_floating_point() else x).backward()
    assert len(seen) > 2 and all(full == "full" for _, full, _ in seen), seen
    return seen, lib.gradients(model)


@case(torch=wrong("sharded"), fsdpc_does="the hook sees full weights")
def what_full_backward_pre_hooks_see(lib):
    """A full_backward_pre_hook of a unit may read the unit's weights."""
    model = lib.shard_blocks(toy(), reshard_after_forward=True)
    seen = look_at_weights(model, "pre_hook")
    loss_of(model, lib.batch()).backward()
    assert all(full == "full" for _, full, _ in seen), seen


@case()
def backward_hooks_that_change_gradients(lib):
    """A full backward hook may replace gradients of inputs, and a pre-hook those of outputs."""
    model = lib.shard_blocks(toy())
    model.blocks[1].register_full_backward_hook(lambda m, gi, go: tuple(2 * g for g in gi))
    model.blocks[0].register_full_backward_pre_hook(lambda m, go: tuple(g + 1 for g in go))
    return lib.gradients_after(model)


@case()
def backward_hooks_that_come_and_go(lib):
    model, seen = lib.shard_blocks(toy()), []
    for step in range(3):
        handles = []
        if step != 1:
            handles = [
                block.up.register_full_backward_hook(
                    lambda m, gi, go: seen.append(kind_of(m.weight))
                )
                for block in model.blocks
            ]
        loss_of(model, lib.batch(step)).backward()
        for handle in handles:
            handle.remove()
    return seen, lib.gradients(model)


@case()
def global_backward_hooks(lib):
    model, seen = lib.shard_blocks(toy()), []

    def look(module, gi, go):
        if isinstance(module, nn.Linear) and module is not model.head:
            seen.append(kind_of(module.weight))

    handle = nn.modules.module.register_module_full_backward_hook(look)
    try:
        loss_of(model, lib.batch()).backward()
    finally:
        handle.remove()
    return seen, lib.gradients(model)


@case()
def hooks_that_change_values(lib):
    model = toy()
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda m, args, out: out + 1)
    lib.shard_blocks(model)
    loss = loss_of(model, lib.batch())
    loss.backward()
    return loss, lib.gradients(model)


@case()
def hooks_on_children_of_a_unit(lib):
    model, seen = lib.shard_blocks(toy()), []
    model.blocks[0].up.register_forward_hook(
        lambda m, args, out: seen.append((kind_of(m.weight), tuple(out.shape)))
    )
    model(lib.batch())
    return seen


class Failing(Block):
    fails = False

    def forward(self, x):
        if self.fails:
            raise KeyError("mine")
        return super().forward(x)


@case(needs="reset_iter_state", over={"at": [0, 1]})
def going_on_after_an_exception_in_forward(lib, at):
    """torch needs reset_iter_state to go on; fsdpc goes on with or without that call."""
    model = toy()
    model.blocks = nn.ModuleList([Failing(), Failing()])
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    lib.shard_blocks(model)
    model.blocks[at].fails = True
    lib.refuses(KeyError, model, lib.batch())
    model.blocks[at].fails = False
    model.reset_iter_state()
    return lib.train(model)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("mine")


@case(
    needs="reset_iter_state",
    torch=AFTER_A_FAILED_BACKWARD,
    fsdpc_does="drops the failed backward's gradients",
)
def going_on_after_an_exception_in_backward(lib):
    """gradients after an exception in backward, reset_iter_state and zero_grad"""
    model = lib.shard_blocks(toy())
    handle = model.blocks[0].register_forward_hook(lambda m, a, out: Refusing.apply(out))
    lib.refuses(KeyError, loss_of(model, lib.batch()).backward)
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model, lib.batch()).backward()
    got, reference = lib.gradients(model), Reference(toy())
    reference.backward(lib.batch())
    for name, grad in sorted(reference.gradients().items(), reverse=True):
        assert torch.allclose(got[name], grad, atol=1e-6), f"gradient of {name}"


# --- other methods -------------------------------------------------------------------------------


class Speaker(nn.Linear):
    """A layer with two more methods, encode and generate, that use the parameters of forward."""

    def encode(self, x, *, scale=1.0):
        return nn.functional.linear(x, self.weight) * scale

    def generate(self, x, steps=2):
        for _ in range(steps):
            x = self(x)
        return x


def speaker():
    torch.manual_seed(0)
    return Speaker(3, 3)


@case()
def a_method_like_forward(lib):
    model = lib.fully_shard(speaker())
    lib.name_of("register_fsdp_forward_method")(model, "encode")
    model.encode(torch.ones(2, 3) + lib.rank, scale=2.0).sum().backward()
    return lib.gradients(model)


@case()
def a_method_like_forward_in_training(lib):
    model = lib.fully_shard(speaker())
    lib.name_of("register_fsdp_forward_method")(model, "encode")
    x = torch.ones(2, 3)
    return lib.full_after(model, lambda step: (model.encode(x) + model(x * step)).sum())


@case()
def a_method_that_calls_forward(lib):
    model = lib.fully_shard(speaker())
    lib.name_of("register_fsdp_forward_method")(model, "generate")
    with torch.no_grad():
        return model.generate(torch.ones(1, 3))


@case()
def a_method_of_an_inner_unit(lib):
    model = nn.Sequential(speaker(), speaker())
    for part in model:
        lib.fully_shard(part)
        lib.name_of("register_fsdp_forward_method")(part, "encode")
    lib.fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    model[1].encode(model[0].encode(torch.ones(1, 3))).sum().backward()
    return lib.gradients(model)


@case()
def a_method_of_a_plain_module(lib):
    """register_fsdp_forward_method does not change a module that is not sharded."""
    model = speaker()
    lib.name_of("register_fsdp_forward_method")(model, "encode")
    lib.name_of("register_fsdp_forward_method")(model, "missing")
    return "encode" in vars(model)


@case(raises=ValueError, words="does not have a method missing")
def a_method_that_is_missing(lib):
    lib.name_of("register_fsdp_forward_method")(lib.fully_shard(speaker()), "missing")


@case()
def a_method_that_was_not_registered(lib):
    """A method that was not registered runs on sharded parameters, which raises an error."""
    model = lib.fully_shard(speaker(), reshard_after_forward=True)
    return lib.refuses(RuntimeError, model.encode, torch.ones(1, 3), words="DTensor")


@case(needs="reset_iter_state")
def a_method_that_raises(lib):
    class Odd(Speaker):
        def encode(self, x, fail=False):
            if fail:
                raise KeyError("mine")
            return super().encode(x)

    torch.manual_seed(0)
    model = lib.fully_shard(Odd(3, 3))
    lib.name_of("register_fsdp_forward_method")(model, "encode")
    lib.refuses(KeyError, model.encode, torch.ones(1, 3), fail=True)
    model.reset_iter_state()
    model.encode(torch.ones(1, 3)).sum().backward()
    return lib.gradients(model)


@case(raises=ValueError, words="Expects list of FSDPModules")
def a_common_context_of_plain_modules(lib):
    lib.name_of("share_comm_ctx")([linear()])


@case()
def a_common_context_of_two_roots(lib):
    models = [lib.fully_shard(linear(3, 3)), lib.fully_shard(linear(3, 3))]
    lib.name_of("share_comm_ctx")(models)
    models[1](models[0](torch.ones(2, 3) + lib.rank)).sum().backward()
    return [lib.gradients(m) for m in models]


test_torch, test_fsdpc = case.tests()
