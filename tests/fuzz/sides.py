"""The two models on which a program runs: the sharded model, and its unsharded copy.

`Side` is a program's view of either model. The unsharded side averages gradients over the ranks
where the sharded side must have reduced them: before gradients are recorded, before clipping, and
before the optimizer's step.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import kinds
import torch
import torch.distributed as dist
import toys
from cases import Case, Config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdpc import activations

Records = list[tuple[str, dict[str, Tensor]]]


class Side:
    """A program's view of a model, with the operations of sharded and of unsharded models."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model = case, model
        self.records: Records = []
        self.late: Tensor | None = None

    def record(self, label: str, values: dict[str, Tensor]) -> None:
        self.records.append((label, {k: v.detach().clone() for k, v in values.items()}))

    def make_optimizer(self, kind: str) -> None:
        params = list(self.trained().parameters())
        self.optimizer: torch.optim.Optimizer = {
            "sgd": lambda: torch.optim.SGD(params, lr=0.05),
            "momentum": lambda: torch.optim.SGD(params, lr=0.05, momentum=0.5, weight_decay=0.1),
            "adamw": lambda: torch.optim.AdamW(params, lr=0.02, eps=1e-2, weight_decay=0.1),
            "adagrad": lambda: torch.optim.Adagrad(params, lr=0.02, eps=1e-2),
        }[kind]()

    def trained(self) -> nn.Module:
        """Return the module whose parameters the optimizer steps."""
        return self.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).float()

    def refresh(self) -> None: ...

    def backward(self, loss: Tensor, sync: bool = True, **options: Any) -> None:
        loss.backward(**options)

    def no_sync(self) -> Any:
        return nullcontext()

    def average(self) -> None: ...

    def ask(self, forward: Callable[[], Tensor], into: bool) -> None:
        """Compute the gradients of all parameters: by a backward with ``inputs`` if ``into`` is
        true, else by ``autograd.grad``."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        loss = forward()
        if into:
            self.backward(loss, inputs=params)
            return
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for p, grad in zip(params, grads, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad

    def head_weight(self) -> Tensor | None:
        """Return the head's weight without calling the head, or None if the weight cannot be
        read."""
        config = self.case.config
        return self.model.head.weight if config.in_place and config.keeps_root else None

    def flags(self) -> dict[str, Tensor]:
        return {
            toys.clean(n): torch.tensor(float(p.requires_grad))
            for n, p in self.trained().named_parameters()
        }

    def write(self, factor: float) -> None:
        with torch.no_grad():
            for p in self.trained().parameters():
                if p.is_floating_point():
                    p.mul_(factor)

    def set_by_user(self, factor: float) -> None:
        self.write(factor)

    def freeze(self, choice: float, frozen: bool) -> None:
        named = {toys.clean(n): p for n, p in self.trained().named_parameters()}
        for p in chosen(named, choice):
            p.requires_grad_(not frozen)

    def copy_average(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def reload_optimizer(self, kind: str) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        self.make_optimizer(kind)
        self.optimizer.load_state_dict(state)


class Abandoned(Exception):
    """An error that ends a program after the program has raised on another rank."""


def agree(going_on: bool) -> bool:
    """Return True if all ranks go on. A rank whose program raised calls this once, with False."""
    stopped = torch.tensor(float(not going_on))
    dist.all_reduce(stopped)
    return not stopped


class Plain(Side):
    """The unsharded copy. With mixed precision, a further copy in the low precision computes."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__(case, model)
        self.master = model
        self.param = getattr(torch, case.config.param) if case.config.param else None
        if self.param is not None:
            self.model = copy.deepcopy(model).to(self.param)
        self.world = dist.get_world_size()
        self.make_optimizer(case.optimizer)

    def trained(self) -> nn.Module:
        return self.master

    def refresh(self) -> None:
        if self.param is not None:
            with torch.no_grad():
                for low, high in zip(
                    self.model.parameters(), self.master.parameters(), strict=True
                ):
                    low.copy_(high)
                    low.requires_grad_(high.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.param is None else x.to(self.param))

    def backward(self, loss: Tensor, sync: bool = True, **options: Any) -> None:
        try:
            loss.backward(**options)
        finally:
            self.take()

    def take(self) -> None:
        if self.param is None:
            return
        for low, high in zip(self.model.parameters(), self.master.parameters(), strict=True):
            if low.grad is not None:
                grad = low.grad.to(high.dtype)
                high.grad = grad if high.grad is None else high.grad + grad
                low.grad = None

    def average(self) -> None:
        if not agree(True):
            raise Abandoned
        params = [p for p in self.master.parameters() if p.is_floating_point()]
        used = torch.tensor([float(p.grad is not None) for p in params])
        dist.all_reduce(used)
        for i, p in enumerate(params):
            if used[i] == 0:
                continue
            total = (torch.zeros_like(p) if p.grad is None else p.grad).clone(
                memory_format=torch.contiguous_format  # strides may differ between the ranks
            )
            dist.all_reduce(total)
            p.grad = total / self.world * (0.5 if self.case.config.hook else 1.0)

    def gradients(self) -> dict[str, Tensor]:
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in self.master.named_parameters()
        }

    def ask(self, forward: Callable[[], Tensor], into: bool) -> None:
        super().ask(forward, into)
        self.take()

    def clip(self, limit: float, norm: float, by_utils: bool) -> Tensor:
        grads = [p for p in self.master.parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(grads, limit, norm)

    def values(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.master.named_parameters()}

    def save(self, sharded: bool) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.master.state_dict().items()}

    def load(self, state: dict[str, Any], sharded: bool) -> None:
        self.master.load_state_dict(state)

    def load_part(self, state: dict[str, Any]) -> None:
        self.master.load_state_dict(state, strict=False)

    def unfreeze(self, choice: float) -> None:
        for _, p in sorted(self.master.named_parameters()):
            if hasattr(p, "was_frozen") and p.is_floating_point():
                p.requires_grad_(True)


class OfFsdpc(Side):
    """A model that `shard` has sharded, perhaps with a second sharded model beside it."""

    def __init__(
        self, case: Case, model: nn.Module, shard: Callable[[], nn.Module], groups: Any = None
    ) -> None:
        self.frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        check_blocks(model)
        self.second = second_model(case.config, groups)
        super().__init__(case, shard())
        for name, p in self.model.named_parameters():
            if toys.clean(name) in self.frozen:
                p.was_frozen = True  # p may have replaced a parameter on the meta device
        self.make_optimizer(case.optimizer)

    def load_part(self, state: dict[str, Any]) -> None:
        load_part(self.model, state)

    def unfreeze(self, choice: float) -> None:
        for name, p in self.model.named_parameters():
            if toys.clean(name) in self.frozen and p.is_floating_point():
                p.requires_grad_(True)


class Sharded(OfFsdpc):
    def __init__(self, case: Case, model: nn.Module, groups: Any = None) -> None:
        super().__init__(case, model, lambda: shard(model, case.config, groups), groups)

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def gradients(self) -> dict[str, Tensor]:
        config = self.case.config
        if config.grads_by == "swap" or config.strategy == "NO_SHARD" or not config.use_orig:
            return toys.full_gradients(self.model)
        with toys.summon(self.model, with_grads=True, writeback=False):
            return {
                toys.clean(n): torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in self.model.named_parameters()
            }

    def clip(self, limit: float, norm: float, by_utils: bool) -> Tensor:
        if by_utils:
            return nn.utils.clip_grad_norm_(list(self.model.parameters()), limit, norm)
        return self.model.clip_grad_norm_(limit, norm)

    def flags(self) -> dict[str, Tensor]:
        with toys.summon(self.model, writeback=False):
            return super().flags()

    def values(self) -> dict[str, Tensor]:
        return toys.full_parameters(self.model)

    def write(self, factor: float) -> None:
        with toys.summon(self.model), torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.mul_(factor)

    def set_by_user(self, factor: float) -> None:
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                if p.is_floating_point():
                    if i % 2:
                        p.data = p.data * factor
                    else:
                        p.mul_(factor)

    def state_type(self, sharded: bool) -> Any:
        from torch.distributed.fsdp import StateDictType

        kind = StateDictType.SHARDED_STATE_DICT if sharded else StateDictType.FULL_STATE_DICT
        return type(self.model).state_dict_type(self.model, kind)

    def save(self, sharded: bool) -> dict[str, Tensor]:
        with self.state_type(sharded):
            state = self.model.state_dict()
        return copy.deepcopy(state) if sharded else {k: v.clone() for k, v in state.items()}

    def load(self, state: dict[str, Any], sharded: bool) -> None:
        with self.state_type(sharded):
            self.model.load_state_dict(state)

    def reload_optimizer(self, kind: str) -> None:
        cls = type(self.model)
        state = cls.optim_state_dict(self.model, self.optimizer)
        self.make_optimizer(kind)
        self.optimizer.load_state_dict(
            cls.optim_state_dict_to_load(self.model, self.optimizer, state)
        )


class InPlace(OfFsdpc):
    """A model sharded by ``fully_shard``. Its parameters are DTensors, so torch's functions work on
    them."""

    def __init__(self, case: Case, model: nn.Module, groups: Any = None) -> None:
        super().__init__(case, model, lambda: filled(model, case.config))
        self.unsynced = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of some units unsummed: of all units in every third call, and in the
        other calls either of the units with even numbers or of the units with odd numbers."""
        units = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        self.unsynced += 1
        for i, unit in enumerate(units):
            if self.unsynced % 3 == 0 or (i + self.unsynced) % 2:
                unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def gradients(self) -> dict[str, Tensor]:
        return {
            toys.clean(n): (torch.zeros_like(p) if p.grad is None else p.grad).full_tensor()
            for n, p in self.model.named_parameters()
        }

    def clip(self, limit: float, norm: float, by_utils: bool) -> Tensor:
        grads = [p for p in self.model.parameters() if by_utils or p.grad is not None]
        total = nn.utils.clip_grad_norm_(grads, limit, norm)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def values(self) -> dict[str, Tensor]:
        return {toys.clean(n): p.detach().full_tensor() for n, p in self.model.named_parameters()}

    def set_by_user(self, factor: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.data = p.data * factor

    def save(self, sharded: bool) -> dict[str, Tensor]:
        state = self.model.state_dict()
        if sharded:
            return {k: v.clone() for k, v in state.items()}
        return {
            k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()
        }

    def load(self, state: dict[str, Any], sharded: bool) -> None:
        self.model.load_state_dict(state if sharded else as_parts(self.model, state))

    def copy_average(self) -> nn.Module:
        plain = copied(self.case.model_before)
        plain.load_state_dict(self.save(False))
        return plain.train(self.model.training)


def shard_in_place(model: nn.Module, config: Config) -> nn.Module:
    """Call ``fully_shard`` on each wrapped module, the innermost ones first, and then on the
    root."""
    import fsdpc

    meshes = another_mesh(config, make_mesh(config))
    types = {
        "param_dtype": getattr(torch, config.param) if config.param else None,
        "reduce_dtype": getattr(torch, config.reduce) if config.reduce else None,
    }
    reshard: list[bool | None] = [config.strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")]
    if config.mix:
        reshard = [True, False, None]
    done: set[int] = set()

    def inside(module: nn.Module) -> None:
        for child in module.children():
            inside(child)
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if getattr(module, "wrapped", False) and id(module) not in done and not container:
            done.add(id(module))
            own = reshard[len(done) % len(reshard)]
            wide = config.wide and isinstance(module, kinds.Several)
            policy = fsdpc.MixedPrecisionPolicy(
                **types, output_dtype=torch.float64 if wide else None
            )
            fsdpc.fully_shard(
                module, mesh=next(meshes), reshard_after_forward=own, mp_policy=policy
            )

    for module in list(model.modules()):
        if config.collectives == "c10d" and getattr(module, "by_data", False):
            fsdpc.mark_data_dependent(module)
        if isinstance(module, kinds.Teacher):
            module.box[0] = shard_in_place(module.box[0], config)
    inside(model)
    return fsdpc.fully_shard(
        model,
        mesh=next(meshes),
        reshard_after_forward=None if config.keeps_root else reshard[0],
        mp_policy=fsdpc.MixedPrecisionPolicy(**types),
    )


def make_mesh(config: Config) -> Any:
    if "HYBRID" in config.strategy:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def another_mesh(config: Config, mesh: Any) -> Iterator[Any]:
    """Yields meshes that equal ``mesh``, made as the configuration says."""
    while True:
        if config.meshes == "each":
            yield make_mesh(config)
        elif config.meshes == "copy":
            yield copy.deepcopy(mesh)
        elif config.meshes == "pickle":
            yield pickle.loads(pickle.dumps(mesh))
        else:
            yield mesh


def filled(model: nn.Module, config: Config) -> nn.Module:
    """Return the sharded model with its values, also if it was sharded on the meta device."""
    if not config.meta:
        made = shard_in_place(model, config)
    else:
        made = shard_in_place(emptied(model), config)
        values = model.state_dict()
        if config.meta == "assign":
            made.load_state_dict(as_parts(made, values), assign=True)
        elif config.meta == "rank0":
            load_full(made, values if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
        else:
            made.to_empty(device=toys.PLACE)
            made.load_state_dict(as_parts(made, values))
        for module, other in zip(made.modules(), model.modules(), strict=True):
            for name, value in other._buffers.items():
                if name in other._non_persistent_buffers_set:
                    module._buffers[name] = value.clone()
    if config.hook:
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(halve)
    return made


def halve(total: Tensor) -> None:
    total.mul_(0.5)


def emptied(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, in which the same parameters are tied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        if hasattr(p, "was_frozen"):
            memo[id(p)].was_frozen = True
    memo.update({id(b): b.to("meta") for b in model.buffers()})
    return copy.deepcopy(model, memo)


def as_parts(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Turn full values into DTensors like those of the model's state dict."""
    own = model.state_dict()
    return {
        k: distribute_tensor(v, own[k].device_mesh, own[k].placements)
        if isinstance(own[k], DTensor)
        else v
        for k, v in state.items()
    }


def load_full(model: nn.Module, state: dict[str, Any], **options: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, **options))


def load_part(model: nn.Module, state: dict[str, Any]) -> None:
    load_full(model, state, strict=False)


def check_blocks(model: nn.Module) -> None:
    """Checkpoint the marked blocks, so that backward runs them again. Of nested blocks, checkpoint
    only the outermost."""
    inside = {
        id(block)
        for outer in model.modules()
        if isinstance(outer, kinds.Block)
        for block in outer.child.modules()
    }
    if any(isinstance(m, kinds.Block) for m in model.modules()):
        activations.checkpoint(
            model,
            blocks=lambda m: isinstance(m, kinds.Block) and id(m) not in inside,
            preserve_rng_state=False,
        )


def second_model(config: Config, groups: Any = None) -> nn.Module | None:
    """If the configuration asks for a second model, return a sharded model that has run a backward;
    otherwise return None."""
    if not config.second:
        return None
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    other[0].wrapped = True
    config = dataclasses.replace(config, meta="", hook=False, by_policy=True, param="", mix=False)
    other = shard_in_place(other, config) if config.in_place else shard(other, config, groups)
    other(torch.ones(2, 3)).sum().backward()
    return other


def copied(model: Any) -> Any:
    """Return a deep copy that keeps the ``was_frozen`` marks of parameters."""
    other = copy.deepcopy(model)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if hasattr(a, "was_frozen"):
            b.was_frozen = True
    return other


def chosen(named: dict[str, nn.Parameter], choice: float) -> list[nn.Parameter]:
    """Return parameters that were trained at the start: some of all, or all of one module."""
    names = [n for n, p in named.items() if p.is_floating_point() and not hasattr(p, "was_frozen")]
    rng = random.Random(choice)
    if rng.random() < 0.5:
        return [named[n] for n in names if random.Random(f"{choice}{n}").random() < 0.3]
    prefix = rng.choice(sorted(names)).rpartition(".")[0]
    return [named[n] for n in names if n.startswith(prefix)]


MIXED = ("FULL_SHARD", "SHARD_GRAD_OP")


def shard(model: nn.Module, config: Config, groups: Any = None) -> nn.Module:
    """Wrap the model as the configuration says: by hand, the innermost modules first, or by a
    policy."""
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    import fsdpc
    from fsdpc import FullyShardedDataParallel

    prefetch = config.backward_prefetch
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[config.strategy],
        "use_orig_params": config.use_orig,
        "backward_prefetch": BackwardPrefetch[prefetch] if prefetch else None,
        "forward_prefetch": config.forward_prefetch,
        "limit_all_gathers": config.limit,
        "device_id": toys.PLACE,
    }
    if "HYBRID" in config.strategy:
        options["process_group"] = groups
    if config.param:
        options["mixed_precision"] = MixedPrecision(
            param_dtype=getattr(torch, config.param),
            reduce_dtype=getattr(torch, config.reduce) if config.reduce else None,
        )
    for module in list(model.modules()):
        if config.collectives == "c10d" and getattr(module, "by_data", False):
            fsdpc.mark_data_dependent(module)
        if isinstance(module, kinds.Teacher):
            module.box[0] = shard(module.box[0], config, groups)
    hides = any(isinstance(module, kinds.Teacher) for module in model.modules())  # they are sharded
    if config.meta and not isinstance(model, nn.Sequential) and not hides:
        if dist.get_rank() > 0:
            model = emptied(model)
        options["sync_module_states"] = True
        options["param_init_fn"] = lambda m: m.to_empty(device=toys.PLACE, recurse=False)
    if config.by_policy:
        policy = CustomPolicy(lambda m: getattr(m, "wrapped", False))
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    made: dict[int, nn.Module] = {}

    def wrap(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            for name, child in list(module._modules.items()):
                if child is not None:
                    module._modules[name] = wrap(child)
            own = options
            if config.mix and config.strategy in MIXED:
                own = {**options, "sharding_strategy": ShardingStrategy[MIXED[len(made) % 2]]}
            made[id(module)] = (
                FullyShardedDataParallel(module, **own)
                if getattr(module, "wrapped", False)
                else module
            )
        return made[id(module)]

    return FullyShardedDataParallel(wrap(model), **options)
