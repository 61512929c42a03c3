"""Parameters whose memory holds codes of another library: bitsandbytes' ``Params4bit``. Parameter
classes that wrap several tensors are refused.

The dtype of such a parameter, ``quant_storage``, may be a floating-point type of any size, but its
memory must never be cast: the engine communicates the bytes as they are. Modules see parameters of
the library's class with their ``quant_state``. Every rank has the scales in ``quant_state``;
checkpoints and state dicts contain the scales beside the codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdpc import _C

_STATE, _CLASS, _LOADS = "quant_state", "_fsdpc_codes_class", "_fsdpc_loads_codes"
SCALES = ("absmax", "nested_absmax", "nested_offset")
_SAVED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")  # in state dicts


def holds_codes(param: Any) -> bool:
    """Whether a parameter holds codes, or stands for a parameter that does. Local."""
    return _STATE in getattr(param, "__dict__", ())


def check_memory(param: Any, what: str, way_out: str) -> None:
    """Raise ``TypeError`` if the parameter's class wraps other tensors, as torchao's classes do.

    Only the class itself could divide these tensors.
    """
    if hasattr(type(param), "__tensor_flatten__"):
        raise TypeError(
            f"{what} is of the class {type(param).__name__} ({type(param).__module__}), whose "
            f"memory only its own code knows: {way_out}"
        )


def check_is_kept(param: Any, what: str, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` if codes would be cast to ``dtype``, or if values of a floating-point
    ``dtype`` would be written into bytes.
    """
    if holds_codes(param) and param.dtype != dtype:
        raise TypeError(
            f"{what} holds 4-bit codes in memory of {param.dtype}, which a conversion to {dtype} "
            "would destroy: convert the model before it is quantised, or only the modules that "
            "are not (the compute dtype is bnb_4bit_compute_dtype)"
        )
    if param.dtype == torch.uint8 and dtype.is_floating_point:
        raise TypeError(
            f"{what} has bytes, and the new value is of {dtype}: write codes, or load values by "
            "fsdpc.checkpoint.load_pretrained or before the model is sharded"
        )


def check_same_state(param: Any, shown: Any, what: str) -> None:
    """Raise ``ValueError`` if ``param`` and ``shown`` both hold codes but have different scales."""
    old, new = (getattr(each, "__dict__", {}).get(_STATE) for each in (param, shown))
    if old is not None and new is not None and new is not old:
        raise ValueError(
            f"{what} was quantised anew, and its new scales would be lost: save the adapters and "
            "merge them in a model that is not sharded, or pass writeback=False"
        )


def check_trainable(param: Any, what: str) -> None:
    """Raise ``TypeError`` if the parameter holds codes and requires a gradient."""
    if holds_codes(param) and param.requires_grad:
        raise TypeError(
            f"{what} requires a gradient, but holds 4-bit codes, which no optimizer can step: "
            "freeze it (requires_grad_(False)) and train adapters beside it"
        )


def parameter(tensor: Tensor, like: Any, requires_grad: bool) -> Any:
    """Return a Parameter over ``tensor``. If ``like`` holds codes, the Parameter has the class and
    the attributes of ``like``.
    """
    if not holds_codes(like):
        return nn.Parameter(tensor, requires_grad)
    kind = like.__dict__.get(_CLASS, type(like))
    made = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    made.__dict__.update(like.__dict__)
    return made


def attributes(param: Any) -> dict[str, Any]:
    """If ``param`` holds codes, return the attributes that an object of another class needs to
    stand for ``param``; else {}. For example, state dicts look up ``weight.absmax``.
    """
    if not holds_codes(param):
        return {}
    values = {name: getattr(param, name, None) for name in _SAVED}
    kept = {name: value for name, value in values.items() if value is not None}
    return {_CLASS: type(param), **kept, **param.__dict__}


def mark_again(param: Any, like: Any) -> None:
    """Copy the attributes of ``like`` to ``param``, because ``Module.to`` of DTensors drops these
    attributes.
    """
    if holds_codes(like) and not holds_codes(param):
        param.__dict__.update(attributes(like))


def check(module: nn.Module, param: nn.Parameter, what: str) -> None:
    """Check that a parameter's codes can be sharded, and prepare its module. Local.

    ``ValueError``: the values are not quantised yet, or an evaluation has reordered the codes.
    ``TypeError``: the codes require a gradient, or have 8 bits.
    """
    if getattr(param, "has_fp16_weights", True) is False:
        raise TypeError(
            f"{what} is bitsandbytes' {type(param).__name__}, whose module has the codes elsewhere "
            "and puts them back in every forward: list it among the ignored parameters, and every "
            "rank keeps it, or quantise to 4 bits"
        )
    if not holds_codes(param):
        return
    state: Any = param.__dict__[_STATE]
    if state is None:
        raise ValueError(
            f"{what} is a {type(param).__name__} whose values are not quantised yet: move the "
            "module to its device before you shard it (module.to('cpu') quantises, too)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"{what} has codes that an evaluation has put in an order for AVX-512, and rounded "
            "scales: shard the model before you evaluate it, or load it again"
        )
    check_trainable(param, what)
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False  # else bitsandbytes reorders gathered codes


def let_load(module: nn.Module, param: nn.Parameter) -> None:
    """Let ``module``, sharded or not, load the ``quant_state`` that the module saves. Local."""
    if holds_codes(param) and not module.__dict__.get(_LOADS):
        module.__dict__[_LOADS] = True
        module.register_load_state_dict_pre_hook(_take)


def scales(param: Any) -> Iterator[tuple[str, Tensor]]:
    """Return (bitsandbytes' name, tensor) for each tensor of the parameter's ``quant_state`` that
    depends on the weights.
    """
    state = getattr(param, "__dict__", {}).get(_STATE)
    return iter(()) if state is None else _scales(state)


def _scales(state: Any) -> Iterator[tuple[str, Tensor]]:
    places = ((state, "absmax"), (getattr(state, "state2", None), "absmax"), (state, "offset"))
    for name, (of, attribute) in zip(SCALES, places, strict=True):
        tensor = getattr(of, "__dict__", {}).get(attribute)
        if isinstance(tensor, Tensor):
            yield name, tensor


def description(param: Any) -> str:
    """Return a text with those values of the ``quant_state`` that must be equal on all ranks. The
    text is "" if the parameter has no ``quant_state``.
    """
    state = getattr(param, "__dict__", {}).get(_STATE)
    if state is None:
        return ""
    sums = []
    for name, tensor in scales(param):
        if not tensor.is_meta:
            raw = tensor.detach().contiguous().cpu().numpy().tobytes()
            sums.append(f"{name} {_C.ckpt_crc32c(raw, 0):08x}")
    return f", {state.quant_type} in blocks of {state.blocksize}, checksums: {', '.join(sums)}"


@torch.no_grad()
def _take(module: Any, given: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load the ``quant_state`` from a state dict. ``Linear4bit`` saves its ``quant_state``, but
    does not load it.
    """
    before, state = f"{prefix}weight.", getattr(module.weight, _STATE, None)
    found = {key: given.pop(key) for key in list(given) if key.startswith(before)}
    if state is None or not found:
        given.update(found)
        return
    try:
        new = type(state).from_dict(found, state.absmax.device)
        forms = [(s.quant_type, s.blocksize, s.shape, s.dtype, s.nested) for s in (new, state)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"codes of another form: the state dict has {forms[0]}, the module {forms[1]} "
                "(type, block size, shape, dtype, double quantisation): quantise the module as "
                "the saved one was"
            )
    except (ValueError, AssertionError, KeyError) as error:
        rest[-1].append(f"{before}*: {type(error).__name__}: {error}")
        return
    for (_, tensor), (_, value) in zip(_scales(state), _scales(new), strict=True):
        tensor.copy_(value)
