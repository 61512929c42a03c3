"""Tests of casting inputs and buffers: what is cast, and that all other values stay the same
objects.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fsdpc._engine.inputs import cast_arguments, cast_tree
from fsdpc._fsdp1.mixed import FullPrecisionHooks, cast_buffers

BF16 = torch.bfloat16
Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    derived: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "derived", self.x * 2)


class Mapping(collections.OrderedDict):
    pass


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A class like transformers' outputs: items and fields have the same values, and update()
    raises.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            self[name] = getattr(self, name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return type(self), (self.loss, self.logits), dict(vars(self)), None, iter(self.items())

    def update(self, *args, **kwargs):
        raise TypeError("update")


@dataclasses.dataclass
class Needing(collections.OrderedDict):
    """A class that copy.copy cannot copy, because copy.copy calls the constructor without the
    required value.
    """

    first: torch.Tensor
    second: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


class Named(Pair):
    def __new__(cls, text):
        raise TypeError("takes a text")


class Registered:
    def __init__(self, x, note):
        self.x, self.note = x, note


torch.utils._pytree.register_pytree_node(
    Registered, lambda value: ([value.x], value.note), lambda items, note: Registered(*items, note)
)


@pytest.mark.parametrize(
    "value",
    [3, 2.5, "text", b"bytes", None, True, object(), [], (), {}, [1, "a"], {"k": (None,)}, Pair],
)
def test_what_holds_no_tensor_is_left_alone(value):
    assert cast_tree(BF16, value) is value


def test_what_needs_no_cast_is_the_same_object():
    done, ints = torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64)
    mask, complex_ = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)
    for value in (done, ints, mask, complex_, [done, ints], {"a": (mask,)}, Pair(done, ints)):
        assert cast_tree(BF16, value) is value


def test_containers_keep_their_types_and_the_originals_their_values():
    f = torch.ones(2)
    containers = {
        list: [f, 1],
        tuple: (f, 1),
        dict: {"a": f},
        Pair: Pair(f, 2),
        Mapping: Mapping(a=f),
        collections.defaultdict: collections.defaultdict(list, {"a": f}),
        set: {f},
    }
    for kind, value in containers.items():
        got = cast_tree(BF16, value)
        assert type(got) is kind and got is not value
        leaves = [x for x in (got.values() if isinstance(got, dict) else got)]
        assert [x.dtype for x in leaves if isinstance(x, torch.Tensor)] == [BF16]
    assert cast_tree(BF16, containers[collections.defaultdict]).default_factory is list
    assert f.dtype == torch.float32


def test_outputs_of_libraries_and_users_keep_types_and_fields():
    f = torch.ones(2)
    output = Output(f.sum(), f)
    output.extra = "kept"
    got = cast_tree(BF16, output)
    assert type(got) is Output and got.extra == "kept" and list(got) == ["loss", "logits"]
    assert got["logits"] is got.logits and got.logits.dtype == got.loss.dtype == BF16
    assert output.logits is f
    named = cast_tree(BF16, Named._make((f, None)))
    assert type(named) is Named and named.a.dtype == BF16 and named.b is None
    held = cast_tree(BF16, [Registered(f, "note"), collections.deque([f], maxlen=3)])
    assert type(held[0]) is Registered and (held[0].x.dtype, held[0].note) == (BF16, "note")
    assert held[1][0].dtype == BF16 and held[1].maxlen == 3
    tagged = type("Tagged", (list,), {})([f])
    tagged.tag = 1
    assert cast_tree(BF16, tagged).tag == 1
    best = cast_tree(BF16, torch.max(torch.ones(2, 3), 0))
    assert isinstance(best, torch.return_types.max) and best.values.dtype == BF16


def test_dataclasses_and_packed_sequences():
    got = cast_tree(BF16, Frozen(torch.ones(2)))
    assert (got.x.dtype, got.derived.dtype) == (BF16, BF16)
    packed = cast_tree(BF16, pack_sequence([torch.ones(3), torch.ones(2)]))
    assert packed.data.dtype == BF16 and packed.batch_sizes.dtype == torch.int64


def test_casts_are_differentiable():
    x = torch.ones(3, requires_grad=True)
    (args, kwargs) = cast_arguments(BF16, ([x],), {"y": x})
    (args[0][0] * kwargs["y"]).sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.tolist() == [2.0, 2.0, 2.0]


def test_buffers_change_in_place_and_their_dtypes_are_reported():
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    model["again"] = model["a"]
    buffer = model["a"].running_mean
    changed = cast_buffers(model, {model["b"]}, torch.float64)
    names = {f"{m}.{n}" for m in ("a", "again") for n in ("running_mean", "running_var")}
    assert changed == dict.fromkeys(names, torch.float32)
    assert model["a"].running_mean is buffer and buffer.dtype == torch.float64
    assert model["a"].num_batches_tracked.dtype == torch.int64
    assert model["b"].running_mean.dtype == torch.float32
    assert cast_buffers(model, set(), None) == {}


def test_full_precision_hooks_cast_in_and_out():
    seen = []

    class Probe(nn.Module):
        def forward(self, x, mask):
            seen.append((x.dtype, mask.dtype))
            return {"out": x + 1, "mask": mask}

    module = Probe()
    FullPrecisionHooks(module)
    out = module(torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.bool))
    assert seen == [(torch.float32, torch.bool)]
    assert out["out"].dtype == BF16 and out["mask"].dtype == torch.bool
    assert module(torch.ones(2), torch.ones(2, dtype=torch.bool))["out"].dtype == torch.float32


def test_a_dict_that_is_a_dataclass_with_a_required_field():
    value = Needing(torch.ones(2), torch.ones(3))
    got = cast_tree(BF16, value)
    assert type(got) is Needing and value.first.dtype == torch.float32
    assert [got.first.dtype, got["second"].dtype] == [torch.bfloat16] * 2
