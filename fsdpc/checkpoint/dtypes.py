"""Conversion between torch's dtypes, their names in safetensors and their numbers in the engine."""

from __future__ import annotations

import torch

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# The numbers that csrc/base/dtype.h gives to dtypes.
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_BYTES = 4


def name_of(dtype: torch.dtype, what: str) -> str:
    """Return the name of a dtype in a header of safetensors. Raises ``TypeError``, which names
    ``what``, if safetensors does not have the dtype.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"{what} has dtype {dtype}, which safetensors files cannot hold")
    return name


def dtype_of(name: str, what: str) -> torch.dtype:
    """Return the dtype with this name in a header. Raises ``TypeError``, which names ``what``, if
    fsdpc does not read the dtype.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise TypeError(f"{what} has dtype {name}, which fsdpc does not read")
    return dtype


def can_cast(dtype: torch.dtype) -> bool:
    """Return True for the dtypes that the engine converts: floats of 16, 32 and 64 bits."""
    return dtype in _CODES


def codes(memory: torch.dtype, file: torch.dtype) -> tuple[int, int]:
    """Return the engine's numbers for the dtype ``memory`` and the dtype ``file``, as
    ``ckpt_write`` takes them. If the two dtypes are equal, both numbers stand for plain bytes.
    Raises ``TypeError`` if fsdpc does not convert between the two dtypes.
    """
    if memory == file:
        return _BYTES, _BYTES
    if not (can_cast(memory) and can_cast(file)):
        raise TypeError(f"fsdpc does not convert {memory} to {file}")
    return _CODES[memory], _CODES[file]


def dtype_of_code(code: int) -> torch.dtype:
    """Return the float dtype that has this number in the engine."""
    return next(dtype for dtype, known in _CODES.items() if known == code)
