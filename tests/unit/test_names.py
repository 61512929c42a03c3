"""Tests of functions that remove the names of wrappers from parameter names, and of the name that
is announced for the next unit.
"""

from __future__ import annotations

import pytest

from fsdpc._fsdp1.names import announced, clean_fqn, flat_param_name, join, take_announced


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("", ""),
        ("a.b", "a.b"),
        ("_fsdp_wrapped_module", ""),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
        ("a._fsdp_wrapped_module._flat_param", "a._flat_param"),
        ("my_fsdp_wrapped_module.a", "my_fsdp_wrapped_module.a"),
    ],
)
def test_clean_fqn(name, clean):
    assert clean_fqn(name) == clean
    assert clean_fqn(clean) == clean


def test_join_and_flat_names():
    assert (join("", "a"), join("a.b", "c")) == ("a", "a.b.c")
    assert [flat_param_name(i) for i in range(3)] == [
        "_flat_param",
        "_flat_param_1",
        "_flat_param_2",
    ]


def test_an_announced_name_is_taken_once_and_forgotten_after_the_block():
    with announced("blocks.0"):
        assert take_announced("Block") == "blocks.0"
        assert take_announced("Block") == "Block"
    with announced("blocks.1"):
        pass
    assert take_announced("Block") == "Block"
