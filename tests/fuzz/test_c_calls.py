"""Tests that make random calls of the extension, and one test for each fault that such calls found.

Code that could end the process runs in a forked process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import pytest
import torch  # noqa: F401  so that forked processes have it

sys.path.insert(0, str(Path(__file__).parent))
SECONDS = 5
LONGEST_S = 240


PRELUDE = """
    import dataclasses, gc, mmap, threading, time
    import numpy as np, pytest, torch
    from fsdpc import _probe

    SPECS = [("w", 4, "float32", "float32", "float32", True)]

    def unit(name="u", comm=None):
        flat = _probe.FlatParameter(name, comm or _probe.Comm.self_(), SPECS)
        full, param = torch.zeros(4, requires_grad=True), torch.nn.Parameter(torch.zeros(4))
        flat.bind([full], [({}, "w", 0, param)], [(param, torch.zeros(4), (0,))], [0])
        return flat

    def functions(**changed):
        given = {"grad": torch.is_grad_enabled, "task": lambda: -1, "keeps": lambda: False,
                 "makes": lambda params: True, "queue": lambda call: None,
                 "listen": lambda params: None, "versions": lambda tensors, numbers: None,
                 "increment": lambda tensors: None,
                 "alias": lambda args, kwargs: (args, kwargs or {}),
                 "copy": lambda output, begin, end: output, "nodes": {},
                 "level": lambda: None, "inner": lambda output: [], "export": lambda: None,
                 "profiler": {}, "record": None,
                 **changed}
        return (torch.Tensor, *given.values())

    def later(function):
        thread = threading.Thread(target=function)
        thread.start()
        return thread
"""


def passes(text: str) -> None:
    """Run a program in a forked process, and check that it does not crash, raise or hang."""
    program = compile(textwrap.dedent(PRELUDE) + textwrap.dedent(text), "program", "exec")
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(LONGEST_S)
                faulthandler.enable(output)
                exec(program, {"__name__": "__main__"})
                os._exit(0)
            except BaseException:
                output.write(traceback.format_exc().encode())
                output.flush()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        assert status == 0, f"wait status {status}\n{output.read().decode(errors='replace')}"


def test_random_calls_end_in_values_and_exceptions():
    passes(
        f"""
        import c_calls
        made, faults = c_calls.run(10**9, seed=1, seconds={SECONDS})
        assert made >= c_calls.BATCH and not faults, "\\n".join(map(str, faults))
        """
    )


def test_a_batch_that_dies_of_a_signal_or_a_system_error_is_reported():
    passes(
        """
        import os, pathlib, signal, tempfile, c_calls
        def dies(seed, calls, log):
            log("the last call")
            if seed == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            os._exit(c_calls.SYSTEM_ERROR_STATUS)
        c_calls.run_batch = dies
        folder = pathlib.Path(tempfile.mkdtemp())
        assert "SIGSEGV" in str(c_calls.fork_batch(1, 1, folder))
        assert "exit status 77\\nthe last call" in str(c_calls.fork_batch(2, 1, folder))
        c_calls.run_batch = lambda *args: __import__("time").sleep(100)
        c_calls.STUCK_S = 0.5
        assert "no call in" in str(c_calls.fork_batch(3, 1, folder))
        """
    )


# --- one by one ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["pre_forward", "post_forward", "pre_backward", "input_done", "grad"]
)
def test_hooks_of_a_tree_without_torch_are_refused(kind):
    passes(
        f"""
        flat = unit()
        tree = _probe.Tree([flat], [0])
        hook = flat.hook({kind!r}, 0)
        with pytest.raises(_probe.StateError, match="unit u: hooks need torch"):
            hook(None, (torch.ones(3),), torch.ones(3))
        """
    )


def test_a_tree_that_is_closed_in_a_hook_is_closed_when_the_hook_has_ended():
    passes(
        """
        flat = unit()
        tree = _probe.Tree([flat], [0], torch=functions(grad=lambda: tree.close() or True))
        flat.hook("pre_forward")(None, ())
        with pytest.raises(_probe.StateError, match="closed"):
            tree.memory()
        assert not flat.attached
        """
    )


def test_a_tree_that_another_thread_closes_while_in_a_hook_is_closed_afterwards():
    passes(
        """
        inside, closed = threading.Event(), threading.Event()
        def slow():
            inside.set()
            assert closed.wait(60)
            return True
        flat = unit()
        tree = _probe.Tree([flat], [0], torch=functions(grad=slow))
        thread = later(lambda: flat.hook("pre_forward")(None, ()))
        assert inside.wait(60)
        tree.close()
        assert tree.phase == "idle"  # not freed
        with pytest.raises(_probe.StateError, match="in use"):
            tree.detach()
        with pytest.raises(_probe.StateError, match="in use"):
            flat.bind([None], [], [], [])
        flat.unbind()
        closed.set()
        thread.join()
        with pytest.raises(_probe.StateError, match="closed"):
            tree.memory()
        """
    )


def test_a_second_thread_waits_until_the_first_has_left_the_unit():
    passes(
        """
        order, inside = [], threading.Event()
        def slow():
            inside.set()
            time.sleep(0.3)
            order.append("hook")
            return True
        flat = unit()
        tree = _probe.Tree([flat], [0], torch=functions(grad=slow))
        thread = later(lambda: flat.hook("pre_forward")(None, ()))
        assert inside.wait(60)
        flat.write(0, np.ones(4, np.float32))
        order.append("write")
        thread.join()
        assert order == ["hook", "write"]
        """
    )


def test_a_callback_of_a_collective_cannot_use_the_unit():
    passes(
        """
        class Callbacks:
            flat = None
            def all_gather(self, array, piece_bytes, what):
                array[piece_bytes:] = array[:piece_bytes]  # as if the other rank did the same
                if self.flat is not None:
                    _probe.gather(self.flat)
            reduce_scatter = all_reduce = broadcast = barrier = all_gather
        calls = Callbacks()
        flat = _probe.FlatParameter("u", _probe.Comm.c10d(0, 2, calls), SPECS)
        calls.flat = flat
        with pytest.raises(_probe.CommError) as caught:
            _probe.gather(flat)
        assert "inside a collective" in str(caught.value.__cause__)
        """
    )


def test_an_output_list_may_shrink_while_it_is_walked():
    passes(
        """
        class Shrinks(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                output.clear()
                return super().__torch_function__(function, types, args, kwargs or {})
        @dataclasses.dataclass
        class Pair:
            one: object = None
            other: object = None
        output = []
        flat = unit()
        tree = _probe.Tree([flat], [0], torch=functions())
        for _ in range(50):
            output = [torch.ones(2, requires_grad=True).as_subclass(Shrinks) * 2 for _ in range(20)]
            flat.hook("pre_forward")(None, ())
            flat.hook("post_forward")(None, (), [output, Pair(output)])
            assert output == []
        """
    )


def test_reading_into_what_cannot_be_written_is_refused():
    passes(
        """
        flat = unit()
        flat.write(0, np.arange(4, dtype=np.float32))
        still = np.zeros(4, np.float32)
        still.flags.writeable = False
        mapped = np.frombuffer(mmap.mmap(-1, 4096, access=mmap.ACCESS_READ), np.float32)[:4]
        for target in (still, mapped):
            with pytest.raises(ValueError, match="parameter w of unit u needs a .*writable"):
                flat.read([target])
            with pytest.raises(ValueError, match="parameter w of unit u needs a .*writable"):
                flat.read_blocks([4], [target])
        bits = _probe.FlatParameter("b", _probe.Comm.self_(), [("t", 8, *["uint8"] * 3, False)])
        target = bytes(8)
        with pytest.raises(ValueError, match="writable"):
            bits.read([target])
        with pytest.raises(ValueError, match="read-only"):
            _probe.export_dlpack(still)
        assert target == bytes(8) and still.sum() == 0
        """
    )


def test_arrays_of_python_objects_are_refused():
    passes(
        """
        for dtype in ("O", [("O", "f4"), ("x", "O")]):
            with pytest.raises(BufferError, match="Python objects"):
                _probe.Comm.self_().all_gather(np.zeros(3, dtype))
        _probe.Comm.self_().all_gather(np.zeros(3, [("O", "f4")]))  # only a name
        """
    )


def test_a_frozen_unit_has_no_gradient_to_hand_out():
    passes(
        """
        flat = _probe.FlatParameter("f", _probe.Comm.self_(), [("w", 6, *["float32"] * 3, False)])
        for get in (flat.grad_part, flat.grad_segment):
            with pytest.raises(ValueError, match="frozen"):
                get(0)
        """
    )


@pytest.mark.parametrize("number", [-1, 1, 2**31 - 1])
def test_a_gradient_hook_of_no_parameter_is_refused(number):
    passes(
        f"""
        with pytest.raises(IndexError, match="unit u has 1 parameters; index .* is out of range"):
            unit().hook("grad", {number})
        """
    )


@pytest.mark.parametrize(
    "rows",
    [
        "[1], [], [], []",
        "[None], [({}, 'w', 0, 1)], [], []",
        "[None], [1], [], []",
        "[None], [], [1], []",
        "[None], [], [(t, t, (0,))], []",
        "[t], [], [(1, None, (0,))], []",
        "[t], [], [(t, None, ())], []",
        "[None], [], [], [0]",
    ],
)
def test_what_bind_cannot_use_is_refused(rows):
    passes(
        f"""
        flat, t = unit(), torch.zeros(4)
        with pytest.raises((TypeError, ValueError), match="bind"):
            flat.bind({rows})
        """
    )


def test_lists_that_change_while_bind_reads_them():
    passes(
        """
        class Number:
            def __index__(self):
                sites.clear()
                with pytest.raises(_probe.StateError, match="in use"):
                    flat.bind([None], [], [], [])
                return 0
        flat, t = unit(), torch.zeros(4)
        sites = [({}, "w", Number(), t) for _ in range(9)]
        flat.bind([t], sites, [], [])
        assert sites == []
        """
    )


def test_a_unit_cannot_be_in_a_tree_twice():
    passes(
        """
        flat = unit()
        with pytest.raises(ValueError, match="unit u is listed twice"):
            _probe.Tree([flat, flat], [0, 0])
        with pytest.raises(TypeError, match="not iterable"):
            _probe.Tree(2147483647, np.array(["a"] * 12))
        with pytest.raises(ValueError, match="at most 131072"):
            _probe.layout([], 2147483647, 64)
        with pytest.raises(TypeError, match="tuple of seventeen"):
            _probe.Tree([flat], [0], torch=1)
        # Torch crashes where it prints a tensor whose storage was released.
        released = torch.zeros(3)
        released.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="tuple of seventeen items or None, not Tensor"):
            _probe.Tree([flat], [0], torch=released)
        """
    )


def test_objects_are_not_found_before_they_are_whole():
    passes(
        """
        class Looks(list):
            def __iter__(self):
                types = (_probe.FlatParameter, _probe.Tree)
                found.extend(o for o in gc.get_objects() if type(o) in types)
                return super().__iter__()
        found = []
        _probe.FlatParameter("u", _probe.Comm.self_(), Looks(SPECS))
        _probe.Tree(Looks(), Looks())
        assert found == []
        """
    )


def test_two_threads_in_one_communicator_are_refused():
    passes(
        """
        class Slow:
            def all_gather(self, *args):
                inside.set()
                assert tried.wait(60)
            reduce_scatter = all_reduce = broadcast = barrier = all_gather
        inside, tried = threading.Event(), threading.Event()
        comm = _probe.Comm.c10d(0, 1, Slow())
        thread = later(lambda: comm.barrier())
        assert inside.wait(60)
        with pytest.raises(_probe.StateError, match="another collective of this communicator"):
            comm.all_reduce(np.ones(3, np.float32))
        tried.set()
        thread.join()
        comm.all_reduce(np.ones(3, np.float32))
        """
    )


def test_every_call_of_the_extension_is_made():
    import inspect
    import re

    import c_calls
    import c_companions

    text = inspect.getsource(c_calls) + inspect.getsource(c_companions)
    types = (*c_calls.TYPES, c_calls._probe)
    named = {
        name
        for owner in types
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("__")
    }
    missing = {name for name in named if not re.search(rf"\b{name}\b", text)}
    assert missing == {"set_deadline"}  # only tests call this function, so the fuzzer does not
