"""Messages that ranks send each other are read without running any code of the sender."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm import nccl as _nccl
from fsdpc._comm import objects as _objects
from fsdpc._comm.channel import Channel
from fsdpc._comm.plain import Malformed, Outline, decode, encode

ran: list[str] = []


class Payload:
    """An object whose pickle calls a function of the sender's choice."""

    def __reduce__(self) -> Any:
        return ran.append, ("code of a peer",)


VALUES = [
    None,
    True,
    -(2**80),
    0.1,
    float("inf"),
    "text \ud800 é",
    b"\0\xff",
    1 + 2j,
    [1, (2, [3.0]), ()],
    {"a": {1: "x", (2, "y"): None}, 3.5: []},
    OrderedDict(b=1, a=2),
    Counter({2: 1, 4: 2}),
    {1, 2},
    frozenset({"x"}),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 3),
    np.float64(0.25),
    np.int8(-3),
    Outline((2, 0, 3), torch.float16, 7),
]
TENSORS = [
    torch.tensor(3.5),
    torch.arange(6.0).view(2, 3).t(),
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    torch.randn(5).to(torch.bfloat16),
    torch.randn(3).to(torch.float8_e4m3fn),
    torch.nn.Parameter(torch.ones(2)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__} {v!r:.20}")
def test_values_come_back_with_their_types(value):
    back = decode(encode(value))
    assert type(back) is type(value) and back == value


def test_nan_and_minus_zero_come_back():
    back = decode(encode([float("nan"), -0.0]))
    assert back[0] != back[0] and str(back[1]) == "-0.0"


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
def test_tensors_come_back_to_the_bit(tensor):
    (back,) = decode(encode((tensor,)))
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and type(back) is torch.Tensor
    assert torch.equal(back.view(-1).view(torch.uint8), _bits(tensor))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.view(-1).view(torch.uint8)


def test_arrays_come_back():
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    back = decode(encode(array))
    assert back.dtype == array.dtype and (back == array).all() and back.flags.writeable


@pytest.mark.parametrize(
    "value, place",
    [
        (
            {"state": {"w": {"step": object()}}},
            r"\['state'\]\['w'\]\['step'\] is a builtins.object",
        ),
        ([lambda: 1], r"\[0\] is a builtins.function"),
        ({"m": np.array([None])}, r"\['m'\] is a NumPy array of dtype object"),
        ([torch.ones(2).to_sparse()], r"\[0\] is a torch.sparse_coo tensor"),
        (Payload(), "the value is a .*Payload"),
    ],
)
def test_what_is_not_plain_is_named(value, place):
    with pytest.raises(TypeError, match=place):
        encode(value)


def test_a_value_that_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested deeper"):
        encode(value)


# --- bytes of others -----------------------------------------------------------------------------


def planted() -> list[bytes]:
    sound = encode({"a": [torch.ones(3), b"xyz", (1, 2)]})

    def text(value: Any, raw: bytes = b"") -> bytes:
        body = json.dumps(value).encode()
        return sound[:6] + len(body).to_bytes(8, "little") + body + raw

    return [
        b"",
        b"\0" * 14,
        pickle.dumps(Payload()),
        sound[:-1],
        sound + b"x",
        sound[:6] + (2**63).to_bytes(8, "little") + sound[14:],
        text({"tensor": ["float32", [2**40], 4]}, b"abcd"),
        text({"tensor": ["float32", [-1], -4]}),
        text({"tensor": ["load", [1], 4]}, b"abcd"),
        text({"tensor": ["float32", [1], True]}, b"a"),
        text({"array": ["O", [1], 8]}, b"abcdefgh"),
        text({"array": ["4f4", [1], 16]}, b"abcdefgh" * 2),
        text({"bytes": 5}, b"abcd"),
        text({"bytes": -1}),
        text({"size": [2**70]}),
        text({"eval": "1"}),
        text({"tuple": [], "list": []}),
        text({"dict": [[[1], 2]]}),
        text({"dict": [1]}),
        text({"set": [{"dict": []}]}),
        text({"device": "nothing"}),
        sound[:6] + (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ]


@pytest.mark.parametrize("number", range(len(planted())))
def test_other_bytes_are_malformed(number):
    with pytest.raises(Malformed):
        decode(planted()[number])
    assert not ran


def test_changed_bytes_are_a_value_or_malformed():
    rng = random.Random(7)
    sound = encode({"a": [torch.ones(3), np.ones(2), b"xyz", (1, 2), torch.float32]})
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data))
        except Malformed:
            pass


class Row:
    """A communicator of two ranks; the rank other than ``rank`` sends ``theirs``."""

    world, rank = 2, 0

    def __init__(self, theirs: bytes, rank: int = 0) -> None:
        self.theirs, self.rank = theirs, rank

    def all_gather(self, array: np.ndarray, what: str) -> None:
        if array.dtype == np.int64:
            array[1] = len(self.theirs)
        else:
            row = array.reshape(2, -1)[1]
            row[: len(self.theirs)] = np.frombuffer(self.theirs, np.uint8)

    def broadcast(self, array: np.ndarray, root: int, what: str) -> None:
        sent = np.frombuffer(self.theirs, np.uint8)
        array[:] = len(sent) if array.dtype == np.int64 else sent


@pytest.mark.parametrize(
    "theirs",
    planted() + [encode("no envelope"), b"x" + encode(1)] + [b"v" + data for data in planted()],
)
def test_a_rank_that_sends_other_bytes_is_named(theirs):
    with pytest.raises(_C.CommError, match="names: the message of rank 1 cannot be read"):
        _objects.exchange(Row(theirs), {"mine": 1}, "names")
    with pytest.raises(_C.CommError, match="names: the message of rank 0 cannot be read"):
        _objects.broadcast(Row(theirs, rank=1), None, "names")
    assert not ran


def test_what_another_rank_cannot_send_is_an_error_here_too():
    theirs, problem = _objects._packed({"step": Payload()})
    assert problem is not None
    with pytest.raises(TypeError, match=r"names: on rank 1 \['step'\] is a .*Payload"):
        _objects.exchange(Row(theirs), 1, "names")


@pytest.mark.parametrize("laid_down", [b"", b"x" * 7, pickle.dumps([Payload()]), b"\xff" * 16])
def test_a_channel_does_not_unpickle_what_lies_in_the_store(laid_down):
    store = dist.HashStore()
    channel = Channel(store, "t", 1, 2, 5, "planted")
    channel._store.set("0/all", laid_down)
    with pytest.raises(_C.CommError, match="cannot read the message of rank 0 to all"):
        channel.gather(b"mine", "a unit")
    assert not ran


def test_pieces_of_another_length_name_their_rank():
    store = dist.HashStore()
    errors: list[Any] = [None, None]

    def body(rank: int) -> None:
        channel = Channel(store, "t", rank, 2, 20, "pair")
        try:
            if rank == 1:
                channel.gather(b"short", "a unit")
            else:
                channel(np.zeros(8, np.uint8), 4, "a unit")
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(errors[0], _C.CommError) and "rank 1 sent 5 bytes, not 4" in str(errors[0])


def greeting(**changes: Any) -> bytes:
    settings = {_nccl._VERSION: "NCCL 2.28", "FSDPC_TIMEOUT": 3.0}
    fields = {
        "settings": settings, "host": "here", "pid": os.getpid(), "gpu": 0, "visible": "",
        "registers": True, "error": "", "ids": (b"a", b"b", "key"), **changes,
    }  # fmt: skip
    return encode(tuple(fields.values()))


def test_a_greeting_comes_back():
    hello = _nccl._Hello.from_bytes(greeting(), 0, "x")
    assert hello.to_bytes() == greeting() and hello.ids == (b"a", b"b", "key")


@pytest.mark.parametrize(
    "data",
    planted()
    + [
        encode(()),
        encode([1] * 8),
        greeting(pid=-1),
        greeting(pid=2**40),
        greeting(settings={}),
        greeting(ids=(b"a", "b", "c")),
        greeting(gpu=True),
        greeting(host=3),
    ],
)
def test_a_greeting_of_other_bytes_names_its_rank(data):
    with pytest.raises(_C.CommError, match="starting: the message of rank 3 cannot be read"):
        _nccl._Hello.from_bytes(data, 3, "starting")
    assert not ran


UNPICKLING = ("import pickle", "pickle.load", "_object(", "torch.load(")
# snapshot.py only writes pickles, for torch's viewer. The unpickler of dcp_folder.py accepts only
# torch's own classes and sets attributes only of their instances. torch_files.py only catches an
# error of pickle's.
PICKLES = {("snapshot.py", "import pickle"), ("dcp_folder.py", "import pickle"),
           ("torch_files.py", "import pickle")}  # fmt: skip
# These calls pass weights_only=True, so no code of the file runs.
PICKLES |= {("dcp_folder.py", "torch.load("), ("torch_files.py", "torch.load(")}


def test_the_package_unpickles_nothing():
    from pathlib import Path

    for file in Path(_objects.__file__).parents[1].rglob("*.py"):
        text = file.read_text()
        loads = [line for line in text.splitlines() if "torch.load(" in line]
        assert all("weights_only=True" in line for line in loads), file.name
        for word in UNPICKLING:
            if (file.name, word) not in PICKLES:
                assert word not in text, f"{file.name}: {word}"
