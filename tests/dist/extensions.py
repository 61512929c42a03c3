"""Tensor classes with hooks for their own all-gather (torch's extension interface)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree


class Pair(TwoTensor):
    """A tensor of two plain tensors of the same shape, which are both gathered."""

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Pair(inner["a"], inner["b"])

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        a, b = outputs
        if out is None:
            return Pair(a.to(param_dtype), b.to(param_dtype)), (a, b)
        if a.dtype == param_dtype:  # the outputs lie in the memory of the first gather
            assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
            assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
        else:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


class Pair5(Pair):
    """A Pair whose ``fsdp_pre_all_gather`` has the longer signature."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, torch.nn.Linear) and outer_size == (
            module.out_features,
            module.in_features,
        )
        assert outer_stride == (outer_size[1], 1) and hasattr(mp_policy, "param_dtype")
        return (self.a, self.b), None


class Coded(torch.Tensor):
    """A tensor that is gathered as 8-bit integers with a scale for each row.

    ``fsdp_pre_all_gather`` returns metadata, and two tensors to gather. Their sizes and dtypes
    differ from the parameter's.
    ``fsdp_post_all_gather`` returns values of the dtype ``param_dtype``.
    """

    calls = {"pre": 0, "first": 0, "out": 0}

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            data.stride(),
            data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data):
        self._data = data

    def __repr__(self):
        return f"Coded({self._data})"

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Coded(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Coded.calls["pre"] += 1
        rows = -(-outer_size[0] // mesh.size())
        padded = self._data.new_zeros(rows, *outer_size[1:])
        padded[: self._data.shape[0]].copy_(self._data)
        return self.encode(padded, outer_size)

    def encode(self, padded, outer_size):
        scales = padded.abs().amax(dim=1).clamp(min=1e-6) / 127
        codes = (padded / scales[:, None]).round().to(torch.int8)
        return (codes, scales), tuple(outer_size)

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, scales = outputs
        values = (codes * scales[:, None])[: metadata[0]].to(param_dtype)
        if out is None:
            Coded.calls["first"] += 1
            return values, (values,)
        Coded.calls["out"] += 1
        with _unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None


class Padded(Coded):
    """A Coded that is gathered without scales. Ranks may have different numbers of rows."""

    def encode(self, padded, outer_size):
        return ((padded * 256).round().clamp(-127, 127).to(torch.int8),), tuple(outer_size)

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        scales = torch.full_like(outputs[0][:, 0], 1 / 256, dtype=torch.float32)
        return super().fsdp_post_all_gather((*outputs, scales), metadata, param_dtype, out=out)


class CodedEven(Coded):
    """A Coded whose ``fsdp_pre_all_gather`` has the short signature and does not pad."""

    def fsdp_pre_all_gather(self, mesh):
        return self.encode(self._data, self._data.shape)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        metadata = (outputs[0].shape[0],)
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


def patch(local: Any, seen: list[Any]) -> None:
    """Set hooks on one tensor so that it is gathered in bfloat16. A hook adds meshes to `seen`."""

    def pre(mesh, outer_size, outer_stride, module, mp_policy):
        seen.append(mesh)
        return (local.to(torch.bfloat16),), None

    @torch.no_grad()
    def post(outputs, metadata, param_dtype, *, out=None):
        (tensor,) = outputs
        assert tensor.dtype == torch.bfloat16
        if out is None:
            upcast = tensor.to(param_dtype)
            return upcast, (tensor, upcast)
        with _unsafe_preserve_version_counter(out):
            out.copy_(tensor)
        return None

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
