"""States of whole matrices in a file. The states are stepped in the mapping of the file, whose
pages the operating system reads and writes. The other parameters are stepped by AdamW;
their states pass through buffers (_chunks.py).
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdpc._companions.matrices import Matrix
from fsdpc._engine.interop import around
from fsdpc.optim._disk import Disk, Store
from fsdpc.optim._host import Host, all_in_host_memory
from fsdpc.optim._places import ParamSpan, local_of
from fsdpc.optim._spanned import BlockOptimizer


class MappedOptimizer(BlockOptimizer):
    """An optimizer whose states of matrices may be in a file, see the module's docstring."""

    _store: Store | None = None

    def _matrices_of(self, param: Tensor, span: ParamSpan) -> tuple[Matrix, ...]:
        """Return the matrices of a whole parameter. The tuple is empty if another rule steps the
        parameter.
        """
        raise NotImplementedError

    def _offload(self, where: Disk | Host | None) -> None:
        name = type(self).__name__
        if isinstance(where, Disk | Host) and where.masters:
            raise NotImplementedError(
                f"{name} with offload={type(where).__name__}(masters=True): a matrix has no master "
                "beside it. Keep float32 parameters, with MixedPrecision or MixedPrecisionPolicy"
            )
        if isinstance(where, Disk) and where.checksum:
            raise NotImplementedError(
                f"{name} with offload=Disk(checksum=True): states of matrices are stepped in a "
                "mapping of the file, where no part of them is checked. Leave checksum=True away"
            )
        params = [p for group in self.param_groups for p in group["params"]]
        if isinstance(where, Host) and not all_in_host_memory(params):
            raise NotImplementedError(
                f"{name} with offload=Host(...) of parameters on a GPU: a matrix is stepped on the "
                "GPU with its states. CPUOffload(offload_params=True) and CPUOffloadPolicy() keep "
                "parameters, gradients and states in host memory, and step there"
            )
        super()._offload(None if isinstance(where, Host) else where)

    def _place_states(self, which: set[int]) -> None:
        """Place the states. States of parameters with matrices get places in the mapping of the
        file and are stepped there. All other states get places in chunks of the file; AdamW steps
        these states through buffers.
        """
        assert self._store is not None
        for group in self.param_groups:
            for param in group["params"]:
                if any(self._matrices_of(param, span) for span in self._place(param).every):
                    self._store.mapped.add(param)
        super()._place_states(which)

    def _zeros(self, param: Tensor, name: str) -> Tensor:
        if self._store is None or self._store.takes(param):
            return super()._zeros(param, name)
        shape = local_of(param).shape
        found = self._store.kept(param, name, self._state_dtype(param), shape).zero_()
        return around(found, param._spec) if isinstance(param, DTensor) else found

    def _in_file(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """Copy ``value`` to the state's place in the file, and return a tensor over this place.
        Return ``value`` itself if the parameter's states are not mapped.
        """
        if self._store is None or self._store.takes(param):
            return value
        local = local_of(value.detach())
        found = self._store.kept(param, name, local.dtype, local.shape)
        if found.data_ptr() == local.data_ptr():
            return value
        found.copy_(local)
        return around(found, value._spec) if isinstance(value, DTensor) else found
