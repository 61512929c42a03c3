"""Tests of FlatParameter and Tree with NumPy and without torch: the memory of one unit, its gathers
and its sums.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fsdpc import _probe

PARAMS = [
    ("weight", 12, "float32", "float32", "float32", True),
    ("bias", 3, "float32", "float32", "float32", True),
]
MIXED = [
    ("weight", 10, "float32", "bfloat16", "float32", True),
    ("table", 5, "uint8", "uint8", "uint8", False),
]


class Capsule:
    """An object with a ``__dlpack__`` that returns the given capsule, because np.from_dlpack takes
    no capsules.
    """

    def __init__(self, capsule) -> None:
        self.capsule = capsule

    def __dlpack__(self, **keywords):
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


def over(capsule) -> np.ndarray:
    return np.from_dlpack(Capsule(capsule))


@pytest.fixture
def flat():
    return _probe.FlatParameter("layers.0", _probe.Comm.self_(), PARAMS)


def test_rows_are_checked_and_leave_one_rank_everything():
    rows = [(*spec, row) for spec, row in zip(PARAMS, (4, 1), strict=True)]
    flat = _probe.FlatParameter("layers.0", _probe.Comm.self_(), rows)
    values = [np.arange(12, dtype=np.float32), np.arange(3, dtype=np.float32)]
    for i, value in enumerate(values):
        flat.write(i, value)
    _probe.gather(flat)
    for i, value in enumerate(values):
        assert (over(flat.full_param(i, value.shape)) == value).all()
        assert (over(flat.shard_part(i)) == value).all()
    assert [s["row_numel"] for s in flat.layout()["segments"]] == [4, 1]
    for row, error in [
        (5, ValueError),
        (-1, ValueError),
        ("4", TypeError),
        (1 << 70, OverflowError),
    ]:
        with pytest.raises(error):
            _probe.FlatParameter("layers.0", _probe.Comm.self_(), [(*PARAMS[0], row)])


# --- what a unit says of itself -------------------------------------------------------------------


def test_shape_dtype_and_layout(flat):
    layout = flat.layout()
    segment = layout["segments"][0]
    assert (flat.name, flat.refs) == ("layers.0", 0)
    assert flat.shard.dtype == flat.full.dtype == flat.grad.dtype == np.float32
    assert flat.shard.shape == flat.grad.shape == flat.full.shape == (segment["piece_numel"],)
    assert [p["name"] for p in layout["params"]] == ["weight", "bias"]
    align = layout["align_bytes"]
    assert layout == _probe.layout(PARAMS, 1, align, True)


def test_mixed_units_show_bytes():
    flat = _probe.FlatParameter("mixed", _probe.Comm.self_(), MIXED)
    layout = flat.layout()
    assert flat.shard.dtype == flat.full.dtype == np.uint8
    assert flat.shard.nbytes == layout["shard_bytes"]
    assert flat.full.nbytes == layout["full_bytes"]
    assert len(layout["segments"]) == 2


# --- memory without copies ------------------------------------------------------------------------


def test_views_share_memory(flat):
    flat.shard[:] = np.arange(flat.shard.size)
    assert over(flat.shard_part(0)).tolist() == list(range(12))
    offset = flat.layout()["params"][1]["offset"]
    bias = over(flat.shard_part(1))
    assert bias.tolist() == [offset, offset + 1, offset + 2]
    flat.shard[offset] = -1
    assert bias[0] == -1 and over(flat.shard_segment(0))[offset] == -1
    flat.grad[offset + 2] = 7
    assert over(flat.grad_part(1))[2] == 7 and over(flat.grad_segment(0))[offset + 2] == 7
    # With one rank and no cast, the gathered values lie in the memory of the master shard.
    assert np.shares_memory(flat.full, flat.shard)
    assert np.array_equal(over(flat.full_param(0, (3, 4))), np.arange(12.0).reshape(3, 4))


def test_views_keep_the_memory_alive():
    flat = _probe.FlatParameter("u", _probe.Comm.self_(), PARAMS)
    view, part = flat.shard, over(flat.shard_part(0))
    del flat
    gc.collect()
    view[:12] = 3
    assert part.tolist() == [3] * 12


def test_write_and_read(flat):
    weight = np.arange(12, dtype="f4") / 7
    flat.write(0, weight)
    flat.write(1, np.float32([5, 6, 7]), grad=True)
    out, grads = np.empty(12, "f4"), np.empty(3, "f4")
    flat.read([out, None])
    flat.read([None, grads], grad=True)
    assert np.array_equal(out, weight) and grads.tolist() == [5, 6, 7]


# --- gather, release, reduce ----------------------------------------------------------------------


def test_gather_counts_and_casts():
    flat = _probe.FlatParameter("mixed", _probe.Comm.self_(), MIXED)
    weight = np.float32([1 + 2**-12, 2, -3, 4, 5, 6, 7, 8, 9, 10])
    flat.write(0, weight)
    flat.write(1, np.uint8([250, 1, 2, 3, 4]))
    _probe.gather(flat)
    _probe.gather(flat)
    assert flat.refs == 2
    bits = flat.full[:20].view("u2").astype("u4") << 16
    assert bits.view("f4").tolist() == [1, 2, -3, 4, 5, 6, 7, 8, 9, 10]
    assert over(flat.full_param(1, (5,))).tolist() == [250, 1, 2, 3, 4]
    _probe.release(flat)
    _probe.release(flat)
    assert flat.refs == 0


def test_reduce_replaces_or_adds(flat):
    weight = np.arange(12, dtype="f4")
    _probe.reduce(flat, [weight, np.float32([1, 2, 3])])
    _probe.reduce(flat, [weight.reshape(3, 4).T, None], add=True)
    expected = weight + weight.reshape(3, 4).T.ravel()
    assert over(flat.grad_part(0)).tolist() == expected.tolist()
    assert over(flat.grad_part(1)).tolist() == [1, 2, 3]
    _probe.reduce(flat, [None, np.float64([4, 5, 6])])
    assert over(flat.grad_part(0)).tolist() == [0] * 12
    assert over(flat.grad_part(1)).tolist() == [4, 5, 6]
    assert flat.grad_norm(b"\x01\x01", 2.0) == (77.0, 6.0, False)
    flat.scale_grads(b"\x00\x01", 0.5)
    assert over(flat.grad_part(1)).tolist() == [2, 2.5, 3]


def test_divide():
    flat = _probe.FlatParameter("u", _probe.Comm.self_(), PARAMS, divide=4.0)
    _probe.reduce(flat, [None, np.float32([4, 8, 12])])
    assert over(flat.grad_part(1)).tolist() == [1, 2, 3]


# --- errors ---------------------------------------------------------------------------------------

WRONG = {
    "release": (_probe.release, _probe.StateError, "layers.0"),
    "index": (lambda f: f.shard_part(2), IndexError, "unit layers.0 has 2 parameters"),
    "negative index": (lambda f: f.grad_part(-1), IndexError, "unit layers.0"),
    "segment": (lambda f: f.shard_segment(1), IndexError, "unit layers.0 has 1 segments"),
    "numel": (lambda f: f.write(0, np.zeros(3, "f4")), ValueError, "weight of unit layers.0"),
    "dtype": (lambda f: f.write(1, np.zeros(3)), ValueError, "bias of unit layers.0"),
    "strides": (lambda f: f.write(1, np.zeros(6, "f4")[::2]), ValueError, "bias of unit layers.0"),
    "count": (lambda f: _probe.reduce(f, [None]), ValueError, "layers.0"),
    "read count": (lambda f: f.read([None]), ValueError, "layers.0"),
    "read dtype": (lambda f: f.read([None, np.zeros(3)]), ValueError, "bias of unit layers.0"),
    "gradient": (
        lambda f: _probe.reduce(f, [np.zeros(2, "f4"), None]),
        ValueError,
        "weight of unit layers.0 has 2 elements, not 12",
    ),
    "integer gradient": (
        lambda f: _probe.reduce(f, [None, np.zeros(3, "i4")]),
        ValueError,
        "bias of unit layers.0",
    ),
    "shape": (lambda f: f.full_param(0, (3, 5)), ValueError, "weight of unit layers.0"),
    "negative shape": (lambda f: f.full_param(0, (-3, -4)), ValueError, "weight of unit layers.0"),
    "huge shape": (lambda f: f.full_param(0, (2**62, 4, 12)), ValueError, "unit layers.0"),
}


@pytest.mark.parametrize("call, error, text", WRONG.values(), ids=WRONG)
def test_errors_name_unit_and_parameter(flat, call, error, text):
    with pytest.raises(error, match=text):
        call(flat)
    # The unit still works after the failed call.
    _probe.reduce(flat, [np.ones(12, "f4"), None])
    assert over(flat.grad_part(0)).tolist() == [1] * 12


@pytest.mark.parametrize("params, text", [
    ([("w", -1, "float32", "float32", "float32", True)], "'w'"),
    ([("w", 1, "float31", "float32", "float32", True)], "float31"),
    ([("w", 1, "uint8", "uint8", "uint8", True)], "'w'"),
])  # fmt: skip
def test_wrong_parameters_are_refused(params, text):
    with pytest.raises(ValueError, match=text):
        _probe.FlatParameter("u", _probe.Comm.self_(), params)


def test_a_unit_belongs_to_one_tree(flat):
    with pytest.raises(ValueError, match="one entry per unit"):
        _probe.Tree([flat], [0, 1])
    with pytest.raises(ValueError, match="depths"):
        _probe.Tree([flat], [-1])
    tree = _probe.Tree([flat], [0])
    assert (tree.kind, tree.phase) == ("wire", "idle")
    with pytest.raises(_probe.StateError, match="unit layers.0 belongs to another tree"):
        _probe.Tree([flat], [0])
    with pytest.raises(_probe.StateError, match="unit layers.0 belongs to a tree"):
        _probe.gather(flat)
    tree.detach()
    _probe.gather(flat)
    _probe.release(flat)


# --- ranks, and no torch --------------------------------------------------------------------------

# Each rank is a fork of a process that has imported NumPy but not torch. The body checks results
# with asserts.
RANKS = """
import os, sys
import numpy as np
from fsdpc import _probe

def body(rank, world, comm):
    {body}

world, name = int(sys.argv[1]), sys.argv[2]
children = []
for rank in range(world):
    pid = os.fork()
    if pid == 0:
        try:
            comm = _probe.Comm.shm(rank, world, name, 20.0) if world > 1 else _probe.Comm.self_()
            body(rank, world, comm)
            assert "torch" not in sys.modules
            comm.barrier("end")
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    children.append(pid)
codes = [os.waitpid(pid, 0)[1] for pid in children]
sys.exit(any(codes))
"""

PLAIN = """
f4 = "float32"
spec = [("w", 1000, f4, f4, f4, True), ("b", 7, f4, f4, f4, True)]
flat = _probe.FlatParameter("u", comm, spec, divide=world)
full = [np.arange(1000, dtype="f4"), -np.arange(7, dtype="f4")]
for step in range(4):
    for i, values in enumerate(full):
        flat.write(i, values + step)
    _probe.gather(flat)
    places = flat.layout()["params"]
    for place, values in zip(places, full):
        assert np.array_equal(flat.full[place["offset"]:][:place["numel"]], values + step)
    _probe.release(flat)
    mine = [np.sin(np.arange(1000) + rank + step).astype("f4"), None if rank else np.ones(7, "f4")]
    _probe.reduce(flat, mine)
    out = [np.empty(1000, "f4"), np.empty(7, "f4")]
    flat.read(out, grad=True)
    sums = [np.zeros(1000, "f4"), np.ones(7, "f4")]
    for r in range(world):
        sums[0] = sums[0] + np.sin(np.arange(1000) + r + step).astype("f4")
    for got, total in zip(out, sums):
        assert np.array_equal(got, total * np.float32(1 / world))
    back = [np.empty(1000, "f4"), None]
    flat.read(back)
    assert np.array_equal(back[0], full[0] + step)
"""

MISMATCH = """
flat = _probe.FlatParameter("u", comm, [("w", 8, "float32", "float32", "float32", True)])
try:
    _probe.reduce(flat, [np.zeros(8, "i4")])
    raise SystemError("taken")
except ValueError as error:
    assert "parameter w of unit u" in str(error)
_probe.reduce(flat, [np.full(8, rank + 1, "f4")])
assert set(np.unique(flat.grad)) <= {0.0, world * (world + 1) / 2}
"""


def run_ranks(world: int, body: str, name: str) -> None:
    script = RANKS.format(body=textwrap.indent(body.strip(), "    ").strip())
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(world), name],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_gather_and_reduce(world, request):
    run_ranks(world, PLAIN, f"flat-{id(request)}-{world}")


@pytest.mark.parametrize("world", [1, 2])
def test_a_refused_gradient_leaves_the_ranks_in_step(world, request):
    run_ranks(world, MISMATCH, f"refused-{id(request)}-{world}")
