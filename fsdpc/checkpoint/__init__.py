"""Checkpoints that plain tools read: safetensors, written by every rank, loaded at any world size.

``save`` and ``load`` take an FSDP model of fsdpc or torch, a model of DTensors, or a plain module.
A checkpoint is a folder that Hugging Face's libraries load as it is, with a subfolder for the
optimizer's state and a manifest of checksums. See docs/checkpoints.md.
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
        path: the folder to make, the same on every rank, or a URL that a driver of fsspec handles
            (``s3://bucket/run``). The folder must not exist, unless ``overwrite`` is true.
        model: a model, or a dict of models by name (``{"model": ..., "ema": ...}``). Each model of
            a dict becomes a folder in ``path``, which can also be loaded alone.
        optimizer: any torch optimizer over the model's parameters; its state is saved by parameter
            names. With several models, a dict of optimizers, each of which has the parameters of
            one model. An optimizer's key in the dict may be the name of a model or another name.
        scheduler: an object with ``state_dict()``; rank 0's state is saved. A dict of schedulers
            is saved as ``states`` are.
        extra: this rank's own values (a data loader's position, random states): numbers, texts,
            tensors, arrays and containers of them.
        states: a dict of any objects with ``state_dict()`` and ``load_state_dict()`` (data loaders,
            scalers). Every rank's state of an object is saved, as plain values; if all ranks have
            equal states, the state is saved once.
        rng: save the state of every rank's random generators: of Python, NumPy, torch and the GPUs.
        dtype: floats of the model are saved in this dtype; by default as they are stored.
        step: a number that ``load`` returns as ``Loaded.step``.
        overwrite: replace an existing folder, which stays until the new one is durable.
        format: ``"dcp"`` lets torch's own library write a folder of torch's distributed checkpoints
            (DCP), with ``{"model", "optimizer", "scheduler"}`` as ``get_state_dict`` returns them;
            values that are no tensors are pickled. This format does not accept ``extra``,
            ``states``, ``rng``, ``dtype``, ``step``, ``file_bytes``, ``async_``, ``progress``,
            ``only``, ``hf``, ``values`` and dicts of models.
        file_bytes: the largest number of bytes of tensors in a file; a larger tensor has a file
            for itself.
        async_: copy the values into host memory, return, and write the files in a thread. Copies
            from GPUs may still be running when the call returns. The returned handle has
            ``wait()``. An error is raised by ``wait()`` or by the next call, and printed at exit.
            The interpreter waits for the thread at exit.
        when_busy: what to do if a save in the background is still running on a rank: ``"wait"`` for
            that save, or ``"raise"`` ``CheckpointError`` on every rank.
        progress: show a bar on rank 0, if tqdm is installed.
        only: save only these tensors of the model and the states of these parameters: a pattern of
            names (``"*lora_*"``), several patterns, or a function of a name.
        hf: write a model of transformers for ``from_pretrained`` and inference engines: without an
            optimizer, in the names and forms of the Hub, with ``config.json`` and the generation
            configuration. ``load_pretrained`` reads the folder back.
        tokenizer: with ``hf``, a tokenizer or processor. Rank 0 writes its files into the folder,
            too.
        values: save quantized weights (``fsdpc.lowbit.quantize``) as their dequantized values, so
            that any library can read the file. The values have ``dtype``, or the dtype that the
            weights had before they were quantized. Cannot be combined with ``async_``.
        staging: for a URL, the local folder in which the checkpoint is written before its upload;
            by default the folder for temporary files. Ranks on several hosts need a folder that all
            of them see.
        link: if the last save wrote a file of frozen parameters with the same bytes, add a hard
            link to this file instead of writing a new one. Damage to the file is then damage to
            both checkpoints. False writes a new file.

    Raises:
        CheckpointError: on every rank. The text names the rank, the file or parameter, and the
            cause. What was at ``path`` before is unchanged.
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
        path: a folder that ``save`` wrote, any folder of safetensors with an index or a single
            ``model.safetensors``, or one safetensors file. Each of these may also be a URL that a
            driver of fsspec handles; its files are read by ranges. ``path`` may also be a folder of
            torch's distributed checkpoints (DCP) or a ``torch.save`` file. These have the state
            dict of a model, or a dict with ``"model"``, ``"optimizer"`` and ``"scheduler"``
            (docs/checkpoints.md has the other keys). No pickle runs code.
        model, optimizer, scheduler: as for ``save``; a dict may have only some of the parts that
            were saved. All of them are checked before the first one is changed.
        states, rng: as for ``save``. If each rank saved its own state, the same number of ranks
            must load.
        strict: missing and unexpected names are an error. If false, the result lists them.
        cast: floats of 16, 32 and 64 bits are converted where the checkpoint has another dtype.
        verify: ``"before"`` compares all checksums before the model is changed (every byte is read
            twice, the second time usually from the page cache). ``"during"`` compares them while
            the model is filled, so that damage is found but the model is lost. ``"no"`` compares
            none. Files that fsdpc did not write have no checksums.
        only: load these tensors of the model and the states of these parameters, by the model's
            names: a pattern, several patterns, or a function of a name. Everything else stays as it
            is, and is neither missing nor unexpected.
        rename: a mapping from names in the checkpoint to names of the model (other names stay), or
            a function, such as ``lambda name: name.removeprefix("module.")``.

    Raises:
        CheckpointError: on every rank. The model is unchanged, except with ``verify="during"`` and
            where a disk fails while values are read.
        KeyboardInterrupt: on the rank that was interrupted; the others raise ``CheckpointError``.
            A note on the interruption, and the errors of the other ranks, say whether the model was
            already being written.
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
    """Fill a model from pretrained files: each rank reads the ranges of its own elements and casts
    them, so that no rank ever has the whole model in memory. Collective over ``group`` (default:
    all ranks).

    The model may be sharded by ``FullyShardedDataParallel`` or ``fully_shard`` of fsdpc or torch,
    or not at all. Tensors on the meta device get memory, and tied tensors stay tied. Models of
    transformers are filled as ``from_pretrained`` does, by that library's tables of names and
    conversions. Parameters that no file has, and buffers that nobody has written, are initialised
    by their own modules (transformers' ``_init_weights``, ``reset_parameters``) with values from
    rank 0's generator, in full tensors of which each rank then keeps its shard. One warning on
    rank 0 names these parameters.

    Args:
        source: a folder with the model in one file, ``model.safetensors`` or
            ``pytorch_model.bin`` (no pickle runs code), or in several such files with an index; one
            such file; a folder that ``save`` wrote; or a name on the Hub (``org/name``), which one
            rank of each host downloads into the cache of the Hub's library.
        strict: parameters that no file has, and tensors that the model does not have, are an error.
        keys: rules for tensors that the files have in another form: see ``KeyMap``. Tensors without
            a rule are converted by transformers' tables.
        rename: a mapping or function from a name in the files to the name that ``keys``,
            transformers' tables or the model use; see ``load``.
        only: fill only these tensors of the model; see ``load``.
        init: a function that is called as ``init(module)`` for each module that has a tensor
            without a value in the files. This function initialises the module instead of the
            module's own code. During the call, tensors whose values the files have are on the meta
            device, and all other tensors are full tensors on the CPU.
        device: the device for tensors that are on the meta device; by default the device of the
            mesh for DTensors, else the CPU.
        verify: ``"before"`` compares all checksums, if the files have some, before the model is
            filled; ``"no"`` compares none.
        progress: show a bar on rank 0, if tqdm is installed.
        revision, cache_dir: as for ``huggingface_hub.snapshot_download``.
        deadline: seconds that a download may take.

    Raises:
        CheckpointError: on every rank, with the names, if shapes differ (a vocabulary that was
            resized), if a value is neither in the files nor initialised, if tied weights have
            different values, if no tensor fits, or if a file is unreadable or damaged. The model is
            unchanged, unless the text says otherwise; but tensors that were on the meta device may
            have memory now.
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
