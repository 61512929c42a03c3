"""Small models, and the unsharded reference with which the multi-rank tests compare.

`Reference` trains an unsharded copy as all ranks together should. Every rank runs its own batch on
the copy. The ranks exchange their gradients through torch.distributed only, add them in rank order
in the accumulation type, and multiply the sum by 1 / world. Where the engine adds in the same
order, its gradients and parameters must be bitwise equal.

Full values are read through the public interface only, so the same tests also run on torch's FSDP.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# The device of models: the CPU, or the GPU that all ranks share (pytest --gpu cuda).
ON_GPU = os.environ.get("FSDPC_TEST_GPU") == "cuda"
PLACE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

FLAT = "_flat_param"  # a part of the name of every flat parameter


class Block(nn.Module):
    """A residual block. Its 155 elements (with the default sizes) cannot be divided evenly among 2,
    3 or 4 ranks."""

    def __init__(self, width: int = 6, hidden: int = 11) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """A model of an embedding, blocks and a head. forward(tokens) returns logits."""

    def __init__(self, blocks: int = 2, width: int = 6, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def toy(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> Toy:
    torch.manual_seed(seed)
    return Toy(**sizes).to(dtype)


def tokens(rank: int, step: int, micro: int = 0, *, vocabulary: int = 13) -> Tensor:
    """A batch of token ids that is different for each rank, step and micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(vocabulary, (2, 5), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return nn.functional.cross_entropy(
        logits.float().flatten(0, -2)
        if logits.dtype in (torch.float16, torch.bfloat16)
        else logits.flatten(0, -2),
        batch.flatten(),
    )


# --- wrapping, the same for fsdpc and torch ------------------------------------------------------


def wrap(engine: str, module: nn.Module, **options: Any) -> nn.Module:
    """Wrap `module` in the FullyShardedDataParallel of the package `engine`, on the device of
    models."""
    options.setdefault("device_id", PLACE)
    return importlib.import_module(engine).FullyShardedDataParallel(module, **options)


def wrap_blocks(engine: str, module: nn.Module, *classes: type, **options: Any) -> nn.Module:
    """Wrap each module of `classes` (default: Block) as a unit, and the root as a further unit."""
    policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy(set(classes or (Block,)))
    return wrap(engine, module, auto_wrap_policy=policy, **options)


def shard_blocks(model: nn.Module, shard: Any = None, **options: Any) -> nn.Module:
    """Shard the model by `shard` (default: fsdpc's fully_shard): one unit for each block, and one
    for the root."""
    if shard is None:
        from fsdpc import fully_shard as shard
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def by_door(door: str, model: nn.Module, **options: Any) -> nn.Module:
    """Shard the model, with one unit for each block and one for the root: in place ("fully_shard"),
    or by a wrapper with flat parameters ("flat") or original parameters (any other `door`).
    """
    if door == "fully_shard":
        return shard_blocks(model, **options)
    blocks = list(model.blocks)
    policy = torch.distributed.fsdp.wrap.CustomPolicy(lambda module: module in blocks)
    options["use_orig_params"] = door != "flat"
    return wrap("fsdpc", model, auto_wrap_policy=policy, **options)


def summon(model: nn.Module, **options: Any) -> Any:
    return type(model).summon_full_params(model, **options)


def clean(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter at full size, by its original name. Collective."""
    with summon(model, writeback=False):
        return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient at full size (zeros where a rank has none). Collective.

    The gradients are put in the parameters' place for a moment, because only parameters can be
    gathered in every mode.
    """
    with values_replaced(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad):
        return full_parameters(model)


def none_gradients(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are not empty and have no gradient on any rank.
    Collective."""
    params = {clean(name): p for name, p in model.named_parameters()}
    if any(FLAT in name for name in params):
        return none_in_flat_gradients(model)
    holds = [
        (p.numel() > 0 and p.grad is None, p.numel() > 0 and p.grad is not None)
        for p in params.values()
    ]
    found = torch.tensor(holds, dtype=torch.uint8, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    apart = [name for name, flags in zip(params, found.tolist(), strict=True) if all(flags)]
    assert not apart, f"a gradient on some ranks, and None on others: {apart}"
    return {name for name, (none, _) in zip(params, found.tolist(), strict=True) if none}


def none_in_flat_gradients(model: nn.Module) -> set[str]:
    """Return ``none_gradients`` of a model with flat parameters, whose members have no separate
    gradients."""
    with values_replaced(model, lambda p: torch.full_like(p, float(p.grad is not None))):
        return {
            name
            for name, value in full_parameters(model).items()
            if value.numel() and not value.any()
        }


@contextmanager
def values_replaced(model: nn.Module, value_of: Callable[[Tensor], Tensor]) -> Iterator[None]:
    saved = [(p, p.detach().clone()) for p in model.parameters()]
    with torch.no_grad():
        for p, _ in saved:
            p.copy_(value_of(p).reshape(p.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)


# --- the reference -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes in which the ranks compute and reduce. None stands for the parameters' own
    dtype."""

    name: str
    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def options(self) -> dict[str, Any]:
        if self.param is None and self.reduce is None:
            return {}
        from torch.distributed.fsdp import MixedPrecision

        return {"mixed_precision": MixedPrecision(param_dtype=self.param, reduce_dtype=self.reduce)}

    @property
    def wire(self) -> torch.dtype:
        return self.reduce or self.param or self.model

    @property
    def exact(self) -> bool:
        """True if nothing is rounded between the ranks' gradients and their sum."""
        return self.wire in (torch.float32, torch.float64)


PRECISIONS = [
    Precision("fp32"),
    Precision("bf16", param=torch.bfloat16, reduce=torch.float32),
    Precision("bf16-bf16", param=torch.bfloat16, reduce=torch.bfloat16),
    Precision("fp16", param=torch.float16),
    Precision("fp64", model=torch.float64),
]


def sharding_groups(strategy: Any, world: int) -> list[list[int]]:
    """Return the `groups` of a Reference for a strategy. Hybrid strategies have two replicas."""
    if strategy.name == "NO_SHARD":
        return [[rank] for rank in range(world)]
    if "HYBRID" in strategy.name:
        return [list(range(world // 2)), list(range(world // 2, world))]
    return [list(range(world))]


class Reference:
    """The unsharded copy that this rank trains in step with the other ranks.

    `groups` are the sharding groups. Gradients are added within each group first, and then over the
    groups, which are replicas: [[0, 1], [2, 3]] are two replicas of two shards each, and [[0], [1]]
    are two ranks that shard nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision = PRECISIONS[0],
        *,
        groups: list[list[int]] | None = None,
        loss_of: Callable[[nn.Module, Any], Tensor] = loss_of,
    ) -> None:
        self.master = copy.deepcopy(model)
        self.compute = copy.deepcopy(model)
        if precision.param is not None:
            self.compute.to(precision.param)
        self.precision = precision
        self.world = dist.get_world_size()
        self.groups = groups or [list(range(self.world))]
        self.loss_of = loss_of
        self.pending: list[Tensor | None] = [None] * len(list(self.master.parameters()))

    def wire(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which the gradient of this parameter of the master is reduced."""
        return self.precision.reduce or self.precision.param or parameter.dtype

    def exact(self, wire: torch.dtype) -> bool:
        """Return True if gradients that are sent in the dtype `wire` are not rounded."""
        return wire in (torch.float32, torch.float64)

    def backward(self, batch: Any, *, sync: bool = True, times: int = 1) -> Tensor:
        """Run a micro-batch: one forward, and `times` backwards. Unless sync=False, the gradients
        of all ranks are added to the master's after each backward."""
        loss = self.forward(batch)
        for i in range(times):
            self.compute.zero_grad(set_to_none=True)
            loss.backward(retain_graph=i + 1 < times)
            self.take_gradients()
            if sync:
                self.reduce()
        return loss.detach()

    def forward(self, batch: Any, *, refresh: bool = True) -> Tensor:
        """Return the loss of the compute copy. With `refresh`, the copy takes over the master's
        values first."""
        with torch.no_grad():
            pairs = zip(self.compute.parameters(), self.master.parameters(), strict=True)
            for low, high in pairs if refresh else ():
                low.copy_(high)
        return self.loss_of(self.compute, tree_map(self.cast_input, batch))

    def cast_input(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.precision.param) if floating and self.precision.param else value

    def take_gradients(self) -> None:
        """Add the compute copy's gradients to those that wait for the reduction (`pending`)."""
        pairs = zip(self.compute.parameters(), self.master.parameters(), strict=True)
        for i, (low, high) in enumerate(pairs):
            if low.grad is not None:
                grad = low.grad.to(accumulate_of(self.wire(high)))
                self.pending[i] = grad if self.pending[i] is None else self.pending[i] + grad
                low.grad = None

    def reduce(self) -> None:
        used = torch.tensor([float(g is not None) for g in self.pending])
        dist.all_reduce(used)
        indexed = [(i, p) for i, p in enumerate(self.master.parameters()) if used[i]]
        for wire in sorted({self.wire(p) for _, p in indexed}, key=str):
            of_wire = [(i, p) for i, p in indexed if self.wire(p) == wire]
            accumulate = accumulate_of(wire)
            local = torch.cat(
                [
                    torch.zeros(p.numel(), dtype=accumulate)
                    if self.pending[i] is None
                    else self.pending[i].to(wire).to(accumulate).flatten()
                    for i, p in of_wire
                ]
            )
            total = self.add_ranks(local, wire)
            parts = total.split([p.numel() for _, p in of_wire])
            for (_, p), part in zip(of_wire, parts, strict=True):
                part = part.view(p.shape).to(p.dtype)
                p.grad = part.clone() if p.grad is None else p.grad + part
        self.pending = [None] * len(self.pending)

    def add_ranks(self, local: Tensor, wire: torch.dtype) -> Tensor:
        """Return the mean over the ranks. Gradients are added in rank order, host by host within a
        group, and then group by group. The sum is multiplied by 1 / world once, at the end.
        """
        everyone = [torch.empty_like(local) for _ in range(self.world)]
        dist.all_gather(everyone, local)
        total = None
        for group in self.groups:
            partial = in_order([in_order([everyone[r] for r in host]) for host in by_host(group)])
            total = partial if total is None else total + partial
        return total * (1.0 / self.world)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.master.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.master.named_parameters()
        }

    def none_gradients(self) -> set[str]:
        return {name for name, p in self.master.named_parameters() if p.numel() and p.grad is None}


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def by_host(group: list[int]) -> list[list[int]]:
    """Return the ranks of each host of a group (see `pytest --hosts`), hosts in the order of their
    first ranks."""
    places = os.environ.get("FSDPC_TEST_PLACES", "").split()
    hosts: dict[str, list[int]] = {}
    for rank in group:
        hosts.setdefault(places[rank] if places else "", []).append(rank)
    return list(hosts.values())


def accumulate_of(wire: torch.dtype) -> torch.dtype:
    return torch.float64 if wire == torch.float64 else torch.float32


# How often a gradient is rounded to the wire's dtype: by pack, by the sum, by the scaling, and by
# the second stage of a hybrid sum.
ROUNDINGS = 4


def check_gradients(engine: str, model: nn.Module, reference: Reference, what: str) -> None:
    """Check that the gradients equal the reference's, bitwise if nothing is rounded on the wire.

    If something is rounded, the reference takes over the engine's gradients, so that differences
    between gradients do not disturb the comparison of the next optimizer step. Collective.
    """
    got, expected = full_gradients(model), reference.gradients()
    assert got.keys() == expected.keys(), f"names differ: {sorted(got.keys() ^ expected.keys())}"
    texts = []
    for name, p in reference.master.named_parameters():
        wire = reference.wire(p)
        exact = engine == "fsdpc" and reference.exact(wire) or p.grad is None
        rtol = 0.0 if exact else ROUNDINGS * torch.finfo(wire).eps if p.grad is not None else 0.0
        texts.append(difference({name: got[name]}, {name: expected[name]}, rtol=rtol))
        if not exact and p.grad is not None:
            p.grad.copy_(got[name])
    text = "\n".join(t for t in texts if t)
    assert not text, f"gradients {what}:\n{text}"


def check_parameters(engine: str, model: nn.Module, reference: Reference, what: str) -> None:
    """Check that the parameters equal the reference's. Collective."""
    check_equal(
        full_parameters(model),
        reference.parameters(),
        f"parameters {what}",
        rtol=0.0 if engine == "fsdpc" else 1e-6,
    )


def compare_training(
    engine: str,
    model: nn.Module,
    sharded: Callable[[nn.Module], nn.Module],
    batch_of: Callable[[int], Any],
    *,
    steps: int = 3,
    precision: Precision = PRECISIONS[0],
    loss_of: Callable[[nn.Module, Any], Tensor] = loss_of,
    times: int = 1,
    groups: list[list[int]] | None = None,
) -> nn.Module:
    """Train `sharded(model)` and the reference side by side with AdamW; return the sharded model.

    `batch_of(step)` gives this rank's batch. The sets of parameters without any gradient are
    compared too, because weight decay moves a parameter whose gradient is zero, but not a parameter
    whose gradient is None. Collective.
    """
    reference = Reference(model, precision, loss_of=loss_of, groups=groups)
    model = sharded(model)
    optimizers = [
        torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3
        )  # not the default eps, which is 0 in fp16
        for m in (model, reference.master)
    ]
    for step in range(steps):
        loss = loss_of(model, batch_of(step))
        for i in range(times):
            loss.backward(retain_graph=i + 1 < times)
        expected = reference.backward(batch_of(step), times=times)
        if engine == "fsdpc" and precision.exact:
            assert torch.equal(loss.detach(), expected), f"loss {loss} != {expected}, step {step}"
        check_gradients(engine, model, reference, f"of step {step}")
        got, without = none_gradients(model), reference.none_gradients()
        assert got == without, f"no gradient: {sorted(got)}, expected {sorted(without)}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_parameters(engine, model, reference, f"after step {step}")
    return model


def difference(
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    rtol: float = 0.0,
    atol: float | None = None,
) -> str:
    """Return "" if all values are equal (bitwise if rtol is 0), else one line per parameter that
    differs.

    `rtol` is relative to the largest magnitude in a tensor, because sums that cancel have no other
    scale.
    """
    if got.keys() != expected.keys():
        return f"names differ: {sorted(got.keys() ^ expected.keys())}"
    lines = []
    for name, value in got.items():
        other = expected[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            lines.append(
                f"{name}: {value.dtype} {tuple(value.shape)} but expected "
                f"{other.dtype} {tuple(other.shape)}"
            )
            continue
        if torch.equal(value, other):
            continue
        gap = (value.double() - other.double()).abs()
        limit = rtol * other.double().abs().max() if rtol else 0.0
        if not bool((gap <= limit + (atol or 0.0)).all()):  # also catches NaN
            where = int(gap.nan_to_num(float("inf")).argmax())
            lines.append(
                f"{name}: got {value.flatten()[where]:.9g}, expected "
                f"{other.flatten()[where]:.9g} at flat index {where} "
                f"({int((value != other).sum())} of {value.numel()} elements differ)"
            )
    return "\n".join(lines)


def check_equal(got: dict[str, Tensor], expected: dict[str, Tensor], what: str, **limits: Any):
    text = difference(got, expected, **limits)
    assert not text, f"{what}:\n{text}"


def no_sync_if(model: nn.Module, condition: bool) -> Any:
    return model.no_sync() if condition else nullcontext()
