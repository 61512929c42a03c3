"""Checkpoints that plain tools read: safetensors, written by every rank, loaded at any world size.

``save`` and ``load`` take an FSDP model of fsdpc or torch, a model of DTensors, or a plain module.
On disk is a folder that Hugging Face's libraries load as it is, with the optimizer's state in a
folder of its own and a manifest of checksums. See docs/checkpoints.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdpc.checkpoint.background import SaveHandle, WhenBusy, finish_running, make_room, start
from fsdpc.checkpoint.checkpointer import Checkpointer
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.fresh import Init
from fsdpc.checkpoint.keymap import KeyMap
from fsdpc.checkpoint.layout import FILE_BYTES
from fsdpc.checkpoint.library_files import HubForm
from fsdpc.checkpoint.loading import Loaded
from fsdpc.checkpoint.names import Only, Rename
from fsdpc.checkpoint.preemption import Preemption
from fsdpc.checkpoint.pretrained import Pretrained, run_pretrained
from fsdpc.checkpoint.progress import bar
from fsdpc.checkpoint.ranks import ranks_of
from fsdpc.checkpoint.saving import write_plan
from fsdpc.checkpoint.several import (
    Models,
    Optimizers,
    States,
    plan_of,
    run_several,
    states_of,
)
from fsdpc.checkpoint.storage import Url, local_path, place_of
from fsdpc.checkpoint.stream_reader import StreamedSet, StreamReader
from fsdpc.checkpoint.tap import WeightInfo, WeightStream, stream
from fsdpc.checkpoint.torch_dcp import check_options, save_dcp
from fsdpc.checkpoint.upload import way_to

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "KeyMap",
    "Loaded",
    "Preemption",
    "Pretrained",
    "SaveHandle",
    "StreamReader",
    "StreamedSet",
    "Url",
    "WeightInfo",
    "WeightStream",
    "load",
    "load_pretrained",
    "save",
    "stream",
]


def save(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    *,
    states: States = None,
    rng: bool = False,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    overwrite: bool = False,
    format: Literal["safetensors", "dcp"] = "safetensors",
    file_bytes: int = FILE_BYTES,
    async_: bool = False,
    when_busy: WhenBusy = "wait",
    progress: bool = False,
    only: Only = None,
    hf: bool = False,
    tokenizer: Any = None,
    values: bool = False,
    staging: str | os.PathLike[str] | None = None,
    link: bool = True,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle | None:
    """Save a checkpoint folder. Collective over ``group`` (default: all ranks).

    Each rank writes its own byte ranges of shared safetensors files; nothing is gathered. The
    folder appears under its name complete and durable, or not at all.

    Args:
        path: the folder to make, the same on every rank; not there yet, unless ``overwrite``. Or
            a URL of a driver of fsspec (``s3://bucket/run``).
        model: a model, or a dict of several by names (``{"model": ..., "ema": ...}``), of which
            each becomes a folder in ``path`` that can also be loaded for itself.
        optimizer: any torch optimizer over the model's parameters; its state is saved by
            parameter names. With several models: a dict, by names of models or others; each over
            the parameters of one model.
        scheduler: an object with ``state_dict()``; rank 0's state is saved. A dict of schedulers
            is saved as ``states`` are.
        extra: this rank's own values (a data loader's position, random states): numbers, texts,
            tensors, arrays and containers of them.
        states: a dict of any objects with ``state_dict()`` and ``load_state_dict()`` (data loaders,
            scalers): every rank's state is saved, as plain values; once if all are equal.
        rng: save the random generators of every rank: Python's, NumPy's, torch's, of GPUs.
        dtype: floats of the model are saved in this dtype; by default as they are stored.
        step: a number to find again in ``Loaded.step``.
        overwrite: replace an existing folder, which stays until the new one is durable.
        format: ``"dcp"`` writes a folder of torch's distributed checkpoints by torch's own library,
            pickled as they are: ``{"model", "optimizer", "scheduler"}`` of ``get_state_dict``.
            ``extra``, ``states``, ``rng``, ``dtype``, ``step``, ``file_bytes``, ``async_``,
            ``progress``, ``only``, ``hf``, ``values`` and dicts are refused.
        file_bytes: a file holds at most so many bytes of tensors, or one tensor.
        async_: return once the values are copied in host memory, and write in a thread; the
            returned handle has ``wait()``. An error is raised by ``wait()`` or by the next call,
            and printed at exit. The interpreter waits for the thread at exit.
        when_busy: while a save in the background is running on a rank: ``"wait"`` for it, or
            ``"raise"`` ``CheckpointError`` on every rank.
        progress: show a bar on rank 0, if tqdm is installed.
        only: save these tensors of the model and the states of these parameters: a pattern of
            names (``"*lora_*"``), several patterns, or a function of a name.
        hf: write what ``from_pretrained`` and inference engines read: a model of transformers,
            without an optimizer, in the names and forms of the Hub, with ``config.json`` and the
            generation's configuration. ``load_pretrained`` reads it back.
        tokenizer: with ``hf``: a tokenizer or processor, whose files are written, too (rank 0's).
        values: weights in codes (``fsdpc.lowbit.quantize``) are saved as the values that they stand
            for, in ``dtype`` or the dtype before they were coded, decoded a part at a time, so that
            any library reads them. Not with ``async_``.
        staging: for a URL: the local folder through which the checkpoint goes; default the one for
            temporary files. Ranks on several hosts need one that all of them see.
        link: a file of frozen parameters that the last save has written alike is linked, so that
            damage to it is damage to both checkpoints; False writes it anew.

    Raises:
        CheckpointError: on every rank; names the rank, the file or parameter and the cause. What
            was at ``path`` before is unchanged.
        KeyboardInterrupt: on the rank that was interrupted; the others raise ``CheckpointError``.
    """
    ranks = ranks_of(group)
    target = place_of(path)
    with ranks.together():
        make_room(when_busy, group)
        if format != "safetensors":
            given = {
                "extra": extra is not None,
                "dtype": dtype is not None,
                "step": step is not None,
                "file_bytes": file_bytes != FILE_BYTES,
                "async_": async_,
                "progress": progress,
                "only": only is not None,
                "hf": hf or tokenizer is not None,
                "states": states is not None,
                "rng": rng,
                "values": values,
                "model={...}": not isinstance(model, nn.Module),
            }
            with ranks.step(f"saving checkpoint {target}"):
                check_options(format, [name for name, is_given in given.items() if is_given])
                folder = local_path(path)
            save_dcp(folder, ranks, model, optimizer, scheduler, overwrite=overwrite)  # type: ignore[arg-type]
            return None
        with ranks.step(f"saving checkpoint {target}"):
            if hf and (optimizer is not None or only is not None):
                raise TypeError("hf=True is for a model alone, without optimizer= and only=")
            if tokenizer is not None and not hf:
                raise TypeError("tokenizer= is for hf=True")
            if values and async_:
                raise TypeError("values=True decodes while it writes: save without async_=True")
            scheduler, objects = states_of(scheduler, states, rng)
        way = way_to(target, ranks, staging, overwrite=overwrite)
        plan = plan_of(
            way.local,
            ranks,
            model,
            optimizer,
            scheduler,
            extra,
            objects,
            dtype=dtype,
            step=step,
            overwrite=overwrite,
            file_bytes=way.file_bytes if file_bytes == FILE_BYTES else file_bytes,
            only=only,
            form=HubForm(tokenizer) if hf else None,
            values=values,
        )
        plan.published, plan.links = way.published, way.links and link
        advance = bar(plan, ranks, progress)
        if async_:
            return start(plan, ranks, advance=advance, after=way, target=target)
        write_plan(plan, ranks, advance=advance)
        way()
    return None


def load(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    *,
    states: States = None,
    rng: bool = False,
    strict: bool = True,
    cast: bool = False,
    verify: Literal["before", "during", "no"] = "before",
    only: Only = None,
    rename: Rename = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint, whatever number of ranks, sharding and wrapping it was saved with.
    Collective over ``group`` (default: all ranks).

    Each rank reads the ranges of its own elements into its shard. Names, shapes and dtypes are
    compared on all ranks before the first byte is written into the model.

    Args:
        path: a folder of ``save``, any folder of safetensors with an index or a single
            ``model.safetensors``, or one safetensors file, also as a URL of a driver of fsspec,
            which is read by ranges; a folder of torch's distributed
            checkpoints (DCP) or a ``torch.save`` file, of a model or of a dict with ``"model"``,
            ``"optimizer"`` and ``"scheduler"`` (docs/checkpoints.md has the other keys). No pickle
            runs code.
        model, optimizer, scheduler: as for ``save``; a dict may have only some of the parts that
            were saved. All of them are checked before the first one is changed.
        states, rng: as for ``save``. If each rank saved its own state, as many ranks must load.
        strict: missing and unexpected names are an error; else they are in the result.
        cast: floats of 16, 32 and 64 bits are converted where the checkpoint has another dtype.
        verify: ``"before"`` compares all checksums before the model is touched (every byte is
            read twice, the second time as a rule from memory); ``"during"`` while the model is
            filled, so that damage is found but the model is lost; ``"no"`` not at all. Files that
            fsdpc did not write have no checksums.
        only: load these tensors of the model and the states of these parameters, by the model's
            names: a pattern, several patterns, or a function of a name. Everything else stays as it
            is, and is neither missing nor unexpected.
        rename: from a name in the checkpoint to the model's: a mapping (other names stay) or a
            function, such as ``lambda name: name.removeprefix("module.")``.

    Raises:
        CheckpointError: on every rank. Except with ``verify="during"`` and for disks that fail
            while values are read, the model is unchanged.
        KeyboardInterrupt: on the rank that was interrupted; its note, and the error of the others,
            says if the model was being written already.
    """
    ranks = ranks_of(group)
    target = place_of(path)
    with ranks.together():
        finish_running()
        with ranks.step(f"loading checkpoint {target}"):
            scheduler, objects = states_of(scheduler, states, rng)
        return run_several(
            target,
            ranks,
            model,
            optimizer,
            scheduler,
            objects,
            strict=strict,
            cast=cast,
            verify=verify,
            only=only,
            rename=rename,
        )


def load_pretrained(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = False,
    keys: Sequence[KeyMap] = (),
    rename: Rename = None,
    only: Only = None,
    init: Init = None,
    device: torch.device | str | None = None,
    verify: Literal["before", "no"] = "before",
    progress: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    deadline: float = 3600.0,
    group: dist.ProcessGroup | None = None,
) -> Pretrained:
    """Fill a model from pretrained files: each rank reads the ranges of its own elements, cast on
    the way, so that nobody ever holds the model whole. Collective over ``group`` (default: all
    ranks).

    The model may be sharded by ``FullyShardedDataParallel`` or ``fully_shard`` of fsdpc or torch,
    or not at all, and on the meta device: then it gets its memory here, and ties stay. Models of
    transformers are filled as ``from_pretrained`` does, by that library's tables of names and
    conversions. Parameters that no file has, and buffers that nobody has written, get what their
    own modules give them (transformers' ``_init_weights``, ``reset_parameters``), full and then
    cut, drawn from rank 0's generator; one warning on rank 0 names the parameters.

    Args:
        source: a folder with ``model.safetensors``, or several files and their index, or
            ``pytorch_model.bin`` (no pickle runs code); one such file; a folder of ``save``; or a
            name on the Hub (``org/name``), which one rank of each host downloads into its cache.
        strict: parameters that no file has, and tensors that the model does not have, are an error.
        keys: rules for tensors of another form: see ``KeyMap``. transformers' tables are for the
            others.
        rename: from a name in the files to the name that ``keys``, transformers' tables or the
            model know; see ``load``.
        only: fill these tensors of the model alone; see ``load``.
        init: initialises a module that has a value that no file has, instead of the module's own
            code: ``init(module)``, with full tensors on the CPU, or on the meta device where the
            value is in the files.
        device: for what is on the meta device; default: the mesh's for DTensors, else the CPU.
        verify: compare all checksums before the model is filled, if the files have some.
        progress: show a bar on rank 0, if tqdm is installed.
        revision, cache_dir: as for ``huggingface_hub.snapshot_download``.
        deadline: seconds that a download may take.

    Raises:
        CheckpointError: on every rank, with the names: shapes differ (a vocabulary that was
            resized), a value that is neither in the files nor initialised, tied weights with
            different values, nothing that fits, an unreadable or damaged file. The model is
            unchanged, but for memory instead of the meta device, unless the text says otherwise.
    """
    ranks = ranks_of(group)
    with ranks.together():
        finish_running()
        return run_pretrained(
            source,
            ranks,
            model,
            strict=strict,
            keys=keys,
            rename=rename,
            only=only,
            init=init,
            device=device,
            verify=verify,
            progress=progress,
            hub={"revision": revision, "cache_dir": cache_dir, "deadline": deadline},
        )
