"""Tests of torch.compile on modules inside units, before and after wrapping, and on a whole model.

Units are gathered as often as without the compiler, and no graph breaks inside a block: compiled
code sees only full parameters.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from toys import Block, Reference, check_equal, full_parameters, loss_of, tokens, toy, wrap_blocks

from fsdpc import fully_shard, optim
from fsdpc.optim._places import local_of

# Modules that are imported once, before the ranks are forked.
LOADED_BY_RANKS = ["torch._inductor.compile_fx"]
STEPS = 2
patient = {"timeout": 300.0, "env": {"FSDPC_TIMEOUT": "200"}}  # compilation takes long


def compile_before(model, way, backend):
    for i, block in enumerate(model.blocks):
        if way == "before":
            model.blocks[i] = torch.compile(block, backend=backend)
        elif way == "before_in_place":
            block.compile(backend=backend)


def compile_after(model, way, backend):
    """Compile the model or parts of it, and return the module that a step calls."""
    for i, unit in enumerate(model.module.blocks):
        if way == "after":
            model.module.blocks[i] = torch.compile(unit, backend=backend)
        elif way == "after_inside":
            unit._fsdp_wrapped_module = torch.compile(unit.module, backend=backend)
        elif way == "after_in_place":
            unit.compile(backend=backend)
    return torch.compile(model, backend=backend) if way == "whole" else model


def clean_parameters(model):
    return {name.replace("_orig_mod.", ""): p for name, p in full_parameters(model).items()}


def train_compiled(rank, way, backend, rtol=0.0, **options):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = toy()
    reference = Reference(model)
    compile_before(model, way, backend)
    model = wrap_blocks("fsdpc", model, **options)
    call = compile_after(model, way, backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference.master)]
    for step in range(STEPS):
        loss_of(call, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        got = clean_parameters(model)
        check_equal(got, reference.parameters(), f"{way}, after step {step}", rtol=rtol)
    done = Counter(e["op"] for e in model._tree.trace())
    assert done["gather"] == 2 * STEPS * 3 and done["reduce"] == STEPS * 3, done
    assert counters["stats"]["unique_graphs"] == 1, counters  # both blocks share one graph
    return model


WAYS = {
    True: ("before", "before_in_place", "after", "after_inside", "after_in_place", "whole"),
    False: ("before", "after_inside"),
}


@pytest.mark.long
@ranks(2, **patient)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_compiled_blocks(rank, world, use_orig_params):
    for way in WAYS[use_orig_params]:
        train_compiled(rank, way, "aot_eager", use_orig_params=use_orig_params)
    train_compiled(rank, "before", "eager", use_orig_params=use_orig_params)


@pytest.mark.long
@ranks(2, **patient)
def test_backend_inductor(rank, world, tmp_path):
    """The only test that runs a C++ compiler. Both ranks use the same cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 1  # else torch compiles programs to probe this CPU
    torch._inductor.config.cpp_cache_precompile_headers = True  # all kernels include torch's header
    train_compiled(rank, "after_in_place", "inductor", use_orig_params=True, rtol=1e-5)


@ranks(2, **patient)
def test_mixed_precision(rank, world):
    """The compiled blocks compute in bf16. The parameters equal those of the same model with
    nothing compiled."""
    options = {
        "use_orig_params": True,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    plain, model = (wrap_blocks("fsdpc", toy(), **options) for _ in range(2))
    compile_after(model, "after_in_place", "aot_eager")
    for step in range(STEPS):
        for m in (plain, model):
            loss_of(m, tokens(rank, step)).backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
        check_equal(full_parameters(model), full_parameters(plain), f"after step {step}")


@ranks(2, **patient)
def test_state_dicts_and_policies(rank, world):
    """A callable policy also wraps compiled modules as a whole, and the names are those of the
    compiled model that is not sharded."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    def small(module, recurse, nonwrapped_numel):
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=100)

    model = toy()
    compile_before(model, "before", "eager")
    names = list(model.state_dict())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    from fsdpc import FullyShardedDataParallel

    model = FullyShardedDataParallel(model, auto_wrap_policy=small, use_orig_params=True)
    assert all(isinstance(b, FullyShardedDataParallel) for b in model.module.blocks)
    loss = loss_of(model, tokens(rank, 0))
    assert list(model.state_dict()) == names
    model.load_state_dict({name: value * 0 for name, value in values.items()})
    assert loss_of(model, tokens(rank, 0)) != loss
    model.load_state_dict(values)
    assert torch.equal(loss_of(model, tokens(rank, 0)), loss)


@pytest.mark.long
@ranks(1)
def test_nothing_of_the_compiler_is_imported(rank, world):
    """A training step alone does not import the compiler."""
    import subprocess
    import sys

    program = (
        "import sys, torch, torch.distributed as dist, fsdpc\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = fsdpc.FSDP(torch.nn.Linear(3, 3))\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "model(torch.rand(2, 3)).sum().backward()\n"
        "assert before or 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.block = torch.compile(Block(6), backend="aot_eager")
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        return self.head(self.block(self.embed(batch)))


@pytest.mark.long
@ranks(2, **patient)
def test_units_inside_a_compiled_block(rank, world):
    """The policy wraps parts of a compiled block. The graphs break at the units, and the values are
    correct."""
    torch.manual_seed(0)
    model = Branches()
    reference = Reference(UncompiledBranches(model))
    model = wrap_blocks("fsdpc", model, nn.Linear, use_orig_params=True)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for m in (model, reference.master):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
        check_equal(clean_parameters(model), reference.parameters(), f"after step {step}")


class UncompiledBranches(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.embed, self.block, self.head = model.embed, model.block._orig_mod, model.head

    forward = Branches.forward


@pytest.mark.long
@ranks(1, **patient)
def test_the_wrappers_frame_is_not_traced(rank, world):
    """If the whole model is compiled, the compiler does not trace the wrapper's own forward."""
    from torch._dynamo.convert_frame import input_codes

    from fsdpc import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3))))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.rand(2, 3)).sum().backward()
    assert len(input_codes.seen) > 0
    assert FullyShardedDataParallel.forward.__code__ not in input_codes


@ranks(2, **patient)
def test_steps_of_optimizers_in_a_compiled_function(rank, world):
    """A compiled ``optimizer.step()``, as in torch's tutorial, gives bitwise the same results as
    uncompiled steps."""
    torch._dynamo.reset()
    for kind, shard in (("AdamW", wrap_blocks), ("Muon", lambda _, m: fully_shard(m))):
        found = []
        for compiled in (True, False):
            model = shard("fsdpc", toy())
            optimizer = getattr(optim, kind)(model.named_parameters(), lr=0.1)
            optim.Average(optimizer)
            step = optimizer.step
            step = torch.compile(step, backend="eager") if compiled else step
            for number in range(2):
                loss_of(model, tokens(rank, number)).backward()
                step()
                optimizer.zero_grad()
            states = [s["average"] for s in optimizer.state.values()]
            found.append([*model.parameters(), *states])
        for one, other in zip(*found, strict=True):
            assert torch.equal(local_of(one), local_of(other)), kind


@pytest.mark.long
@ranks(2, **patient)
def test_hooks_of_fully_shard_beside_whole_graphs(rank, world):
    """Each module must compile as one graph, also in a unit of two modules. The modules have
    forward hooks, and their units cast their outputs."""
    from fsdpc import MixedPrecisionPolicy, fully_shard

    model = toy()
    reference = Reference(model)
    for module in (*model.blocks, model.norm, model.head):
        module.compile(backend="eager", fullgraph=True)
        module.register_forward_hook(lambda *_: None)
    cast = {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)}
    for unit in (*model.blocks, [model.norm, model.head], model):
        fully_shard(unit, **cast)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference.master)]
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        got = {name: p.full_tensor() for name, p in model.named_parameters()}
        check_equal(got, reference.parameters(), f"after step {step}")
