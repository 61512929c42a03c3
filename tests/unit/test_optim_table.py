"""Steps by a table in C equal steps without the table, whatever a program changes between two
steps.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import UserDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc import optim
from fsdpc.optim import _table
from fsdpc.sharded_grad_scaler import ShardedGradScaler

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = ((64,), (33, 5), (), (0,), (1000,), (17,))
MAKES: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD plain": lambda p: optim.SGD(p, lr=0.1),
    "Lion": lambda p: optim.Lion(p, lr=0.1),
    "AdamWBF16": lambda p: optim.AdamWBF16(p, lr=0.1),
}
STEPS = 7


def values(seed: int, shape: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_grads(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(100 * step + i, param.shape).to(param.dtype)


# Each of these functions does something that a program may do between two steps. The test calls the
# function before steps 4 and 5.
def nothing(optimizer: Any, params: Any, step: int) -> None:
    pass


def missing(optimizer: Any, params: Any, step: int) -> None:
    params[1].grad = None


def other_memory(optimizer: Any, params: Any, step: int) -> None:
    params[1].data = params[1].data.clone()


def other_state_memory(optimizer: Any, params: Any, step: int) -> None:
    for value in optimizer.state.get(params[1], {}).values():
        value.data = value.data.clone() * 2


def other_states(optimizer: Any, params: Any, step: int) -> None:
    state = optimizer.state.get(params[1])
    if state:
        optimizer.state[params[1]] = {name: value.clone() + 1 for name, value in state.items()}


def no_states(optimizer: Any, params: Any, step: int) -> None:
    optimizer.state.pop(params[1], None)


def shared_step(optimizer: Any, params: Any, step: int) -> None:
    states = optimizer.state
    if step == 4 and "step" in states.get(params[0], {}):
        optimizer.add_param_group({"params": [nn.Parameter(values(99, (40,)))]})
        other = optimizer.param_groups[1]["params"][0]
        own = states[params[0]]
        states[other] = {n: v[:40].clone() if n != "step" else v for n, v in own.items()}
        params.append(other)
    if len(optimizer.param_groups) > 1:
        params[-1].grad = values(step, (40,))


def another_mapping(optimizer: Any, params: Any, step: int) -> None:
    if step == 4:
        optimizer.state = UserDict(optimizer.state)


def loaded(optimizer: Any, params: Any, step: int) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def other_options(optimizer: Any, params: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.03)


def amsgrad(optimizer: Any, params: Any, step: int) -> None:
    if "amsgrad" in optimizer.param_groups[0] and not isinstance(optimizer, optim.AdamWBF16):
        optimizer.param_groups[0]["amsgrad"] = step == 4


def momentum(optimizer: Any, params: Any, step: int) -> None:
    if "momentum" in optimizer.param_groups[0]:
        optimizer.param_groups[0].update(momentum=0.5 if step == 4 else 0.0, nesterov=False)


def new_group(optimizer: Any, params: Any, step: int) -> None:
    if step == 4:
        params.append(nn.Parameter(values(99, (40,))))
        params[-1].grad = values(98, (40,))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})


def strided(optimizer: Any, params: Any, step: int) -> None:
    params[0].grad = values(7, (128,))[::2]


def negated(optimizer: Any, params: Any, step: int) -> None:
    params[0].grad = torch.view_as_complex(values(7, (64, 2))).conj().imag


def low_grad(optimizer: Any, params: Any, step: int) -> None:
    grad = params[0].grad.bfloat16()
    params[0].grad = None
    params[0].grad_dtype = None
    params[0].grad = grad


class Marked(torch.Tensor):
    """A gradient whose type is a subclass of torch.Tensor."""


def subclass(optimizer: Any, params: Any, step: int) -> None:
    params[0].grad = params[0].grad.as_subclass(Marked)


def frozen(optimizer: Any, params: Any, step: int) -> None:
    params[1].requires_grad_(False)


def low_parameter(optimizer: Any, params: Any, step: int) -> None:
    if step == 4:
        params[4].grad = None
        params[4].data = params[4].data.bfloat16()
        params[4].grad = values(3, params[4].shape).bfloat16()


CHANGES = (
    nothing,
    missing,
    other_memory,
    other_state_memory,
    other_states,
    no_states,
    loaded,
    other_options,
    amsgrad,
    momentum,
    new_group,
    strided,
    negated,
    low_grad,
    subclass,
    frozen,
    low_parameter,
    shared_step,
    another_mapping,
)


def train(name: str, change: Any, clip: bool) -> tuple[list[Any], list[Any], int]:
    """Train and return the parameters, the states, and the number of steps that used the table of
    an earlier step.
    """
    params = [nn.Parameter(values(i, size)) for i, size in enumerate(SIZES)]
    optimizer, done = MAKES[name](params), 0
    for step in range(STEPS):
        set_grads(params, step)
        if step in (4, 5):
            change(optimizer, params, step)
        table = optimizer._table
        if clip:
            optimizer.step_and_clip(1.0)
        else:
            optimizer.step()
        done += table is not None and optimizer._table is table
    saved = optimizer.state_dict()["state"]
    return params, [value for state in saved.values() for value in state.values()], done


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", MAKES)
def test_equals_the_long_way(monkeypatch, name: str, change: Any):
    params, states, done = train(name, change, CHANGES.index(change) % 2 == 0)
    assert done >= 3
    if change in (nothing, missing, other_options, frozen):
        assert done == STEPS - 1
    monkeypatch.setattr("fsdpc.optim._base.table_of", lambda _: None)
    expected, known, none = train(name, change, CHANGES.index(change) % 2 == 0)
    assert none == 0
    for mine, theirs in zip(params + states, expected + known, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    for mine, theirs in zip(params, expected, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine._version == theirs._version


def stepped(name: str = "AdamW") -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(values(i, size)) for i, size in enumerate(SIZES)]
    optimizer = MAKES[name](params)
    set_grads(params, 0)
    optimizer.step()
    assert optimizer._table is not None
    return params, optimizer


def test_errors_are_those_of_the_long_way():
    params, optimizer = stepped()
    params[0].grad = torch.sparse_coo_tensor([[1]], [1.0], (64,))
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    params, optimizer = stepped()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="state of tensor 1 has another number of elements"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_a_saved_tensor_is_found_to_be_stale():
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([param], lr=0.1)
    for _ in range(3):
        loss = (param * param).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_table_keeps_nothing_alive():
    params, optimizer = stepped()
    params[0].owner = optimizer  # only the garbage collector frees this cycle
    state = weakref.ref(optimizer.state[params[1]]["exp_avg"])
    grad = weakref.ref(params[1].grad)
    optimizer.step()
    params[1].grad = None
    optimizer.state.clear()
    assert grad() is None and state() is None
    gone = weakref.ref(params[0])
    del params, optimizer
    gc.collect()
    assert gone() is None


def test_lazily_negated_memory_is_refused():
    params, optimizer = stepped("SGD")
    params[0].grad = torch._neg_view(params[0].grad)
    with pytest.raises(BufferError, match=r"lazily negated .* call resolve_neg\(\)"):
        optimizer.step()
    for step in range(2):  # the first step makes a table, by which the second step reads the state
        set_grads(params, step)
        optimizer.step()
    state = optimizer.state[params[0]]
    address, memory = id(state["momentum_buffer"]), state.pop("momentum_buffer").detach()
    others = []
    for _ in range(100):  # until a new object has the old object's address, usually at once
        state["momentum_buffer"] = torch._neg_view(memory)
        if id(state["momentum_buffer"]) == address:
            break
        others.append(state["momentum_buffer"])
    before = params[0].detach().clone()
    with pytest.raises(BufferError, match=r"call resolve_neg\(\)"):
        optimizer.step()
    assert torch.equal(params[0], before)


class Armed(nn.Parameter):
    """A parameter that calls `act` when a step reads the parameter's gradient."""

    act: Any = None

    @property
    def grad(self) -> Any:
        if self.act is not None:
            self.act()
        return torch.ones(4)


def test_a_state_that_goes_while_gradients_are_read_is_held():
    param = Armed(torch.ones(4))
    optimizer = optim.AdamW([param], lr=0.1)
    for _ in range(2):
        optimizer.step()
    table, state = optimizer._table, weakref.ref(optimizer.state[param]["exp_avg"])
    param.act = lambda: optimizer.state.pop(param, None)
    assert table.read(optimizer) and state() is not None
    table.end()
    assert state() is None


def test_a_step_inside_a_step_and_in_another_thread():
    param = Armed(torch.ones(4))
    optimizer = optim.SGD([param], lr=0.25)
    optimizer.step()
    table = optimizer._table
    assert table.read(optimizer) and table.count == 1
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert table.count == 1 and optimizer._table is not table
    assert not table.read(optimizer) and table.changed(_table.PARAMS) == [param]
    table.end()
    assert torch.equal(param.detach(), torch.full((4,), 0.5))
    assert table.read(optimizer)
    table.end()

    def act() -> None:
        param.act = None
        optimizer.step()

    param.act = act
    optimizer.step()
    assert torch.equal(param.detach(), torch.zeros(4))


def test_tables_that_never_hold_are_made_seldom(monkeypatch):
    made: list[Any] = []
    table_of = _table.table_of
    monkeypatch.setattr("fsdpc.optim._base.table_of", lambda o: made.append(1) or table_of(o))
    params = [nn.Parameter(values(1, (8,)))]
    optimizer = optim.SGD(params)
    for _ in range(40):
        params[0].data = params[0].data.clone()
        set_grads(params, 0)
        optimizer.step()
    assert len(made) < 15


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*MAKES, "AdamW8bit", "AdamMini"])
def test_copies_are_the_rounded_parameters(name: str, low: torch.dtype):
    others = {
        "AdamW8bit": lambda p: optim.AdamW8bit(p[:3] + p[4:], min_8bit_size=100),
        "AdamMini": lambda p: optim.AdamMini(p[:3] + p[4:], block=lambda *_: 8),
    }
    params = [nn.Parameter(values(i, size)) for i, size in enumerate(SIZES)]
    optimizer = {**MAKES, **others}[name](params)
    own = optimizer.param_groups[0]["params"]
    copies = {p: nn.Parameter(torch.empty_like(p, dtype=low)) for p in own[:-1]}
    optimizer.write_copies(copies)
    for step in range(4):
        for param, copy in copies.items():
            assert torch.equal(copy, param.to(low)), step
        versions = [copy._version for copy in copies.values()]
        set_grads(params, step)
        optimizer.step_and_clip(1.0)
        assert all(c._version > v for c, v in zip(copies.values(), versions, strict=True))
    optimizer.write_copies(None)
    before = copies[own[0]].detach().clone()
    set_grads(params, 9)
    optimizer.step()
    assert torch.equal(copies[own[0]], before) and not torch.equal(before, own[0].to(low))


def test_copies_are_copied_with_the_optimizer():
    params, optimizer = stepped()
    low = torch.empty_like(params[0], dtype=torch.bfloat16)
    optimizer.write_copies({params[0]: low})
    model, lows, other = deepcopy((params, low, optimizer))
    before = low.clone()
    set_grads(model, 1)
    other.step()
    assert torch.equal(lows, model[0].bfloat16()) and not torch.equal(lows, low)
    assert torch.equal(low, before)


def test_wrong_copies_are_refused():
    params, optimizer = stepped()
    low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for copies, error, text in (
        ({low: low}, ValueError, "not this optimizer's"),
        ({params[0]: torch.zeros(64)}, TypeError, "in torch.float32 is a Tensor in torch.float32"),
        ({params[0]: low}, ValueError, r"of shape \(64,\) is \(3,\)"),
    ):
        with pytest.raises(error, match=text):
            optimizer.write_copies(copies)
    assert optimizer._copies is None


# --- loss scaling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1024.0, 3.0, 0.25])
@pytest.mark.parametrize("name", MAKES)
def test_one_pass_for_scale_norm_and_step(name: str, scale: float):
    """The parameters have the same bits as if the gradients were divided and clipped before the
    step, but .grad stays unchanged.
    """
    found: list[list[nn.Parameter]] = []
    norms: list[float] = []
    for apart in (False, True):
        params = [nn.Parameter(values(i, size)) for i, size in enumerate(SIZES)]
        optimizer = MAKES[name](params)
        scaler = ShardedGradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))
        for step in range(4):
            set_grads(params, step)
            if step == 2:
                params[4].grad[7] = float("inf")
            if step == 3:
                params[4].grad[7] = 1e-40  # divided by the scale, this number is subnormal
            before = [p.grad.clone() for p in params]
            if not apart:
                scaler.step(optimizer, max_norm=0.5)
                scaler.update(scale)
                norms.append(float(optimizer.last_norm))
                assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
            elif step != 2:
                own = [p.grad.double().norm() for p in optimizer.param_groups[0]["params"]]
                assert norms[step] == pytest.approx(torch.stack(own).norm().item() / scale)
                clip = 0.5 / (norms[step] + 1e-6)
                for param in params:
                    param.grad.div_(scale).mul_(min(clip, 1.0))
                optimizer.step()
        found.append(params)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("everywhere", [False, True])
def test_infinities_are_found_before_hooks(max_norm: float | None, everywhere: bool):
    """As with torch's scaler, a step with infinities is skipped even if a pre-hook removes them."""
    params, optimizer = stepped("SGD plain")
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    put = register_optimizer_step_pre_hook if everywhere else optimizer.register_step_pre_hook

    def mend(*_: Any) -> None:
        params[0].grad.nan_to_num_(posinf=0.0)

    handle = put(mend)
    more = {} if max_norm is None else {"max_norm": max_norm}
    before = [p.detach().clone() for p in params]
    try:
        for bad in (True, False):
            scaler.scale(torch.zeros(()))
            set_grads(params, 1)
            if bad:
                params[0].grad[0] = float("inf")
            scaler.step(optimizer, **more)
            scaler.update()
            assert torch.equal(params[0], before[0]) == bad and scaler.get_scale() == 2.0
    finally:
        handle.remove()
    assert optimizer._check is None


def test_found_inf_is_shown_to_what_runs_around_a_step():
    class Own(optim.SGD):
        def step(self, *args: Any, **options: Any) -> Any:
            shown.append(float(self.found_inf))
            return super().step(*args, **options)

    shown: list[float] = []
    for kind in (optim.SGD, Own):
        param = nn.Parameter(torch.ones(4))
        optimizer = kind([param], lr=0.1)
        optimizer.register_step_post_hook(lambda o, *_: shown.append(float(o.found_inf)))
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        for value in (1.0, float("inf"), float("nan"), 1.0):
            scaler.scale(torch.zeros(()))
            param.grad = torch.full((4,), value)
            scaler.step(optimizer)
            scaler.update(4.0)
            assert set(shown) == {float(value != 1.0)}
            shown.clear()


def test_a_step_without_hooks_does_the_scalers_check():
    for name in MAKES:
        params, optimizer = stepped(name)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the instance's `step`
        check = (torch.zeros(()), lambda: None)
        assert optimizer.leave_check(*check)
        optimizer.register_step_pre_hook(lambda *_: None)
        assert not optimizer.leave_check(*check)
