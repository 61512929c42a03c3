"""Tests of child processes that a rank forks (for evaluation, averages or data loading). A child
has the values that the rank had at the fork, and nothing that a child does reaches a rank.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle

import pytest
import torch
from harness import ranks
from torch import nn
from toys import Reference, by_door, check_parameters, loss_of, summon, tokens, toy


def exit_in_order(status):
    gc.collect()
    atexit._run_exitfuncs()
    os._exit(status)


class Child:
    """A forked child that runs ``job``; ``result()`` returns the value of
    the job or the text of its exception.
    """

    def __init__(self, job, ends=os._exit):
        self.out, into = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                value = job()
            except Exception as error:
                value = f"{type(error).__name__}: {error}"
            with os.fdopen(into, "wb") as file:
                pickle.dump(value, file)
            ends(0)
        os.close(into)

    def result(self):
        with os.fdopen(self.out, "rb") as file:
            value = pickle.load(file)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        return value


def build(interface):
    return by_door(interface, toy())


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def values(model):
    return [local(p).flatten().tolist() for p in model.parameters()]


@ranks(1, 2)
@pytest.mark.parametrize("interface", ["class", "flat", "fully_shard"])
def test_children_and_training(rank, world, interface):
    model = build(interface)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []

    def step(number):
        loss = loss_of(model, tokens(rank, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def spoil():
        """Change gradients, optimizer states and weights by a step, then overwrite parameters."""
        seen = values(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p in model.parameters():
            local(p).fill_(7.0)
        return seen, values(model)

    def read_late():
        os.read(go, 1)
        return values(model)

    step(0)
    before = values(model)
    seen, spoilt = Child(spoil).result()
    assert seen == before and all(set(v) <= {7.0} for v in spoilt), "a child's own"
    assert values(model) == before, "a child's writes stay in the child"
    go, ready = os.pipe()
    readers = [Child(read_late), Child(read_late)]
    step(1)
    assert values(model) != before
    os.write(ready, b"12")
    assert [reader.result() for reader in readers] == [before, before], "the values of the fork"
    forward = Child(lambda: loss_of(model, tokens(rank, 9)).item()).result()
    if world == 1:
        assert forward == loss_of(model, tokens(rank, 9)).item()
    else:
        assert "StateError" in forward and f"forked child of rank {rank}" in forward
    Child(lambda: model.__dict__.clear(), ends=exit_in_order).result()
    step(2)
    loss = loss_of(model, tokens(rank, 3))
    Child(loss.backward).result()  # between forward and backward
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(4)

    plain = Reference(toy())
    expected = torch.optim.Adam(plain.master.parameters(), lr=0.1)
    for number in range(5):
        plain.backward(tokens(rank, number))
        expected.step()
        expected.zero_grad()
    if interface != "fully_shard":
        check_parameters("fsdpc", model, plain, "after children")
    else:
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.full_tensor(), plain.master.get_parameter(name))


@ranks(2)
def test_whole_values_and_what_the_group_does(rank, world):
    """A child evaluates with full parameters while the parent trains; calls of the process group
    raise an error in the child.
    """
    model = build("class")
    with summon(model, writeback=False):
        expected = {n: p.detach().clone() for n, p in model.named_parameters()}
        go, ready = os.pipe()

        def evaluate():
            os.read(go, 1)
            same = all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            return same

        child = Child(evaluate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        loss_of(model, tokens(rank, number)).backward()
        optimizer.step()
    os.write(ready, b"1")
    assert child.result() is True
    for call in (model.state_dict, lambda: model.clip_grad_norm_(1.0)):
        assert "forked child" in Child(call).result()


@ranks(2)
@pytest.mark.parametrize("interface", ["class", "fully_shard"])
def test_share_memory_is_refused(rank, world, interface):
    model = build(interface)
    for module in (model, nn.Sequential(model)):
        with pytest.raises(NotImplementedError, match="share_memory: the shards of unit"):
            module.share_memory()
    loss_of(model, tokens(rank, 0)).backward()
    if interface == "class":  # torch's share_memory_() crashes on a DTensor
        for p in model.parameters():
            p.share_memory_()
        with pytest.raises(NotImplementedError, match="share_memory: the shards of unit"):
            loss_of(model, tokens(rank, 0))
