"""Tests of ``fsdpc plan`` as users call it, and of the parts of the planner that a run does not
reach.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from functools import partial

import pytest
import torch
from plan_models import LlamaBlock
from torch import nn

from fsdpc import lowbit
from fsdpc.__main__ import main
from fsdpc.plan import advise, states
from fsdpc.plan.cards import CARDS, bytes_of
from fsdpc.plan.cost import collective_seconds, cost
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import CPU, Param, Setup, Unit, check
from fsdpc.plan.options import WRAPS
from fsdpc.plan.sources import configs, geometry
from fsdpc.plan.sources.traced import build_traced

BIG = ["llama-3-405b", "--world", "16384", "--sequence", "8192", "--loss", "fused"]


def planned(name, wrap="blocks", **more):
    return plan(partial(geometry.build, geometry.PRESETS[name], wrap=wrap), Setup(**more))


def output(capsys, *arguments):
    code = main(["plan", *arguments])
    return code, capsys.readouterr()


@pytest.mark.parametrize("zero", ["2", "3"])
def test_json_adds_up(capsys, zero):
    words = ["--params", "7b", "--gpu", "a100-80", "--json", "--explain", "--zero", zero]
    code, seen = output(capsys, *words)
    found = json.loads(seen.out)
    strategy = {"2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}[zero]
    assert code == 0 and found["fits"] is True and found["setup"]["strategy"] == strategy
    assert found["parameters"] == pytest.approx(7e9, rel=1e-3)
    peak = found["peak"]
    assert (
        peak["bytes"] == sum(peak["roles"].values()) == max(p["bytes"] for p in found["timeline"])
    )
    assert peak["bytes"] < peak["upper_bytes"] < found["usable_bytes"]
    always = {r["role"]: r["bytes"] for r in found["rows"] if "rest" in r["lifetime"]}
    assert found["timeline"][0]["bytes"] == sum(always.values())
    assert {c["switch"] for c in found["changes"]} >= {"checkpoint every block", "CPU offload"}


def test_the_table_names_what_and_why(capsys):
    code, seen = output(capsys, "llama-3-8b", "--memory", "24GB", "--explain", "--zero", "1")
    assert code == 0
    for part in (
        "gather slots",
        "exact",
        "does not fit",
        "no stage that shards optimizer states",
        "What each switch would change",
        "blocks.0",
        "issue 964",
    ):
        assert part in seen.out, part


@pytest.mark.long
def test_one_line_for_each_row_fits_the_terminal(capsys, monkeypatch):
    """A line of output has at most 100 columns, or 80 for a plan without further options. Reasons
    are shown only with --explain.
    """
    found, suggest = [], advise.suggest

    def suggest_once(*arguments, **options):  # the result does not depend on the width
        found[:] = found or [suggest(*arguments, **options)]
        return found[0]

    monkeypatch.setattr(advise, "suggest", suggest_once)
    big = ["llama-3-405b", "--world", "128", "--gpu", "h100"]
    for more in ([], ["--explain"], ["--suggest", "--sequence", "8192"], ["--simulate"]):
        for columns in ("80", "300"):
            monkeypatch.setenv("COLUMNS", columns)
            _, seen = output(capsys, *big, *more)
            lines = seen.out.splitlines()
            assert max(map(len, lines)) <= 100, more
            assert ("issue 964" in " ".join(seen.out.split())) == (more == ["--explain"])
    monkeypatch.setenv("COLUMNS", "80")
    _, seen = output(capsys, *big)
    lines = seen.out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 50
    rows = lines[lines.index("Memory of each rank") + 3 :]
    assert {"shards", "gather slots", "activations", "workspace"} <= {r[:20].strip() for r in rows}


def test_help_has_examples_that_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    examples = [x.strip() for x in capsys.readouterr().out.splitlines() if "  fsdpc plan " in x]
    assert ended.value.code == 0 and len(examples) == 3
    words = [re.split(r" {2,}", line)[0].split()[1:] for line in examples]
    assert main(words[0]) == 0
    assert [w[1] for w in words[1:]] == ["config.json", "train:build"]


def test_own_units_for_embedding_and_head_are_tried(capsys):
    """The planner tries units of their own for the embedding and the head. For 405 B on 128
    ranks, the root's packed gradients alone take 33.6 GB of slots.
    """
    big = ["llama-3-405b", "--world", "128", "--sequence", "8192", "--json", "--explain"]
    _, seen = output(capsys, *big)
    found = {c["switch"]: c["bytes"] for c in json.loads(seen.out)["changes"]}
    assert found["embedding and head as units of their own"] < -25e9
    assert {"steps in backward", "CPU offload, states on a disk"} <= set(found)
    _, seen = output(capsys, *big, "--wrap", "embeddings")
    assert "own" not in {c["switch"] for c in json.loads(seen.out)["changes"]}


def test_suggestions_differ(capsys):
    """If few plans fit, every way to free memory is tried. No suggested plan beats another."""
    builds = {w: partial(geometry.build, geometry.PRESETS["llama-3-8b"], wrap=w) for w in WRAPS[:2]}
    setup = Setup(world=4, compute="bfloat16")
    names = ("adamw", "adamw8bit")
    found = advise.suggest(builds, setup, CARDS["h100"], int(24e9), optimizers=names)
    assert len(found) > 3 and len({s.kind for s in found}) == len(found)
    assert not any(a.beats(b) for a in found for b in found)
    said = {mean for s in found for mean in s.means}
    assert {"fused loss", "states in host memory", "int8 activations"} <= said, said
    assert {"steps in backward", "activations in host memory"} <= said, said
    for s in found:
        again = plan(builds["embeddings"], s.plan.setup)
        assert again.upper == s.plan.upper <= 24e9
    easy = advise.suggest(builds, setup, CARDS["h200"], CARDS["h200"].usable, optimizers=names)
    assert ("embedding and head as units of their own",) in [s.means for s in easy]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "unknown model"),
        (["llama3-8b"], "did you mean llama-3-8b?"),
        (["Llama3.1-70B"], "did you mean llama-3-70b?"),
        (["gpt2", "--simulate", "--worlds", "8,x"], "'x' is no number of ranks"),
        (["gpt2", "--simulate", "--worlds", "8,,-3"], "--worlds 8,64,512"),
        (["--layers", "4"], "--params"),
        (["--params", "1m", "--layers", "80", "--hidden", "8192"], "fewer than attention"),
        (["gpt2", "--gpu", "h9000"], "unknown GPU"),
        (["gpt2", "--shard", "4"], "HYBRID"),
        (["gpt2", "--world", "6", "--strategy", "HYBRID_SHARD", "--shard", "4"], "multiple"),
        (["gpt2", "--compute", "int3"], "unknown dtype"),
        (["gpt2", "--suggest"], "--gpu or --memory"),
        (["no_such_module:build"], "cannot import"),
        (["json:nothing"], "no function"),
        (["gpt2", "--checkpointing", "2"], "from 0 to 1"),
        (["gpt2", "--compress", "int8", "--offload-activations"], "use one of the two"),
        (["plan_models:gpt", "--offload-activations"], "by formula"),
        (["gpt2", "--offload-states", "0.5", "--optimizer", "adamw4bit"], "has no states"),
        (["gpt2", "--offload-states", "0.5", "--optimizer", "muon"], "host memory (--offload)"),
        (["gpt2", "--cpu", "--disk", "96", "--optimizer", "sgd"], "or use one of adamw, "),
        (["gpt2", "--offload-states", "50"], "from 0 to 1"),
        (["gpt2", "--offload-states", "0.5", "--disk", "96", "--offload"], "one of host and disk"),
        (["plan_models:gpt", "--cpu", "--compress", "int8"], "by formula"),
        (["plan_models:gpt", "--micro-batch", "2"], "decides it"),
        (["plan_models:vit", "--suggest", "--gpu", "t4"], "no token ids"),
        (["gpt2", "--suggest", "--cpu"], "leave --cpu away"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, text):
    code, seen = output(capsys, *arguments)
    assert code == 2 and text in seen.err and seen.err.count("\n") == 1
    assert seen.out == ""


@pytest.mark.long
def test_suggestions_fit_and_are_sorted(capsys):
    code, seen = output(
        capsys,
        "llama-3-8b",
        "--gpu",
        "h100",
        "--suggest",
        "--json",
        "--accumulation",
        "4",
        "--worlds",
        "16",
    )
    fits = json.loads(seen.out)["fits"]
    assert code == 0 and len(fits) > 3
    assert all(f["upper_bytes"] <= CARDS["h100"].usable for f in fits)
    speeds = [f["tokens_per_second"] for f in fits]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.long
def test_the_smallest_world_is_named_and_right(capsys):
    code, seen = output(
        capsys,
        "llama-3-70b",
        "--gpu",
        "h100",
        "--world",
        "4",
        "--suggest",
        "--sequence",
        "4096",
        "--json",
        "--loss",
        "fused",
    )
    found = json.loads(seen.out)
    builds = {
        w: partial(geometry.build, geometry.PRESETS["llama-3-70b"], wrap=w)
        for w in ("blocks", "embeddings")
    }
    if found["fits"]:
        less = ("offload", "8bit", "in host memory")
        assert all(any(word in f["plan"] for word in less) for f in found["fits"])
        return
    world = found["smallest_world"]
    assert code == 1 and world > 4
    setup = Setup(compute="bfloat16", sequence=4096, loss="fused")
    assert advise.smallest_world(builds, setup, CARDS["h100"].usable) == world


def test_nothing_helps_where_one_unit_is_too_large(capsys):
    code, seen = output(capsys, "llama-3-70b", "--memory", "2GB", "--suggest")
    assert code == 1 and "does not fit on any number of ranks" in seen.out


def test_every_optimizer_is_explained(capsys):
    """Host memory and a disk are offered only to optimizers that fsdpc.optim can offload."""
    for name, kind in states.OPTIMIZERS.items():
        code, seen = output(capsys, "gpt2", "--gpu", "h100", "--explain", "--optimizer", name)
        assert code == 0 and ("states in host memory" in seen.out) == kind.offloads, name
        assert ("states on a disk" in seen.out) == kind.takes({"disk": 1}), name


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--suggest", "--gpu", "h100"], ["--explain"]])
def test_405_b_on_16384_ranks_is_quick_and_small(more):
    """Planning is only arithmetic: it imports no torch, has no loop over ranks and parameters, and
    makes a bounded number of plans.
    """
    script = (
        "import sys\n"
        "from fsdpc.__main__ import main\n"
        "from fsdpc.plan import advise, command, ledger\n"
        "made = []\n"
        "def plan(*what):\n"
        "    made.append(what)\n"
        "    return ledger.plan(*what)\n"
        "advise.plan = command.plan = plan\n"
        f"code = main(['plan', *{[*BIG, *more]!r}])\n"
        "assert 'torch' not in sys.modules and code == 0\n"
        "peak = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "print(len(made), peak.split()[1])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    plans, kilobytes = map(int, run.stdout.splitlines()[-1].split())
    assert plans <= 400
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # ASan keeps memory that was freed
        assert kilobytes < 300_000


def test_the_peak_is_of_a_timeline_not_a_sum():
    made = planned("llama-3-8b", compute="bfloat16")
    assert made.peak.bytes < sum(row.bytes for row in made.rows)
    assert made.peak.phase in ("forward", "backward")
    last = [p for p in made.timeline if p.phase == "backward"][-1]
    assert last.bytes < made.timeline[0].bytes * 1.2, "activations are gone after backward"


@pytest.mark.parametrize("wrap", ["blocks", "embeddings", "whole"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("offload", [False, True])
def test_everything_that_lives_is_given_back(wrap, ratio, offload):
    setup = Setup(compute="bfloat16", checkpointing=ratio, offload_activations=offload)
    model = geometry.build(geometry.PRESETS["llama-1b"], setup, wrap)
    live = 0
    for moment in model.moments:
        assert moment.rise >= max(0, moment.delta), moment
        live += moment.delta
        assert live >= 0, moment
    assert live <= 2 * 2**30


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_compressed_activations_are_priced_as_they_are_packed(dtype):
    """A packed tensor costs its packed bytes. Attention's q, k, v and output are not packed."""
    from fsdpc.activations.compression import _Packed

    g = geometry.PRESETS["llama-1b"]
    whole = torch.zeros(512 * 256)
    packed = _Packed(whole, dtype)
    size = packed.nbytes
    q, kv, rate = g.heads * g.head_dim, g.kv_heads * g.head_dim, size / whole.numel()
    by_hand = rate * (4 * g.hidden + q + 4 * g.ffn) + 4 * (2 * q + 2 * kv) + 4 * g.heads + 8
    low, exact = Setup(compress=dtype, **CPU), Setup(**CPU)
    assert geometry.block_saved(g, low) == round(by_hand)
    assert (
        planned("llama-1b", compress=dtype, **CPU).peak.bytes
        < planned("llama-1b", **CPU).peak.bytes
    )
    every = [geometry.build(g, replace(s, checkpointing=1.0)) for s in (low, exact)]
    backward = [next(m for m in made.moments if m.recomputed) for made in every]
    assert every[0].moments == every[1].moments, "inputs of checkpointed blocks stay as they are"
    assert backward[0].recomputed == backward[1].recomputed, "a block is computed again whole"


@pytest.mark.parametrize("preset", ["llama-1b", "gpt-oss-8e", "mixtral-8x7b"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_packing_passes_memory_twice(preset, attention):
    """Packing reads each tensor and writes its packed form. Unpacking does the reverse. Both run at
    the memory's bandwidth, and their time is added to the time of compute.
    """
    g, options = geometry.PRESETS[preset], {"attention": attention, "accumulation": 3}
    saved = [geometry.block_saved(g, Setup(compress=c, **options)) for c in ("bf16", "int8")]
    tensors = geometry.block_tensors(g, Setup(compress="int8", **options))
    elements = sum(t.elements for t in tensors if t.packed)
    assert saved[0] - saved[1] == pytest.approx(elements * (2 - 260 / 256), abs=1)
    both_forms = 2048 * elements * g.layers * (4 + 260 / 256)
    with_it, without = (planned(preset, compress=c, **options) for c in ("int8", ""))
    card = CARDS["h100"]
    slow, fast = cost(with_it, card), cost(without, card)
    assert slow.packing == pytest.approx(3 * 2 * both_forms / card.bandwidth)
    assert fast.packing == 0 and slow.compute == fast.compute
    wide = cost(with_it, replace(card, link=1e15, network=1e15))
    assert wide.step == pytest.approx(wide.compute + wide.packing + wide.exposed + wide.update)
    kept = planned(preset, compress="int8", checkpointing=1.0, **options).model
    assert kept.packing == 0, "inputs of checkpointed blocks stay as they are"
    low = planned(preset, compress="bf16", compute="bfloat16", **options)
    assert low.model.packing == 0, "tensors in bfloat16 stay as they are"


@pytest.mark.parametrize("preset", ["llama-1b", "gpt-oss-8e", "mixtral-8x7b"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_offloaded_activations_leave_the_gpu(preset, attention):
    """Tensors of 1 MiB or more in the formula go to host memory. Smaller ones stay on the GPU."""
    options = {"compute": "bfloat16", "attention": attention, "micro_batch": 2}
    g, setup = geometry.PRESETS[preset], Setup(offload_activations=True, **options)
    per_token = [t.elements * t.item for t in geometry.block_tensors(g, setup)]
    here, there = planned(preset, **options), planned(preset, offload_activations=True, **options)
    tokens = setup.micro_batch * setup.sequence
    large = [s * tokens for s in per_token if s * tokens >= 1 << 20] * g.layers
    gone = there.model.away
    assert gone.copied == sum(large) <= there.host_bytes == gone.pinned
    ends = [next(p for p in made.timeline if p.unit == "head and loss") for made in (here, there)]
    saved = ends[0].roles["activations"] - ends[1].roles["activations"]
    assert saved == gone.copied - gone.resident and there.peak.bytes < here.peak.bytes


def test_padding_is_counted_and_pieces_are_equal():
    unit = Unit("u", 0, (Param("a", 1001), Param("b", 7)))
    for world in (1, 3, 4):
        made = plan(geometry_model(unit), Setup(world=world, **CPU))
        assert made.engine.stats["master_bytes"] * world >= 1008 * 4
        assert made.engine.stats["master_bytes"] % 64 == 0


def geometry_model(unit):
    from fsdpc.plan.model import Model

    return Model("one unit", (unit,))


def test_ring_times_grow_with_hosts():
    setup, card = check(Setup(world=64)), CARDS["h100"]
    inside = collective_seconds(1e9, 8, setup, card)
    assert inside == pytest.approx(1e9 * 7 / 8 / 360e9, rel=0.02)
    assert collective_seconds(1e9, 64, setup, card) > inside
    assert collective_seconds(1e9, 1, setup, card) == 0
    made = planned("llama-3-8b", world=8, compute="bfloat16", sequence=8192)
    found = cost(made, card)
    # Every block is gathered twice, except for the last two, whose values are still in their slots.
    # The root is gathered once, and each unit is reduced once. For each of these collectives, a
    # rank sends 7/8 of the unit's bytes.
    blocks = sum(u.numel for u in made.model.units[1:])
    root, last = made.model.units[0].numel, made.model.units[-1].numel
    wire = (blocks * (2 * 2 + 4) - 2 * last * 2 + root * (2 + 4)) * 7 / 8
    assert found.sent_bytes == pytest.approx(wire, rel=1e-3)


def test_simulation_shows_where_scaling_stops(capsys):
    code, seen = output(capsys, "llama-3-70b", "--simulate", "--json", "--worlds", "8,512,100000")
    rows = json.loads(seen.out)
    assert code == 0 and [r["world"] for r in rows] == [8, 512, 100000]
    assert rows[0]["efficiency"] > 0.8 > rows[2]["efficiency"]


def test_the_formula_is_near_a_trace():
    """The formula for a Llama-like block in bf16 with fused norms is within 7 % of the trace."""
    g = geometry.Geometry("small", 6, 256, 8, 2, 32, 688, 512)

    def factory():
        blocks = nn.ModuleList(LlamaBlock(256, 8, 2, 688) for _ in range(6))
        for block in blocks:  # torch's RMSNorm on the CPU is several operators
            block.norm1, block.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        return nn.Sequential(*blocks), (torch.randn(2, 128, 256),)

    setup = Setup(world=2, compute="bfloat16", micro_batch=2, sequence=128, **CPU)
    traced = build_traced(factory, setup)
    block = next(m for m in traced.moments if m.unit == "2" and m.phase == "forward")
    formula = geometry.block_saved(g, setup) * 2 * 128
    assert block.delta == pytest.approx(formula, rel=0.07)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}


def test_configs_without_the_library_are_exact_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(configs, "installed", lambda: False)
    path = tmp_path / "config.json"
    for values, numel in (
        (LLAMA, 8_030_261_248),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, 8_030_261_248 + 32 * 43_008),
        (GPT2 | {"vocab_size": 50257}, 124_439_808),
    ):
        path.write_text(json.dumps(values))
        code, seen = output(capsys, str(path), "--json")
        assert code == 0 and json.loads(seen.out)["parameters"] == numel
    for kind in ("deepseek_v3", "falcon", "gpt_neox", "bert", "opt", "nobody"):
        path.write_text(json.dumps(LLAMA | {"model_type": kind, "n_routed_experts": 256}))
        code, seen = output(capsys, str(path), "--json")
        assert code == 2 and repr(kind) in seen.err and seen.out == ""
    path.write_text("{}")
    code, seen = output(capsys, str(path))
    assert code == 2 and "model_type" in seen.err


PUBLISHED = {
    "gpt2": 124_439_808,
    "llama-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-2-13b": 13_015_864_320,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


def test_exact_is_said_of_models_that_exist(capsys):
    for name, g in geometry.PRESETS.items():
        made = planned(name)
        assert g.guessed or g.numel == made.model.numel == PUBLISHED[name], name
        assert any(row.exact for row in made.rows) != g.guessed
    code, seen = output(capsys, "--params", "7b", "--gpu", "h100")
    assert code == 0 and " exact\n" not in seen.out and "\nfits:" not in seen.out


def test_the_upper_bound_has_the_formulas_doubt():
    made = planned("llama-3-8b", compute="bfloat16", attention="eager", micro_batch=4)
    assert made.upper - made.peak.bytes > made.peak.roles["activations"]
    assert made.fits(made.upper) is True and made.fits(made.upper - 1) is False


def test_blocks_that_share_a_parameter_with_others_are_no_units():
    """If each of the blocks were a unit, the shared parameter would count twice and the tie would
    break.
    """

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.ModuleList(nn.Embedding(8, 4) for _ in range(4))
            self.heads = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(4))
            for head, embed in zip(self.heads, self.embed, strict=True):
                head.weight = embed.weight

    made = build_traced(Heads, Setup(**CPU))
    assert made.numel == 4 * 32 and len(made.units) == 1


def test_parameters_in_codes_are_counted_as_values():
    """The number of values and the FLOPs equal those of a model without quantized parameters.
    Weight gradients of frozen parameters take no FLOPs.
    """

    def made(quantised):
        model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128), nn.Linear(128, 4))
        model[:2].requires_grad_(False)
        model = lowbit.quantize(model, embeddings=True) if quantised else model
        return {"model": model, "inputs": torch.zeros(2, 8, dtype=torch.long)}

    coded, plain = (build_traced(partial(made, low), Setup(**CPU)) for low in (True, False))
    numel, trained = 64 * 128 + 128 * 129 + 129 * 4, 129 * 4
    assert coded.values == plain.values == plain.numel == numel
    assert coded.numel < numel
    assert coded.flops == pytest.approx(2 * 16 * (2 * numel + trained), rel=0.01)
    assert plain.flops == pytest.approx(coded.flops)


BUILDERS = """
import copy
import torch
from torch import nn

def made(**more):
    return nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32, **more) for _ in range(3)))

ids = torch.arange(16).view(2, 8)
def plain(): return made(), ids
def to_cpu(): return made().to("cpu"), ids
def cuda(): return made().cuda(), ids.cuda()
def to_cuda(): return made().to(torch.device("cuda", 0)), ids.to("cuda:0", non_blocking=True)
def copied(): return copy.deepcopy(made()), ids
def compiled(): return torch.compile(made()), torch.randint(64, (2, 8), device="cuda")
def meta():
    with torch.device("meta"):
        return made(), ids
def trunc():
    model = made()
    for param in model.parameters():
        nn.init.trunc_normal_(param, std=0.02)
    return model, ids
def counted():
    assert [round(p, 2) for p in torch.linspace(0, 0.2, 3).tolist()] == [0, 0.1, 0.2]
    assert ids.max().item() == 15 and torch.ones(2, dtype=torch.long).sum() == 2
    return made(), ids
def bf16(): return made().to(torch.bfloat16), ids
def half(): return made().half(), ids
def tied():
    model = made()
    model[2].weight = model[1].weight
    return model.to(torch.bfloat16), ids

class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.inner, self.up = how, made(), nn.Parameter(torch.ones(4, 32, 32))

    def forward(self, x):
        x = self.inner(x)
        if self.how == "item" and x.abs().max().item() > 9:
            return x
        if self.how == "shape":
            return x.view(7, -1)
        ends = torch.arange(4, 17, 4, dtype=torch.int32)
        return torch._grouped_mm(x.flatten(0, 1), self.up, offs=ends)

def grouped(): return Odd("grouped"), ids
def item(): return Odd("item"), ids
def shape(): return Odd("shape"), ids
def raises(): return 1 / 0
def lazy(): return nn.LazyLinear(8), ids
def one(): return made(), ids, lambda output: output.float().mean()
def two(): return made(), ids, lambda output, inputs: output.float().mean()
def emptied():
    def register(module, name, param):
        module._parameters[name] = param
        if param is not None:
            state = {**vars(param), "requires_grad": param.requires_grad}
            module._parameters[name] = type(param)(param.to(torch.device("meta")), **state)
    real, nn.Module.register_parameter = nn.Module.register_parameter, register
    try:
        return made(), ids
    finally:
        nn.Module.register_parameter = real
def reads(): return made(), made()[1].weight.sum().item()
def ends(): raise SystemExit("no data")
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Provide a function that plans a function of ``BUILDERS``, given by its name."""
    (tmp_path / "their_program.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_program", raising=False)
    more = ("--cpu", "--compute", "storage", "--memory", "9GB", "--wrap", "whole", "--world", "2")
    return lambda name, *last: output(capsys, f"their_program:{name}", *more, *last)


def test_ordinary_builders_are_planned(program):
    def sizes(name):
        code, seen = program(name, "--json")
        assert code == 0, (name, seen.err)
        found = json.loads(seen.out)
        assert found["fits"] is True
        return found["parameters"], found["peak"]["bytes"], found["peak"]["roles"]["activations"]

    plain = sizes("plain")
    for name in ("to_cpu", "cuda", "to_cuda", "copied", "compiled", "meta", "trunc", "counted",
                 "emptied", "one", "two"):  # fmt: skip
        assert sizes(name) == plain, name
    assert sizes("bf16") == sizes("half") < plain
    assert sizes("tied")[0] == plain[0] - 32 * 32 and sizes("grouped")[0] == plain[0] + 4 * 32 * 32


@pytest.mark.parametrize("name", ["item", "shape"])
def test_a_step_that_cannot_be_traced_leaves_the_engines_rows(program, name):
    line = next(i for i, text in enumerate(BUILDERS.splitlines(), 1)
                if {"item": ".item() > 9", "shape": "x.view(7"}[name] in text)  # fmt: skip
    code, seen = program(name)
    assert code == 0 and seen.err == "" and "exact" in seen.out and "gather slots" in seen.out
    notes = seen.out.replace("\n  ", " ").splitlines()
    (note,) = (text for text in notes if "note: activations are not in the plan" in text)
    assert f"(their_program.py:{line})" in note
    assert "cannot say whether it fits" in seen.out and "\nfits:" not in seen.out
    code, seen = program(name, "--json")
    assert json.loads(seen.out)["fits"] is None


@pytest.mark.parametrize("name", ["raises", "reads", "ends", "lazy"])
def test_a_builder_that_raises_is_quoted_with_its_line(program, name):
    line = next(i for i, t in enumerate(BUILDERS.splitlines(), 1) if t.startswith(f"def {name}("))
    code, seen = program(name)
    assert code == 2 and seen.out == "" and seen.err.count("\n") == 1
    assert f"(their_program.py:{line})" in seen.err
    assert ("give it sizes" in seen.err) == (name == "lazy")


def test_sizes_are_read_as_written():
    assert bytes_of("24GB") == 24e9 and bytes_of("22.5GiB") == 22.5 * 2**30
    assert geometry.count_of("6.57B") == 6.57e9 and geometry.count_of("350m") == 350e6
    for none in ("plenty", "24", "-3GB", "1e400"):
        with pytest.raises(ArgumentTypeError, match="is no size such as 24GB"):
            bytes_of(none)
    with pytest.raises(ArgumentTypeError, match="is no number such as 7b"):
        geometry.count_of("7x")


def test_a_traced_model_keeps_its_micro_batch(capsys):
    """The traced inputs fix the micro-batch, so `--suggest` tries no other micro-batch. Otherwise
    it would find that a micro-batch of any size fits.
    """
    arguments = ["plan_models:gpt", "--world", "2", "--compute", "storage"]
    code, seen = output(capsys, *arguments, "--json")
    found = json.loads(seen.out)
    assert code == 0 and found["peak"]["roles"]["activations"] > 0
    more = ["--suggest", "--memory", "3GB", "--json", "--accumulation", "4"]
    code, seen = output(capsys, *arguments, *more)
    assert code == 0
    assert all("micro-batch 1 x 4" in f["plan"] for f in json.loads(seen.out)["fits"])


def test_a_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    code, _ = output(capsys, "llama-3-8b", "--gpu", "h100", "--plot", str(path))
    assert code == 0
    text = path.read_text()
    assert text.startswith("<?xml") and "http://" not in text.split("<defs>")[-1][:1000]


def test_a_snapshot_passes_torchs_own_reader(tmp_path, capsys):
    """torch's viewer code can read the snapshot, and the snapshot's peak equals the plan's."""
    from torch.cuda import _memory_viz

    path = tmp_path / "plan.pickle"
    code, seen = output(capsys, "llama-3-8b", "--json", "--snapshot", str(path))
    data = path.read_bytes()
    assert code == 0 and data[:2] == b"\x80\x04"
    found = pickle.loads(data)
    live = top = 0
    for entry in found["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        if entry["action"] == "alloc":
            top = max(top, live)
    timeline = json.loads(seen.out)["timeline"]
    assert live == timeline[-1]["bytes"], "what is left is the last moment"
    assert top == json.loads(seen.out)["peak"]["bytes"]
    entries = len(found["device_traces"][0])
    assert f"{entries} entries" in _memory_viz.trace(found)
    assert _memory_viz.segsum(found) and _memory_viz.trace_plot(found)


def test_commands_are_listed(capsys):
    assert main([]) == 0
    assert "plan" in capsys.readouterr().out
    assert main(["no-such"]) == 2
    assert "no-such" in capsys.readouterr().err


def test_simulate_up_to_a_hundred_thousand_ranks():
    """Simulating a model of 405 B parameters with four strategies on eight world sizes takes little
    time and memory.
    """
    program = (
        "import sys, time; from fsdpc.__main__ import main; begin = time.process_time();"
        "code = main(['simulate', 'llama-3-405b', '--gpu', 'h100', '--json']);"
        "seconds = time.process_time() - begin;"
        "peak = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'));"
        "print(seconds, peak.split()[1], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    seconds, kilobytes, code = done.stderr.split()[-3:]
    assert code == "0", done.stderr
    assert float(seconds) < 2 and int(kilobytes) < 500_000
    found = json.loads(done.stdout)
    assert list(found) == ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
    for rows in found.values():
        assert rows["worlds"][-1]["world"] == 100_000
        assert rows["worlds"][-1]["efficiency"] < rows["worlds"][2]["efficiency"]
    assert found["FULL_SHARD"]["stops_scaling"] < 100_000


def test_copies_of_a_hybrid_plan_meet_over_the_network():
    """Replicas of a piece are on different hosts: each sum uses one network interface, not the
    links between GPUs.
    """
    setup = Setup(world=32, strategy="HYBRID_SHARD", shard=8, ranks_per_host=8)
    card = CARDS["h100"]
    apart = collective_seconds(1e9, 4, setup, card, stride=8)
    assert apart == pytest.approx(1e9 * 3 / 4 / (0.8 * card.network) + 3 * 10e-6)
    assert collective_seconds(1e9, 4, setup, card) < apart / 5
    half = collective_seconds(1e9, 8, setup, card, stride=4)  # two ranks of a group share a host
    assert half == pytest.approx(1e9 * 3 / 4 / (2 * 0.8 * card.network) + (4 * 2 + 3 * 10) * 1e-6)


def test_a_measured_link(capsys):
    """A measured rate is the sum over all interfaces of a host. It is used unchanged."""
    command = ["plan", "--params", "7b", "--gpu", "h100", "--world", "32", "--json"]
    steps = {}
    for link in ("", "100Gbit", "947Mbit/s"):
        assert main([*command, *(["--link", link, "--latency", "0.2ms"] if link else [])]) == 0
        steps[link] = json.loads(capsys.readouterr().out)["cost"]["wire"]
    assert steps["947Mbit/s"] / steps["100Gbit"] == pytest.approx(100 / 0.947, rel=0.05)
    assert steps["100Gbit"] > steps[""]
    for wrong in (["--link", "10"], ["--link", "-1Gbit"], ["--latency", "fast"]):
        with pytest.raises(SystemExit):
            main([*command, *wrong])
    assert "is not like 0.2ms or 50us" in capsys.readouterr().err
    assert main(["plan", "--params", "1b", "--cpu", "--link", "1Gbit"]) == 2


def test_a_reader_that_ends_early_is_no_error():
    command = [sys.executable, "-m", "fsdpc", "plan", "--params", "7b", "--gpu", "h100"]
    with subprocess.Popen(
        [*command, "--world", "8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.close()
        assert run.wait(60) == 141
        assert run.stderr.read() == b""
