"""Control the simulated GPU from inside a rank: its schedules, faults, counters and reports.

The functions call the library that `FSDPC_LIBCUDA` names, which is the one that `fsdpc._C` uses.
Their meaning is documented in simgpu.h and simnccl.h. See env.py for the environment.

    simgpu.policy("random:3")
    simgpu.skip_wait(2)
    with simgpu.counting() as cost:
        step()
    assert cost["host_syncs"] == 0
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIMULATOR = Path(__file__).resolve().parents[1]
C_TYPES = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
}


def is_on() -> bool:
    """Whether this process runs on the simulated GPU."""
    path = os.environ.get("FSDPC_LIBCUDA", "")
    return bool(path) and Path(path).exists() and hasattr(ctypes.CDLL(path), "fsdpc_stand_in")


@functools.cache
def cuda() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["FSDPC_LIBCUDA"])
    text, number, yes = ctypes.c_char_p, ctypes.c_int, ctypes.c_bool
    memory = ctypes.c_void_p
    for name, result, arguments in (
        ("policy", yes, [text]),
        ("drain", yes, []),
        ("host_operator", yes, [memory, ctypes.c_size_t, yes, text]),
        ("host_read", None, [memory, ctypes.c_size_t, text]),
        ("host_write", None, [memory, ctypes.c_size_t, text]),
        ("cpu_read", None, [memory, ctypes.c_size_t, text]),
        ("cpu_write", None, [memory, ctypes.c_size_t, text]),
        ("label", None, [memory, ctypes.c_size_t, text]),
        ("skip", yes, [text, number]),
        ("fail", yes, [text, number, number]),
        ("calls", ctypes.c_int64, [text]),
        ("count", structure("driver/simgpu.h", "simgpu_counters"), []),
        ("get_options", ctypes.POINTER(structure("driver/simgpu.h", "simgpu_options")), []),
        ("report", text, [number]),
        ("reports", number, []),
        ("leaks", number, [text, ctypes.c_size_t]),
        ("accessible", yes, [memory, ctypes.c_size_t, yes]),
    ):
        function = getattr(library, f"simgpu_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def nccl() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["FSDPC_LIBNCCL"])
    library.simnccl_plant.restype = ctypes.c_bool
    library.simnccl_count.restype = structure("nccl/simnccl.h", "simnccl_counters")
    library.simnccl_get_options.restype = ctypes.POINTER(
        structure("nccl/simnccl.h", "simnccl_options")
    )
    return library


@functools.cache
def structure(header: str, name: str) -> type[ctypes.Structure]:
    """Return the ctypes type of a struct that the header declares, with plain or atomic numbers."""
    text = re.sub(r"/\*.*?\*/", "", (SIMULATOR / header).read_text(), flags=re.DOTALL)
    found = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text, flags=re.DOTALL)
    assert found is not None, f"{header} declares no struct {name}"
    fields = []
    for declaration in found[1].split(";"):
        words = declaration.replace(",", " ").replace("_Atomic ", "").split()
        fields += [(field, C_TYPES[words[0]]) for field in words[1:]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def constants(header: str, name: str) -> dict[str, int]:
    """Return the names and values of an enum that counts from 0."""
    text = re.sub(r"/\*.*?\*/", "", (SIMULATOR / header).read_text(), flags=re.DOTALL)
    found = re.search(rf"enum {name} \{{(.*?)\}};", text, flags=re.DOTALL)
    assert found is not None, f"{header} declares no enum {name}"
    return {word: i for i, word in enumerate(found[1].replace(",", " ").split())}


def as_dict(values: ctypes.Structure) -> dict[str, int]:
    return {name: getattr(values, name) for name, *_ in values._fields_}


# --- schedules and faults ------------------------------------------------------------------------


def policy(text: str) -> None:
    """Set the policy: "eager", "lazy", "random:SEED" or "order:1,host,0"."""
    assert cuda().simgpu_policy(text.encode()), f"no such policy: {text}"


def drain() -> bool:
    """Run all work that is held back; return False if some work cannot run."""
    return cuda().simgpu_drain()


def skip(entry: str, k: int) -> None:
    """Make the k-th call of an entry point from now succeed and do nothing."""
    assert cuda().simgpu_skip(entry.encode(), k), entry


def skip_wait(k: int) -> None:
    skip("cuStreamWaitEvent", k)


def fail(entry: str, k: int, code: int) -> None:
    """Make the k-th call of an entry point from now return the error `code`."""
    assert cuda().simgpu_fail(entry.encode(), k, code), entry


def calls(entry: str) -> int:
    """How often an entry point has been called."""
    count = cuda().simgpu_calls(entry.encode())
    assert count >= 0, entry
    return count


def plant_nccl(fault: str, rank: int, k: int, value: int = 0) -> None:
    """Plants a fault of simnccl.h: "STOP", "SLOW", "ASYNC_ERROR", "REFUSE", "INIT_STALL", ..."""
    number = constants("nccl/simnccl.h", "simnccl_fault")[f"SIMNCCL_{fault}"]
    assert nccl().simnccl_plant(number, rank, k, value), fault


def options() -> Any:
    """The simulator's simgpu_options, to be changed in place."""
    return cuda().simgpu_get_options().contents


def nccl_options() -> Any:
    return nccl().simnccl_get_options().contents


# --- what was seen -------------------------------------------------------------------------------


def count() -> dict[str, int]:
    """The simulator's simgpu_counters."""
    return as_dict(cuda().simgpu_count())


def nccl_count() -> dict[str, int]:
    return as_dict(nccl().simnccl_count())


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yield a dictionary. The end of the context writes the growth of each counter to it."""
    before, grown = count(), {}
    yield grown
    grown.update({name: value - before[name] for name, value in count().items()})


_known = 0  # number of reports that take_reports() has returned


def reports() -> list[str]:
    """Return the reports of races and faults that take_reports() has not returned yet."""
    library = cuda()
    return [library.simgpu_report(i).decode() for i in range(_known, library.simgpu_reports())]


def take_reports() -> list[str]:
    """Return ``reports()``, and mark them as taken so that they no longer fail the test."""
    global _known
    found = reports()
    _known += len(found)
    return found


def leaks() -> list[str]:
    """Return a line for each object that was made and not freed."""
    text = ctypes.create_string_buffer(1 << 16)
    cuda().simgpu_leaks(text, len(text))
    return text.value.decode().splitlines()


def label(tensor: Any, text: str) -> None:
    """Names a tensor's memory for reports."""
    cuda().simgpu_label(tensor.data_ptr(), tensor.numel() * tensor.element_size(), text.encode())


def is_device_memory(tensor: Any) -> bool:
    """Return whether the simulated driver gave a tensor's memory, as device or pinned memory."""
    return cuda().simgpu_accessible(tensor.data_ptr(), 1, False)
