"""One training step, sharded and unsharded on the same data: what ``fsdpc check`` runs.

The user's function describes the training; see ``trace.Training``. Each rank runs its own batch on
an unsharded copy, too. The copies' gradients are averaged by ``torch.distributed``, without the
engine. In fp32 the sharded and the unsharded step differ by some 5e-7; mistakes in a program
cause differences of 1e-3 and more.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpc import FullyShardedDataParallel
from fsdpc._comm.bootstrap import comm_for_group
from fsdpc._comm.objects import exchange
from fsdpc._engine.marks import hosts
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc._torch import default_group, tree_leaves, tree_map_only
from fsdpc.plan.sources.trace import Training
from fsdpc.plan.sources.traced import fully_shard_by, policy_for, training_of

LIMIT = 1e-5  # largest relative L2 difference in fp32 that is no error
_CAUSES = ("tied-weights", "optimizer-before-wrap", "optimizer-options")
NOISE = 4.0  # the limit in low precision, as a multiple of the unsharded model's error


@dataclass(frozen=True)
class Finding:
    """A problem that was found. ``kind``: its stable name; ``level``: ``error`` or ``warning``."""

    kind: str
    text: str
    level: str = "error"
    unit: str = ""
    parameter: str = ""


@dataclass
class Result:
    """What one rank found. Ranks exchange the figures, so that all ranks find the same."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, text: str, level: str = "error", **where: str) -> None:
        self.findings.append(Finding(kind, text, level, **where))

    def as_dict(self) -> dict[str, Any]:
        return {"findings": [asdict(f) for f in self.findings], "figures": self.figures}


def checked(made: Any) -> Training:
    """Return ``made`` as a ``Training``. ``TypeError``: ``made`` has none of the known forms."""
    if isinstance(made, dict):
        unknown = set(made) - set(Training.__dataclass_fields__)
        if unknown or not isinstance(made.get("model"), nn.Module):
            raise TypeError(
                f"check: the dict needs a module under 'model'; its keys are "
                f"{', '.join(Training.__dataclass_fields__)}"
                + (f", not {', '.join(sorted(unknown))}" if unknown else "")
            )
    elif not isinstance(made, tuple) or len(made) < 2:
        raise TypeError(
            "check: the function must return (model, inputs), (model, inputs, loss) or a "
            f"dict, not {type(made).__name__}"
        )
    return training_of(made)


def make(factory: Callable[..., Any], rank: int) -> Training:
    """Return the training of one rank: a model that is equal on all ranks, and the rank's data. If
    ``factory`` has a parameter ``rank``, it gets the rank. Otherwise a second call of ``factory``,
    with a seed that depends on the rank, makes the data.
    """
    takes_rank = "rank" in inspect.signature(factory).parameters
    torch.manual_seed(0)
    made = checked(factory(rank=rank) if takes_rank else factory())
    if not takes_rank:
        torch.manual_seed(1000 + rank)
        made = replace(made, inputs=checked(factory()).inputs)
    return made


def compare(
    factory: Callable[..., Any], rank: int, world: int, steps: int = 1, api: str = ""
) -> Result:
    """Run the steps sharded and unsharded, and compare them. ``api`` says how to shard a training
    that has no ``shard``: by ``fully_shard``, or, for any other text, by the wrapper class.
    Collective over the default process group.
    """
    result = Result()
    made = make(factory, rank)
    plain = copy.deepcopy(made.model)
    before_wrap(made, result, world)
    default = fully_shard_by("blocks") if api == "fully_shard" else _shard
    sharded = (made.shard or default)(made.model)
    optimizer = made.optimizer
    optimizer = optimizer(sharded) if _is_function(optimizer) else optimizer
    own = optimizer or torch.optim.SGD(sharded.parameters(), lr=0.1)
    _check_optimizer(own, sharded, result)
    _check_frozen(plain, sharded, result)
    _check_ties(plain, sharded, result)
    _check_options(own, result)
    _check_reduction(sharded, result)
    if _values_differ(plain, sharded, result) or any(f.kind in _CAUSES for f in result.findings):
        return result  # gradients and parameters would differ for the same cause
    reference = _like(own, sharded, plain)
    _check_division(made, plain, result, rank, world)
    for step in range(steps):
        _step(made, sharded, plain, own, reference, result, rank, world, step)
        _check_buffers(sharded, result)
        if any(f.level == "error" for f in result.findings):
            break
    return result


def _is_function(value: Any) -> bool:
    return callable(value) and not hasattr(value, "param_groups")


def _shard(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy_for(model, "blocks"),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


# --- before the step ------------------------------------------------------------------------------


def before_wrap(made: Training, result: Result, world: int) -> None:
    """Find inputs that are equal on all ranks, and parameters and buffers that differ between
    ranks. Collective.
    """
    digests = gathered(_digest(t for t in tree_leaves(made.inputs) if isinstance(t, Tensor)))
    if world > 1 and len(set(digests)) == 1 and made.inputs is not None:
        result.add(
            "equal-data",
            "all ranks have the same inputs, so that more ranks train on no "
            "more data: seed the data by rank, or use a DistributedSampler",
            "warning",
        )
    for kind, tensors in (
        ("initial-values", made.model.named_parameters()),
        ("buffers-differ", made.model.named_buffers()),
    ):
        for name, tensor in tensors:
            if len(set(gathered(_digest([tensor])))) > 1:
                result.add(
                    kind,
                    f"{name} differs between ranks before wrapping, and each rank keeps "
                    "its own part: seed all ranks equally, or pass sync_module_states=True",
                    parameter=name,
                )
                break


def _digest(tensors: Any) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
    return state.hexdigest()


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. Collective."""
    return exchange(comm_for_group(default_group()), value, "fsdpc check")


def _check_optimizer(optimizer: Any, sharded: nn.Module, result: Result) -> None:
    known = {id(p) for p in sharded.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in known]
    if foreign:
        result.add(
            "optimizer-before-wrap",
            f"{len(foreign)} of the optimizer's {len(given)} "
            "parameters are not the sharded model's, so that steps change nothing that the "
            "model reads: make the optimizer after wrapping, or pass use_orig_params=True",
        )
    trained = {id(p) for p in sharded.parameters() if p.requires_grad}
    missing = trained - {id(p) for p in given}
    if missing and not foreign:
        result.add(
            "not-optimized",
            f"{len(missing)} trainable parameters are not in the optimizer",
            "warning",
        )


def owners(sharded: nn.Module) -> dict[str, tuple[Any, Any, str]]:
    """Return a dict from the name of each sharded parameter to its unit, its ``ParamInfo`` in the
    unit, and the name of the unit's module.
    """
    names = {id(m): clean_fqn(name) for name, m in sharded.named_modules()}
    found = {}
    for host in hosts(sharded):
        unit, module = host._unit, host if isinstance(host, nn.Module) else host.modules[0]
        for info in unit.infos if unit is not None else ():
            for owner, attribute in info.sites:
                name = join(names.get(id(owner), ""), attribute)
                found[name] = (unit, info, names[id(module)] or "the root unit")
    return found


def _check_frozen(plain: nn.Module, sharded: nn.Module, result: Result) -> None:
    before = {name: p.requires_grad for name, p in plain.named_parameters()}
    for name, (unit, info, home) in owners(sharded).items():
        trainable = unit.trainable[unit.infos.index(info)]
        if unit.use_orig_params and info.param.requires_grad != trainable:
            result.add(
                "frozen-after-wrap",
                f"requires_grad of {name} was changed after wrapping: freeze before wrapping, so "
                "that memory and reductions follow",
                unit=home,
                parameter=name,
            )
        elif before.get(name, trainable) != trainable:
            result.add(
                "frozen-after-wrap",
                f"{name} is {_word(trainable)} in the sharded model and {_word(before[name])} in "
                "the plain one",
                unit=home,
                parameter=name,
            )


def _word(trainable: bool) -> str:
    return "trained" if trainable else "frozen"


def _check_ties(plain: nn.Module, sharded: nn.Module, result: Result) -> None:
    """Find names that share a parameter in the plain model but not in the sharded model."""
    ties: dict[int, list[str]] = {}
    for name, param in plain.named_parameters(remove_duplicate=False):
        ties.setdefault(id(param), []).append(name)
    homes = owners(sharded)
    for names in ties.values():
        found = {id(homes[name][1]) for name in names if name in homes}
        if len(found) > 1:
            result.add(
                "tied-weights",
                f"{' and '.join(names)} are one parameter in the plain model and several in the "
                "sharded one: tie them before wrapping, in one unit",
                unit=homes[names[0]][2],
                parameter=names[0],
            )


def _values_differ(plain: nn.Module, sharded: nn.Module, result: Result) -> bool:
    """If ranks had different values, give the plain model the values of rank 0. Return whether
    wrapping has given the sharded model other values than those of rank 0. Collective.
    """
    kinds = ("initial-values", "buffers-differ")
    found = [f for f in result.findings if f.kind in kinds]
    if not found:
        return False
    for tensor in (*plain.parameters(), *plain.buffers()):
        dist.broadcast(tensor.detach(), 0)
    values = {clean_fqn(name): b.detach() for name, b in sharded.named_buffers()}
    values |= _gather(sharded, grads=False)
    same = all(
        name not in values or torch.equal(values[name].to(tensor.dtype), tensor)
        for name, tensor in (*plain.named_parameters(), *plain.named_buffers())
    )
    if all(gathered(same)):  # by sync_module_states=True, or by the user's broadcast
        result.findings = [f for f in result.findings if f.kind not in kinds]
        return False
    return True


def _check_options(optimizer: Any, result: Result) -> None:
    """Find an option of a parameter group that differs from the option on rank 0. Collective."""
    mine = [
        {k: repr(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    for rank, theirs in enumerate(all_ranks := gathered(mine)):
        for at, (one, other) in enumerate(zip(all_ranks[0], theirs, strict=False)):
            for key in one:
                if one[key] != other.get(key):
                    result.add(
                        "optimizer-options",
                        f"{key} of parameter group {at} is {one[key]} on rank 0 and "
                        f"{other.get(key)} on rank {rank}, so that parts of one parameter take "
                        "different steps: give all ranks the same options",
                    )
                    return


def _check_reduction(sharded: nn.Module, result: Result) -> None:
    """Find gradients that are summed in a narrower dtype than the one they are computed in."""
    for unit, info, home in owners(sharded).values():
        computed = unit.param_dtype or unit.dtypes[unit.infos.index(info)]
        summed = unit.reduce_dtype
        if summed is not None and summed.itemsize < computed.itemsize:
            result.add(
                "narrow-reduction",
                f"gradients of {home} are computed in {computed} and summed over ranks in "
                f"{summed}: set reduce_dtype=torch.float32, or leave it out",
                "warning",
                unit=home,
            )
            return


def _check_division(
    made: Training, plain: nn.Module, result: Result, rank: int, world: int
) -> None:
    """Find a loss that is divided by the number of ranks. The engine averages gradients over ranks,
    and so would divide a second time.
    """
    losses, model = [], copy.deepcopy(plain)
    for ranks in (world, 1):
        with torch.no_grad(), mock.patch.multiple(dist, get_world_size=lambda *_, n=ranks, **__: n):
            with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)):
                torch.manual_seed(77 + rank)
                losses.append(float(made.forward(model)))
    many, one = losses
    if world > 1 and one and abs(many * world / one - 1) < 1e-4:
        result.add(
            "divided-twice",
            f"the loss is {many:.6g} with {world} ranks and {one:.6g} if there were one: gradients "
            "are averaged over ranks already, so that the loss must not be divided by their number",
        )


def _check_buffers(sharded: nn.Module, result: Result) -> None:
    """Find a buffer that differs between ranks after a step. Collective."""
    if any(f.kind == "buffers-drift" for f in result.findings):
        return
    for name, buffer in sharded.named_buffers():
        if len(set(gathered(_digest([buffer])))) > 1:
            result.add(
                "buffers-drift",
                f"{clean_fqn(name)} differs between ranks after a step, because each rank computes "
                "it from its own batch, and a checkpoint has one rank's: use nn.SyncBatchNorm, or "
                "average buffers over ranks before evaluating and saving",
                "warning",
                parameter=clean_fqn(name),
            )
            return


def _units(sharded: nn.Module) -> Iterator[Any]:
    return (host._unit for host in hosts(sharded) if host._unit is not None)


# --- the step -------------------------------------------------------------------------------------


def _like(optimizer: Any, sharded: nn.Module, plain: nn.Module) -> Any:
    """Return an optimizer of the plain model's parameters with the class and the options of
    ``optimizer``, or None if ``optimizer`` has several groups.
    """
    if len(optimizer.param_groups) != 1:
        return None
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    accepted = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in options.items() if k in accepted}
    return type(optimizer)([p for p in plain.parameters() if p.requires_grad], **options)


def _step(
    made: Training,
    sharded: nn.Module,
    plain: nn.Module,
    own: Any,
    reference: Any,
    result: Result,
    rank: int,
    world: int,
    step: int,
) -> None:
    losses = []
    for model in (plain, sharded):
        torch.manual_seed(77 + rank + 1000 * step)  # both models draw the same dropout masks
        model.zero_grad()
        loss = made.forward(model)
        loss.backward()
        losses.append(float(loss.detach()))
    _average(plain, world)
    limit = _limit(made, sharded, plain, world, rank, step)
    homes = {name: home for name, (_, _, home) in owners(sharded).items()}
    _losses(losses, limit, result)

    def matches(what: str) -> bool:
        found = _gather(sharded, grads="gradient" in what)
        right = {
            n: p.grad if "gradient" in what else p.detach() for n, p in plain.named_parameters()
        }
        _tensors(what, found, right, limit, result, homes)
        return not any(f.level == "error" for f in result.findings)

    if not matches("gradient"):
        return
    if made.clip is not None:
        made.clip(plain)
        made.clip(sharded)
        if not matches("clipped gradient"):
            return
    own.step()
    if reference is not None:
        reference.step()
        matches("updated parameter")


def _average(plain: nn.Module, world: int) -> None:
    """Average gradients over ranks. As in the engine, ranks without a gradient contribute zeros."""
    for param in plain.parameters():
        used = torch.tensor(float(param.grad is not None), device="cpu")
        dist.all_reduce(used)
        if used.item() == 0:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= world


def _limit(
    made: Training, sharded: nn.Module, plain: nn.Module, world: int, rank: int, step: int
) -> float:
    """Return the largest difference that is no error: 1e-5, or, if the run has low precision, a
    multiple of the plain model's error in that precision.
    """
    narrow = {u.param_dtype for u in _units(sharded) if u.param_dtype is not None}
    narrow |= {u.reduce_dtype for u in _units(sharded) if u.reduce_dtype is not None}
    narrow -= {torch.float32, torch.float64}
    if not narrow:
        return LIMIT
    low = copy.deepcopy(plain).to(next(iter(narrow)))
    low.zero_grad()
    torch.manual_seed(77 + rank + 1000 * step)
    inputs = tree_map_only(
        Tensor, lambda t: t.to(next(iter(narrow))) if t.is_floating_point() else t, made.inputs
    )
    replace(made, inputs=inputs).forward(low).backward()
    _average(low, world)
    worst = LIMIT
    exact = dict(plain.named_parameters())
    for name, param in low.named_parameters():
        if param.grad is not None and exact[name].grad is not None:
            worst = max(worst, distance(param.grad.float(), exact[name].grad)[0])
    return NOISE * worst


def _gather(sharded: nn.Module, grads: bool) -> dict[str, Tensor | None]:
    """Return the whole gradients (if ``grads``) or values of parameters by name. Collective."""
    if any(unit.dtensors for unit in _units(sharded)):
        return {
            clean_fqn(name): _whole(p.grad if grads else p)
            for name, p in sharded.named_parameters()
        }
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False, with_grads=grads):
        return {
            clean_fqn(name): _copy(p.grad if grads else p) for name, p in sharded.named_parameters()
        }


def _whole(tensor: Tensor | None) -> Tensor | None:
    """Return all rows of a DTensor, or a copy of any other tensor. Collective for a DTensor."""
    if tensor is not None and isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    return _copy(tensor)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def distance(found: Tensor, right: Tensor) -> tuple[float, float, float]:
    """Return (relative L2 difference, ratio of norms, cosine) of two tensors."""
    a, b = found.double().flatten(), right.double().flatten()
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_b == 0:
        return (0.0 if norm_a == 0 else float("inf"), 1.0, 1.0)
    cosine = float(a @ b) / (norm_a * norm_b) if norm_a else 0.0
    return float((a - b).norm()) / norm_b, norm_a / norm_b, cosine


def _losses(losses: list[float], limit: float, result: Result) -> None:
    plain, sharded = losses
    off = abs(sharded - plain) / max(abs(plain), 1e-12)
    result.figures["loss"] = max(gathered(off))
    if result.figures["loss"] > limit:
        result.add(
            "loss",
            f"the loss differs by {result.figures['loss']:.2g} (limit {limit:.1g}): "
            f"{sharded:.6g} sharded, {plain:.6g} unsharded on this rank; the forward does "
            "not compute the same",
        )


def _tensors(
    what: str,
    found: dict[str, Any],
    right: dict[str, Any],
    limit: float,
    result: Result,
    homes: dict[str, str],
) -> None:
    """Add a finding on the first parameter that differs, and record the largest difference."""
    rows = {}
    for name, tensor in right.items():
        mine = found.get(name)
        if tensor is None and mine is None:
            if what == "gradient":
                text = f"{name} has no gradient on any rank"
                result.add("unused", text, "warning", parameter=name)
            continue
        zero = torch.zeros_like(tensor if tensor is not None else mine)
        rows[name] = distance(zero if mine is None else mine, zero if tensor is None else tensor)
    result.figures[what] = max((off for off, _, _ in rows.values()), default=0.0)
    bad = [name for name, (off, _, _) in rows.items() if not off <= limit]
    if not bad:
        return
    off, ratio, cosine = rows[bad[0]]
    cause = fault(ratio, cosine, what.startswith("clipped"))
    unit = homes.get(bad[0], "")
    result.add(
        what.replace(" ", "-"),
        f"{what} of {bad[0]} ({unit or 'in no unit: ignored'}) differs by {off:.2g} "
        f"(limit {limit:.1g}; {len(bad)} of {len(rows)} differ): {cause}",
        unit=unit,
        parameter=bad[0],
    )


def fault(ratio: float, cosine: float, clipped: bool = False) -> str:
    """Return a text on the kind of fault that a ratio of norms and a cosine suggest. ``clipped``:
    the gradients were still equal before the training's ``clip``.
    """
    if ratio < 1e-6:
        return "nothing arrives"
    if 1 - cosine < 1e-6:
        return (
            f"same direction, {ratio:.4g} times as long: a factor, such as a division by the "
            "world that is missing or made twice, or a local norm"
        )
    if clipped and cosine > 0.9:
        return (
            f"nearly the same direction (cosine {cosine:.4f}): each rank multiplies by a factor of "
            "its own, as with a local norm"
        )
    if cosine > 0.98:
        return f"nearly the same direction (cosine {cosine:.4f}): rounding, or a part is missing"
    return (
        f"another direction (cosine {cosine:.3f}): other data, a rank's part lost, or mixed values"
    )
