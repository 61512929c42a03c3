"""Tests of moving inputs to a device: what is moved, that all other values stay the same objects,
and the order of moving and casting. The meta device stands for a GPU.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fsdpc._engine.inputs import move_arguments, move_tree, preparation

META, CPU = torch.device("meta"), torch.device("cpu")
BF16 = torch.bfloat16
Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    name: str = "batch"


@pytest.mark.parametrize("value", [3, "text", None, [], (), {}, [1, {"k": (None,)}], object()])
def test_what_holds_no_tensor_is_left_alone(value: object):
    assert move_tree(META, value) is value


def test_what_is_there_is_the_same_object():
    held = {"a": [torch.zeros(2, device=META)], "b": (1, torch.ones(1, device=META))}
    assert move_tree(META, held) is held


def test_tensors_of_any_dtype_are_moved_in_any_container():
    mapping = collections.OrderedDict(a=torch.zeros(2, dtype=torch.int64))
    args, kwargs = move_arguments(
        META,
        (torch.zeros(2), [Pair(torch.ones(1), 2)], mapping, {torch.zeros(1)}),
        {"batch": Batch(torch.arange(3)), "flag": True},
    )
    tensor, pairs, moved, some = args
    assert tensor.device == pairs[0].a.device == moved["a"].device == META
    assert type(pairs[0]) is Pair and pairs[0].b == 2
    assert type(moved) is collections.OrderedDict and mapping["a"].device == CPU
    assert {t.device for t in some} == {META}
    assert kwargs["batch"].ids.device == META and kwargs["batch"].name == "batch"
    assert kwargs["flag"] is True


def test_a_packed_sequence_is_moved():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert move_tree(META, packed).data.device == META
    assert move_tree(CPU, packed) is packed


def test_nothing_is_prepared_for_a_cpu():
    assert preparation(None, None) is None
    assert preparation(CPU, None) is None


def test_moved_then_cast():
    prepare = preparation(META, BF16)
    assert prepare is not None
    (x, ids), kwargs = prepare((torch.ones(2), torch.arange(2)), {"y": torch.ones(1)})
    assert (x.device, x.dtype) == (META, BF16)
    assert (ids.device, ids.dtype) == (META, torch.int64)
    assert (kwargs["y"].device, kwargs["y"].dtype) == (META, BF16)
    only_moved, only_cast = preparation(META, None), preparation(CPU, BF16)
    assert only_moved is not None and only_moved((torch.ones(1),), {})[0][0].dtype == torch.float32
    assert only_cast is not None and only_cast((torch.ones(1),), {})[0][0].device == CPU
