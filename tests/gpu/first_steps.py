"""Checks to run first on a GPU, from a single kernel to training, each with its own traceback.

    python tests/gpu/first_steps.py           # --dry: on the simulated GPU

The checks need no pytest and take seconds. A check also runs if earlier checks have failed. If the
GPU itself no longer works, no further check runs. The exit status is 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parents[1]
for folder in (TESTS / "simgpu" / "python", TESTS / "dist", ROOT / "benchmarks", HERE):
    sys.path.insert(0, str(folder))

import runs  # noqa: E402
import torch  # noqa: E402
from gpu import machine  # noqa: E402

SILENCE_S = 50  # seconds after which the stacks of all threads are printed
Step = Callable[[machine.Device], str]
STEPS: list[Step] = []


def step(function: Step) -> Step:
    """Register a step. Steps run in the order of this file; their docstrings are their names."""
    STEPS.append(function)
    return function


def gap(got: list[float], want: list[float], tolerance: float) -> str:
    """Return a text with the losses `got` and their largest difference from `want`. Raise
    AssertionError if `got` and `want` are too far apart."""
    runs.close(got, want, tolerance)
    widest = float((torch.tensor(got) - torch.tensor(want)).abs().max())  # NaN stays
    return f"{', '.join(f'{value:.6f}' for value in got)}; largest difference {widest:.1e}"


@step
def known(device: machine.Device) -> str:
    """the device"""
    from fsdpc import _C

    info = _C.cuda_device(0)
    fields = {**device.describe(), **info}
    return ", ".join(f"{key} {value}" for key, value in fields.items() if value not in (None, ""))


@step
def kernel(device: machine.Device) -> str:
    """one kernel, bit for bit"""
    from fsdpc import _probe

    machine.prepare_probe(device)
    source = torch.randn(100_003)
    want = torch.zeros(100_003, dtype=torch.bfloat16)
    got = torch.zeros(100_003, dtype=torch.bfloat16, device=device.device)
    _probe.kernel_cast(want, "bfloat16", source, "float32", 0.3, "plain")
    _probe.kernel_cast(got, "bfloat16", source.to(device.device), "float32", 0.3, "cuda:0")
    assert torch.equal(got.cpu(), want)
    return f"{want.numel():,} elements equal"


@step
def group(device: machine.Device) -> str:
    """the process group"""
    machine.start_group(device)
    return torch.distributed.get_backend()


@step
def forward(device: machine.Device) -> str:
    """one forward"""
    place = device.device
    want = float(runs.loss_of(runs.model(place), place, 0).detach())
    got = float(runs.loss_of(runs.wrap(runs.model(place), place), place, 0).detach())
    return gap([got], [want], 1e-5)


@step
def gradients(device: machine.Device) -> str:
    """one backward: every gradient"""
    place = device.device
    plain, model = runs.model(place), runs.wrap(runs.model(place), place)
    for module in (plain, model):
        runs.loss_of(module, place, 0).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        want = wanted[name.replace("_fsdp_wrapped_module.", "")].grad
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-6, msg=name)
    return f"{len(wanted)} gradients"


@step
def training(device: machine.Device) -> str:
    """steps of training"""
    place = device.device
    want = runs.train(runs.model(place), place)
    return gap(runs.train(runs.wrap(runs.model(place), place), place), want, 2e-5)


@step
def low_precision(device: machine.Device) -> str:
    """steps of training in bf16, beside FSDP1"""

    def losses(library: str) -> list[float]:
        module = __import__("fsdpc") if library == "fsdpc" else torch.distributed.fsdp
        precision = module.MixedPrecision(torch.bfloat16, torch.float32)
        model = runs.wrap(
            runs.model(device.device), device.device, library, mixed_precision=precision
        )
        return runs.train(model, device.device)

    return gap(losses("fsdpc"), losses("torch"), 1e-2)


@step
def accumulation(device: machine.Device) -> str:
    """no_sync and clipping"""
    place = device.device

    def clip(module: torch.nn.Module) -> object:
        if hasattr(module, "clip_grad_norm_"):
            return module.clip_grad_norm_(0.1)
        return torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    want = runs.train(runs.model(place), place, micro=2, before_step=clip)
    model = runs.wrap(runs.model(place), place)
    got = runs.train(model, place, micro=2, no_sync=model.no_sync, before_step=clip)
    return gap(got, want, 5e-5)


@step
def streams(device: machine.Device) -> str:
    """steps on a stream of the user's"""
    place = device.device
    want = runs.train(runs.model(place), place)
    model = runs.wrap(runs.model(place), place)
    device.synchronize()
    with device.side_stream():
        got = runs.train(model, place)
    device.synchronize()
    return gap(got, want, 2e-5)


@step
def state(device: machine.Device) -> str:
    """a state dict, there and back"""
    place = device.device
    model = runs.wrap(runs.model(place), place)
    runs.train(model, place, steps=[0])
    fresh = runs.wrap(runs.model(place), place)
    fresh.load_state_dict(model.state_dict())
    want = runs.train(model, place, steps=[1])
    return gap(runs.train(fresh, place, steps=[1]), want, 1e-6)


@step
def growth(device: machine.Device) -> str:
    """no memory asked for in further steps"""
    place = device.device
    model = runs.wrap(runs.model(place), place)
    optimizer = runs.adamw(model)
    runs.train(model, place, optimizer=optimizer, steps=[0, 1])
    before = device.memory()
    runs.train(model, place, optimizer=optimizer, steps=[2, 3])
    after = device.memory()
    assert after["peak_reserved"] == before["peak_reserved"], (before, after)
    return f"{after['peak_reserved']:,} bytes reserved"


def alive(device: machine.Device) -> bool:
    """Return True if the GPU still works for this process."""
    try:
        device.synchronize()
        return True
    except RuntimeError as error:
        print(f"the GPU answers no more: {str(error).splitlines()[0]}")
        return False


def attempt(one: Step, device: machine.Device) -> bool:
    """Runs a step and prints its result."""
    begin = time.monotonic()
    faulthandler.dump_traceback_later(SILENCE_S, repeat=True)
    try:
        text, passed = one(device), True
        device.synchronize()
    except Exception:
        text, passed = traceback.format_exc(limit=-8).rstrip(), False
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"{'ok    ' if passed else 'FAILED'} {time.monotonic() - begin:5.1f} s  {one.__doc__}")
    print(f"    {text}" if passed else text, flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on the simulated GPU")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    faulthandler.enable()
    os.environ.setdefault("FSDPC_TIMEOUT", "60")
    device = machine.open_device(args.dry)
    failed = []
    for one in STEPS:
        if not attempt(one, device):
            failed.append(str(one.__doc__))
            if not alive(device):
                break
    print(
        f"failed: {'; '.join(failed)}" if failed else f"all {len(STEPS)} steps passed", flush=True
    )
    os._exit(bool(failed))  # without a shutdown of Python, which might hang


if __name__ == "__main__":
    main()
