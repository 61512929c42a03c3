"""Tests that a plan of a transformers configuration has the model's parameters and activations.

``python tests/dist/transformers_table.py`` checks all model folders of transformers.
"""

from __future__ import annotations

import json

import pytest
from harness import ranks

pytest.importorskip("transformers")

from transformers_table import counted, measured, planned, values_of

from fsdpc.__main__ import main

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
         "intermediate_size": 128, "num_hidden_layers": 5, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip


def plan_of(tmp_path, capsys, values, *more):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    code = main(["plan", str(path), "--json", *more])
    seen = capsys.readouterr()
    return code, json.loads(seen.out) if seen.out else seen.err


def test_default_configurations_have_the_librarys_count():
    """The planner once took each of these configurations for another kind of model."""
    for kind in ("deepseek_v3", "falcon", "gpt_neox", "bert", "opt", "gpt2", "t5"):
        values = values_of(kind)
        made, _ = planned(values, inputs=False)
        assert made.model.numel == counted(values), kind
    assert planned(values_of("deepseek_v3"), inputs=False)[0].model.numel > 670e9


def test_the_command_plans_what_the_library_builds(tmp_path, capsys):
    values = SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    code, found = plan_of(tmp_path, capsys, values, "--micro-batch", "2", "--storage", "bf16")
    assert code == 0 and found["parameters"] == counted(values) and found["units"] == 6
    assert found["peak"]["roles"]["activations"] > 0
    code, twice = plan_of(tmp_path, capsys, values, "--micro-batch", "4", "--storage", "bf16")
    assert twice["peak"]["roles"]["activations"] > found["peak"]["roles"]["activations"]
    code, rows = plan_of(tmp_path, capsys, values, "--api", "fully_shard")
    assert code == 0 and rows["parameters"] == found["parameters"]
    code, error = plan_of(tmp_path, capsys, values | {"model_type": "nobody_has"})
    assert code == 2 and "no model type 'nobody_has'" in error
    code, error = plan_of(tmp_path, capsys, values | {"architectures": ["NobodyForCausalLM"]})
    assert code == 2 and "NobodyForCausalLM" in error
    bert = SMALL | {"model_type": "bert"}
    code, error = plan_of(tmp_path, capsys, bert, "--compress", "int8")
    assert code == 2 and "by formula" in error and "'bert'" in error


@ranks(1)
def test_activations_are_those_of_a_step(rank, world):
    for kind in ("llama", "qwen2", "mixtral", "bert"):
        values = SMALL | {"model_type": kind}
        made, predicted = planned(values)
        assert not made.model.missing and predicted == pytest.approx(measured(values), rel=1e-3), (
            kind
        )
