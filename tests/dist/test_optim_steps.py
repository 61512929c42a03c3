"""Tests of fsdpc's optimizers on shards of 2 and 3 ranks:
steps equal those of the same optimizer without sharding.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from toys import full_parameters, wrap

import fsdpc
from fsdpc import optim

# Shard boundaries lie inside rows of these parameters, and inside the blocks of 256 elements that
# share a scale in 8-bit states. The parameter "b" is too small for 8-bit states.
SHAPES = {"a": (37, 131), "b": (61,), "c": (5000,), "d": (70, 60)}
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Lion": {},
    "AdamWBF16": {},
    "AdamW8bit": {},
    "AdamMini": {"block": lambda name, shape: shape[-1] if len(shape) > 1 else None},
    "Muon": {"split": {"d": 2}, "adamw_lr": 0.01},
    "Adafactor": {"split": {"d": 2}},
    "SOAP": {"precondition_frequency": 2, "adamw_lr": 0.01},
    "Shampoo": {"precondition_frequency": 2, "max_precondition_dim": 60},
}
STEPS = 3


class Model(nn.Module):
    """A model with given gradients: multiples of 2^-10, so that the mean over ranks is exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))

    def forward(self, step: int) -> torch.Tensor:
        params = {name: getattr(self, name) for name in SHAPES}
        return sum((p * wanted(name, step).to(p)).sum() for name, p in params.items())


def wanted(name: str, step: int) -> torch.Tensor:
    """Return the gradient of a parameter: most elements have ordinary size, some are tiny."""
    generator = torch.Generator().manual_seed(100 * step + ord(name))
    drawn = torch.randint(-512, 512, SHAPES[name], generator=generator).float() / 1024
    return drawn * (1 + 0 * drawn) * torch.where(drawn.abs() < 0.1, 2.0**-8, 1.0)


def make(name: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    params: Any = model.parameters()
    if name in ("AdamMini", "Muon", "Adafactor", "SOAP", "Shampoo"):
        params = list(model.named_parameters())
    return getattr(optim, name)(params, **{**OPTIONS[name], **more})


def train(model: nn.Module, optimizer: Any, steps: range, clip: bool) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        if clip:
            norms.append(float(optimizer.step_and_clip(8.0)))
        else:
            optimizer.step()
    return norms


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if name == "AdamMini":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected), name


def alone(name: str, dtype: torch.dtype, clip: bool = False) -> tuple[Model, list[float]]:
    model = Model(dtype)
    return model, train(model, make(name, model), range(STEPS), clip)


@pytest.mark.long
@ranks(2, 3)
def test_shards_of_fsdp(rank, world):
    for use_orig_params in (True, False):
        for name in OPTIONS:
            # Ranks with GPUs send each other sums in bfloat16, so that sums of three ranks are not
            # exact.
            exact = world == 2 or not fsdpc._C.stand_in()
            dtype = torch.bfloat16 if name == "AdamWBF16" and exact else torch.float32
            if name == "AdamWBF16" and not use_orig_params:
                # The random bits depend on a parameter's position in the optimizer. Flat parameters
                # have other positions.
                continue
            model = wrap("fsdpc", Model(dtype), use_orig_params=use_orig_params)
            train(model, make(name, model), range(STEPS), False)
            expected = dict(alone(name, dtype)[0].named_parameters())
            for key, value in full_parameters(model).items():
                same(name, value, expected[key].detach())


@ranks(2)
def test_random_bits_of_flat_parameters(rank, world):
    """The random bits differ from those of an unsharded run, but the parameters stay close to the
    parameters of that run.
    """
    model = wrap("fsdpc", Model(torch.float32), use_orig_params=False)
    train(model, make("AdamWBF16", model), range(STEPS), False)
    expected = dict(alone("AdamWBF16", torch.float32)[0].named_parameters())
    for key, value in full_parameters(model).items():
        torch.testing.assert_close(value, expected[key].detach(), rtol=0, atol=1e-4)


@pytest.mark.long
@ranks(2, 3)
def test_rows_of_dtensors(rank, world):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (world,))
    for name in OPTIONS:
        exact = (
            name == "AdamWBF16" and world == 2
        )  # three bfloat16 gradients are not summed exactly
        dtype = torch.bfloat16 if exact else torch.float32
        model = Model(dtype)
        fully_shard(model, mesh=mesh)
        optimizer, resumed = make(name, model), make(name, model)
        norms = train(model, optimizer, range(STEPS - 1), True)
        by_table = optimizer._kind is not None and not fsdpc._C.stand_in()
        assert (optimizer._table is not None) == by_table
        resumed.load_state_dict(optimizer.state_dict())
        norms += train(model, resumed, range(STEPS - 1, STEPS), True)
        other, expected = alone(name, dtype, clip=True)
        torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
        for (_, found), wanted_value in zip(
            model.named_parameters(), other.parameters(), strict=True
        ):
            same(name, found.full_tensor().detach(), wanted_value.detach())


@ranks(2, 3)
def test_step_and_clip_on_shards(rank, world):
    for use_orig_params in (True, False):
        model = wrap("fsdpc", Model(torch.float32), use_orig_params=use_orig_params)
        norms = train(model, optim.AdamW(model.parameters(), lr=0.01), range(STEPS), True)
        other = Model(torch.float32)
        expected = train(other, optim.AdamW(other.parameters(), lr=0.01), range(STEPS), True)
        torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
        for key, value in full_parameters(model).items():
            torch.testing.assert_close(value, dict(other.named_parameters())[key].detach())


@ranks(2, 3)
def test_states_of_8_bits_resume_unsharded(rank, world):
    """From a full state dict of shards, training continues without sharding and on shards,
    with values equal to the bit.
    """
    FSDP = fsdpc.FullyShardedDataParallel
    model = wrap("fsdpc", Model(torch.float32), use_orig_params=True)
    optimizer = make("AdamW8bit", model)
    train(model, optimizer, range(STEPS), False)
    saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    values = full_parameters(model)
    other = Model(torch.float32)
    with torch.no_grad():
        for key, param in other.named_parameters():
            param.copy_(values[key])
    single = make("AdamW8bit", other)
    numbered = FSDP.rekey_optim_state_dict(saved, fsdpc.OptimStateKeyType.PARAM_ID, other)
    single.load_state_dict(numbered)
    resumed = make("AdamW8bit", model, min_8bit_size=1 << 20, lr=0.0)
    train(model, resumed, range(1), False)  # makes states with other blocks than those loaded below
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
    for each, how in ((other, single), (model, resumed)):
        train(each, how, range(STEPS, STEPS + 2), False)
    expected = dict(other.named_parameters())
    for key, value in full_parameters(model).items():
        assert torch.equal(value, expected[key].detach()), key


@ranks(2)
def test_infinities_of_one_rank_stop_all(rank, world):
    from fsdpc.sharded_grad_scaler import ShardedGradScaler

    model = wrap("fsdpc", Model(torch.float32), use_orig_params=True)
    optimizer = optim.AdamW(model.parameters())
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    before = full_parameters(model)
    loss = scaler.scale(model(0)) * (float("inf") if rank == 1 else 1.0)
    loss.backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    after = full_parameters(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(1)).backward()
    scaler.step(optimizer, max_norm=1.0)
    assert not torch.equal(full_parameters(model)["a"], before["a"])


@ranks(2)
def test_a_rank_that_holds_nothing_of_a_parameter(rank, world):
    """A rank that holds no elements of a parameter also counts the steps of this parameter.
    write_copies refuses DTensors.
    """
    torch.manual_seed(0)
    expected = nn.Linear(6, 1)
    model = fsdpc.fully_shard(copy.deepcopy(expected))
    outside, inside = optim.AdamWBF16(expected.parameters()), optim.AdamWBF16(model.parameters())
    for each, its in ((expected, outside), (model, inside)):
        for step in range(STEPS):
            each(torch.full((2, 6), step + 1.0)).sum().backward()
            its.step()
            its.zero_grad()
    for found, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), value)
    assert [float(inside.state[p]["step"]) for p in model.parameters()] == [STEPS] * 2
    weight = next(model.parameters())
    with pytest.raises(TypeError, match="DTensors"):
        inside.write_copies({weight: torch.empty(weight.shape, dtype=torch.bfloat16)})


class Lamb(torch.optim.Optimizer):
    """An optimizer whose steps are proportional to the parameter's norm. A step needs the norm of
    the whole parameter.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm().clamp(1e-12)))


class Signs(Lamb):
    """An elementwise optimizer, like Lion."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Grouped(Lamb):
    """An optimizer that is elementwise except in groups whose options ask for norms."""

    options: tuple[dict[str, Any], ...] = ({}, {"whole": True})

    def __init__(self, params: Any) -> None:
        params = list(params)
        if isinstance(params[0], torch.Tensor):
            parts = zip((params[:1], params[1:]), self.options, strict=True)
            params = [{"params": part, **more} for part, more in parts]
        super().__init__(params)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    whole = group.get("whole") or group.get("weight_decay")
                    scale = p.norm() / p.grad.norm().clamp(1e-12) if whole else 1.0
                    p.sub_(p.grad * (group["lr"] * scale))


class Valued(Grouped):
    """A Grouped optimizer whose groups have the same options with different values."""

    options = ({"whole": True}, {"whole": False})


class Decayed(Grouped):
    """A Grouped optimizer like timm's Lamb, which takes no norms in groups without weight decay."""

    options = ({"weight_decay": 0.1}, {"weight_decay": 0.0})


class Listed(Lamb):
    """An optimizer whose constructor does not take groups."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        assert all(param.ndim > 0 for param in params)
        super().__init__(params)


class Rows(torch.optim.AdamW):
    """An optimizer that subtracts from the gradient of a matrix the mean of each row."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step(closure)


class SOAP(Signs):
    """An optimizer that fsdpc cannot try. fsdpc finds out by trial steps whether an optimizer is
    elementwise. For the trial, it cannot construct an optimizer of this class: the constructor
    needs an argument that no parameter group keeps.
    """

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


class Prodigy(SOAP):
    """Also an optimizer that fsdpc cannot try. fsdpc knows its name: it is not elementwise."""


class Adam_mini(SOAP):  # noqa: N801  the package's name
    """An optimizer that needs the names of the model's parameters, like the package's class."""


MISLED = [
    *(Lamb, Grouped, Valued, Decayed, Listed, Rows, Prodigy, Adam_mini),
    *(torch.optim.Adafactor, torch.optim.LBFGS),
]
NOT_MISLED = [Signs, SOAP, torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, optim.Lion]


@ranks(2)
@pytest.mark.parametrize("cases", [[*MISLED, *NOT_MISLED]])
def test_optimizers_that_are_not_elementwise_are_named(rank, world, cases):
    """On a rank that has flat shards, fsdpc warns once about each class of optimizers that is not
    elementwise. fsdpc's check leaves torch's random number generator unchanged.
    """

    def said(kind: Any, shard: Any) -> list[str]:
        model = shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
        extra: dict[str, Any] = {"model": model} if issubclass(kind, SOAP) else {}
        if kind is torch.optim.LBFGS:
            extra["max_iter"] = 1  # otherwise ranks would differ in how often they iterate
        optimizer = kind(model.parameters(), **extra)
        state = torch.random.get_rng_state()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                closure()
                optimizer.step(closure)
        assert torch.equal(state, torch.random.get_rng_state())
        return [str(w.message) for w in found if "steps an element" in str(w.message)]

    def by_class(model: nn.Module, **options: Any) -> nn.Module:
        return fsdpc.FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, **options)

    whole = fsdpc.ShardingStrategy.NO_SHARD
    for kind in cases:
        if kind is Lamb:  # the norm of a DTensor is that of the whole parameter
            assert not said(kind, fsdpc.fully_shard)
        assert not said(kind, lambda m: by_class(m, sharding_strategy=whole)), kind
        found = said(kind, by_class)
        assert len(found) == (kind in MISLED), (kind, found)
        assert all(text.startswith(f"{kind.__name__} steps an element") for text in found)
        ours = {torch.optim.Adafactor: "Adafactor of fsdpc.optim", Adam_mini: "AdamMini of"}
        assert all(f"Use {ours.get(kind, 'an elementwise')}" in text for text in found)
        assert not said(kind, by_class), "said once"


@ranks(2)
def test_groups_by_dimensions_that_found_no_matrix_are_named(rank, world):
    """A warning is given if weights would get no decay. No warning is given if matrices are frozen
    or if groups are chosen by name.
    """
    model = wrap("fsdpc", nn.Linear(8, 16), use_orig_params=True)
    weight, bias = model.parameters()

    def said(*groups: list[nn.Parameter], decays: Any = (0.1, 0.0)) -> list[str]:
        of = zip(groups, decays, strict=True)
        made = Signs([{"params": list(p), "weight_decay": decay} for p, decay in of])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            made.step()
        return [str(w.message) for w in found]

    both = [p for p in (weight, bias) if p.dim() < 2]
    (text,) = said([p for p in (weight, bias) if p.dim() >= 2], both)
    assert "weight_decay=0.1 is empty" in text and "Choose groups by name" in text
    assert not said([weight], [bias]) and not said([], [bias]) and not said([weight], [])
    assert not said([], both, decays=(0.05, 0.01)), "frozen, and chosen by name"
    assert not said([], both, decays=(None, None)) and said([], both, decays=(0.1, None))


@ranks(2)
@pytest.mark.parametrize("kind", OPTIONS)
def test_statistics(rank, world, kind):
    """Statistics of whole parameters equal those of unsharded parameters, and steps that collect
    statistics equal steps without statistics to the bit.
    """
    expected = Model(torch.float32)
    single = make(kind, expected)
    models = {
        "FSDP": wrap("fsdpc", Model(torch.float32), use_orig_params=True),
        "flat": wrap("fsdpc", Model(torch.float32), use_orig_params=False),
        "fully_shard": fsdpc.fully_shard(Model(torch.float32)),
    }
    optimizers = {door: make(kind, model) for door, model in models.items()}
    for optimizer in optimizers.values():
        optimizer.measure(every=2)
    pairs = [(models[door], optimizers[door]) for door in models]
    for step in range(STEPS):
        before = {name: value.detach().clone() for name, value in expected.named_parameters()}
        for model, optimizer in ((expected, single), *pairs):
            optimizer.zero_grad()
            (model(step) * 4).backward()
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.step()
        if step == 1:
            every = {
                name: (value.grad.clone(), value.detach().clone(), value.detach() - before[name])
                for name, value in expected.named_parameters()
            }
    flat = {
        "": [torch.cat([every[name][i].reshape(-1) for name in every]) for i in range(3)],
    }
    for door, optimizer in optimizers.items():
        found = optimizer.statistics
        assert found.step == 2
        for name, row in found.parameters.items():
            same_statistics(row, every[name] if name in every else flat[""], door)
        [row] = found.units.values()
        same_statistics(row, flat[""], door)
        assert len(found.parameters) == (1 if door == "flat" else len(SHAPES))
    for name, value in full_parameters(models["FSDP"]).items():
        assert torch.equal(value, dict(expected.named_parameters())[name].detach()), name


def same_statistics(row: Any, values: Any, where: str) -> None:
    wanted = [f(v.double()) for v in values for f in (torch.linalg.vector_norm, amax)]
    torch.testing.assert_close(list(row), [float(each) for each in wanted], rtol=1e-5, atol=1e-9)


def amax(value: torch.Tensor) -> torch.Tensor:
    return value.abs().max()


def test_what_cannot_be_measured_is_refused(tmp_path):
    param = nn.Parameter(torch.ones(5000))
    with pytest.raises(NotImplementedError, match="offload="):
        optim.AdamW([param], offload=optim.Disk(tmp_path)).measure()
    optimizer = optim.AdamW([param])
    with pytest.raises(ValueError, match="every=-1"):
        optimizer.measure(-1)
    optimizer.measure(1)
    param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert optimizer.statistics.parameters["0"].grad_max == float("inf")
    optimizer.measure(0)
    assert optimizer.statistics is None
