"""SGD with momentum, equal to torch's fused CPU kernel to the bit in float32 and float64."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdpc.optim._base import FusedOptimizer, step_counter
from fsdpc.optim._chunks import Ends
from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._scaling import Members, Rule, Scaling


class SGD(FusedOptimizer):
    """Stochastic gradient descent with torch's argument names, defaults and states.

    Steps equal ``torch.optim.SGD(..., fused=True)`` on the host to the bit for float32 and float64,
    except a tensor's last ``numel % 16`` elements, which torch's kernel rounds in another way. (In
    torch 2.13 the kernel for 16-bit parameters leaves whole vectors of elements unchanged; this
    class updates them.)

    The state is ``momentum_buffer``, in the parameter's dtype, if ``momentum`` is not 0.
    ``offload``: a ``Disk`` or a ``Host`` to keep the buffer on. ``foreach`` and
    ``fused`` are accepted and have no effect; ``differentiable=True`` is refused.
    """

    _kind = "sgd"
    _counter = None
    _state_names = ("momentum_buffer",)
    _begun: dict[Tensor, Tensor] | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        offload: Disk | Host | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self._open(locals())

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["momentum"] != 0 else ()

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        """Do nothing: ``_counters`` makes the buffers, because it must know which are new."""

    def _rule(self, group: dict[str, Any], scaling: Scaling) -> Rule:
        return scaling.rule(
            group,
            group["momentum"],
            group["dampening"],
            decoupled=False,
            maximize=group["maximize"],
            nesterov=group["nesterov"],
        )

    def _counters(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Return one counter per parameter: 0 while its momentum buffer has no value, else 1. On
        the host, parameters with the same count share one tensor. On a GPU, a first step may be
        skipped without the host knowing, so each parameter has its own counter on the GPU. Also
        make the momentum buffers that do not exist yet.
        """
        on_host: dict[bool, Tensor] = {}
        counters = []
        for param, where in zip(params, self._ordinals(params), strict=True):
            has_buffer = self.state.get(param, {}).get("momentum_buffer") is not None
            if where is not None:
                counters.append(self._counter_on_gpu(param, has_buffer))
                continue
            if has_buffer not in on_host:
                on_host[has_buffer] = step_counter(param).fill_(float(has_buffer))
            counters.append(on_host[has_buffer])
        for param in params if group["momentum"] != 0 else ():
            if self.state[param].get("momentum_buffer") is None:
                self.state[param]["momentum_buffer"] = self._zeros(param, "momentum_buffer")
        return counters

    def _counter_on_gpu(self, param: Tensor, has_buffer: bool) -> Tensor:
        if self._begun is None:
            self._begun = {}
        if not has_buffer or param not in self._begun:
            self._begun[param] = step_counter(param).fill_(float(has_buffer))
        return self._begun[param]

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        super()._lend(worker, part, param, ends, held)
        if worker._where is not None and held:
            has_buffer = self.state[param].get("momentum_buffer") is not None
            counter = self._counter_on_gpu(param, has_buffer)
            worker._begun[part] = counter if ends.is_last else counter.clone()
            worker.state[part] = held  # the counter says whether the buffer has a value

    def _after_load(self) -> None:
        self._begun = None
