"""Plan every model folder of the installed transformers from its configuration, and check the
plans.

The number of parameters is compared with the library's own count. Each model is also planned with
few layers. If the parameters of this small model have at most 2 GB, its planned activations are
compared with those of a real step. The program prints a summary. --write stores the summary, and
the rows that the summary does not cover completely.

python tests/dist/transformers_table.py [--folders llama,bert] [--jobs 2] [--write]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fsdpc
from fsdpc._torch import tree_leaves
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import CPU, Setup
from fsdpc.plan.sources import configs, geometry
from fsdpc.plan.sources.live import LiveBytes
from fsdpc.plan.sources.traced import build_traced, policy_for, training_of

RESULTS = Path(__file__).with_suffix(".json")
SETUP = Setup(world=1, sequence=32, micro_batch=2, **CPU)
MOST = 2_000_000_000  # models whose parameters have more bytes are not measured
ENGINE = ("shards", "gradient shards", "gather slots", "reduce slots", "no_sync gradients")
LAYERS = 4  # models are cut to this many layers before their step is measured
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
          "decoder_layers", "num_encoder_layers", "num_decoder_layers")  # fmt: skip
TIMEOUT = 240
LARGE = "more than 2 GB"


def folders() -> list[str]:
    import transformers

    home = Path(transformers.__file__).parent / "models"
    return sorted(p.name for p in home.iterdir() if (p / "__init__.py").exists())


def config_in(folder: str):
    """Return a model type whose module is in the folder, or None if the folder has no such module.
    The type with the folder's name has precedence."""
    from transformers import CONFIG_MAPPING

    found = {}
    for kind, name in CONFIG_MAPPING._mapping.items():
        if _module_of(kind) == folder:
            found[kind] = name
    kinds = [folder, folder.replace("_", "-"), *found]
    return next((kind for kind in kinds if kind in found), None)


def _module_of(kind: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(kind)


def values_of(kind: str) -> dict:
    """Return the default configuration of a model type as its JSON file would hold it."""
    from transformers import CONFIG_MAPPING

    values = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
    return {k: 0.0 if k.endswith("layerdrop") else v for k, v in values.items()}  # nothing random


def shallow(values: dict, layers: int = LAYERS) -> dict:
    """Return the values with at most `layers` layers, also in nested configurations."""
    out = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("config"):
            value = shallow(value, layers)
        elif key in COUNTS and isinstance(value, int):
            value = min(value, layers)
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            value = value[:layers]
        out[key] = value
    return out


def factory(values: dict, device: str = "meta", inputs: bool = True):
    def made():
        step = configs.step_of(configs.config_of(values), SETUP, device)
        return step if inputs else step["model"]

    return made


def planned(values: dict, inputs: bool = True) -> tuple[object, int]:
    """Return the plan, and the planned peak bytes of a step beyond the bytes that are allocated all
    the time."""
    made = plan(lambda s: build_traced(factory(values, inputs=inputs), s), SETUP)
    at_rest = (*ENGINE, "optimizer states", "buffers", "inputs")
    rest = sum(r.bytes for r in made.rows if "forward" in r.lifetime and r.role in at_rest)
    step = [p.bytes for p in made.timeline if p.phase in ("forward", "backward")]
    return made, max(step, default=rest) - rest


def counted(values: dict) -> int:
    """Return the library's own count of parameters, trained and frozen."""
    config = configs.config_of(values)
    with torch.device("meta"):
        return sum(p.numel() for p in configs.class_of(config)(config).parameters())


def measured(values: dict) -> int:
    """Return the live bytes at the peak of this rank's first step, without the engine's own memory.
    Later steps hold the gradients of a unit with unused parameters for a shorter time.
    """
    torch.manual_seed(0)
    run = training_of(factory(values, "cpu")())
    model = fsdpc.FullyShardedDataParallel(
        run.model, auto_wrap_policy=policy_for(run.model, "blocks"), use_orig_params=True
    )
    run = replace(run, model=model)
    with torch.no_grad():
        run.forward()  # allocates what is allocated on first use
    inputs = [t for t in tree_leaves(run.inputs) if isinstance(t, Tensor)]
    gathered = [t for unit in model._tree.units for t in (*unit.full, *unit.views)]
    with LiveBytes([*gathered, *model.parameters(), *model.buffers(), *inputs]) as live:
        run.forward().backward()
    return live.top


def row_of(folder: str, measure: bool = True) -> dict:
    """Return the results for one folder. ``outcome`` is "equal", "refused", "wrong", or "no model
    of its own"."""
    row: dict = {"folder": folder}
    kind = config_in(folder)
    if kind is None:
        return row | {"outcome": "no model of its own"}
    row["model_type"] = kind
    try:
        values = values_of(kind)
    except Exception as error:  # the configuration may need values that have no default
        return row | {"outcome": "refused", "why": " ".join(str(error).split())[:200]}
    try:
        made, _ = planned(values, inputs=False)
    except ValueError as error:
        row |= {"outcome": "refused", "why": " ".join(str(error).split())[:200]}
        try:  # the library may be able to count nevertheless
            return row | {"library": counted(values)}
        except Exception:
            return row
    row |= {"model": made.model.name, "parameters": made.model.numel, "library": counted(values)}
    row["outcome"] = "equal" if row["parameters"] == row["library"] else "wrong"
    try:
        by_formula = geometry.geometry_of(values, "config").numel
    except ValueError:
        by_formula = None
    if by_formula not in (None, row["library"]):
        row["outcome"] = "wrong"
    row["alone"] = "equal" if by_formula else "refused"  # without the library
    return row | (activations(shallow(values)) if measure else {})


def activations(values: dict) -> dict:
    """Predicted and measured activations of a model with few layers."""
    try:
        made, predicted = planned(values)
    except ValueError as error:
        return {"activations": f"not with {LAYERS} layers: {error}"[:300]}
    if made.model.numel * 4 > MOST:
        return {"activations": LARGE}
    if made.model.missing:
        return {"activations": made.model.missing[:300]}
    try:
        live = measured(values)
    except Exception as error:
        return {"activations": f"the real step raised {type(error).__name__}: {error}"[:300]}
    return {"predicted": predicted, "measured": live}


def alone(folder: str, measure: bool) -> dict:
    """Run ``row_of`` in a separate process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(folder, measure, there), daemon=True)
    process.start()
    there.close()
    try:
        row = here.recv() if here.poll(TIMEOUT) else {"outcome": "late", "folder": folder}
    except EOFError:
        row = {"outcome": "died", "folder": folder}
    process.kill()
    process.join()
    return row


def _child(folder: str, measure: bool, there) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    import transformers

    transformers.PreTrainedModel.initialize_weights = lambda self: None  # values are not needed
    try:
        row = row_of(folder, measure)
    except BaseException as error:
        row = {
            "folder": folder,
            "outcome": "wrong",
            "why": f"{type(error).__name__}: {error}"[:300],
        }
    there.send(row)
    os._exit(0)


def summary(rows: list[dict]) -> str:
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    ratios = sorted(r["predicted"] / r["measured"] for r in rows if r.get("measured"))
    lines = [f"{len(rows)} folders: " + ", ".join(f"{n} {o}" for o, n in sorted(outcomes.items()))]
    if ratios:
        within = [sum(abs(r - 1) <= e for r in ratios) for e in (0, 0.001, 0.01, 0.05)]
        lines.append(
            f"activations of {len(ratios)}: least {ratios[0]:.4f}, median "
            f"{statistics.median(ratios):.4f}, most {ratios[-1]:.4f}; equal {within[0]}, within "
            f"0.1 % {within[1]}, 1 % {within[2]}, 5 % {within[3]}"
        )
    return "\n".join(lines)


def keep(rows: list[dict]) -> None:
    import transformers

    # The outcomes, and the values of "activations", of rows that the summary covers completely.
    plain = ({"equal", "no model of its own"}, {None, LARGE})
    told = [row for row in rows if "measured" in row or row["outcome"] not in plain[0]
            or row.get("activations") not in plain[1]]  # fmt: skip
    found = {"transformers": transformers.__version__, "torch": torch.__version__,
             "summary": summary(rows).splitlines(), "rows": told}  # fmt: skip
    text = json.dumps(found).replace('{"folder"', '\n{"folder"')
    RESULTS.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folders", help="with commas (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"keep them in {RESULTS.name}")
    parser.add_argument("--no-steps", action="store_true", help="no real steps")
    options = parser.parse_args()
    if options.write and options.folders:
        parser.error("--write is of all folders")
    names = options.folders.split(",") if options.folders else folders()
    torch.set_num_threads(1)
    planned(shallow(values_of("bert"), 1))  # imports modules before processes are forked
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(lambda name: alone(name, not options.no_steps), names):
            rows.append(row)
            ratio = f" {row['predicted'] / row['measured']:.4f}" if row.get("measured") else ""
            print(row["folder"], row["outcome"] + ratio, row.get("activations", ""),
                  row.get("why", ""), flush=True)  # fmt: skip
    if options.write:
        keep(rows)
    print(summary(rows))
    return int(any(row["outcome"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
