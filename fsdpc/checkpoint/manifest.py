"""The manifest ``fsdpc.json``, which lists the files of a checkpoint with their digests.

The manifest is written last and lists every other file. For a safetensors file it has digests of
the header, of each tensor and of each block; for any other file, one digest. The manifest's own
digest covers the text of the manifest without this digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdpc import _C
from fsdpc.checkpoint.digests import Digest, Digests
from fsdpc.checkpoint.dtypes import dtype_of, name_of
from fsdpc.checkpoint.entries import Coding
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import BLOCK_BYTES, Layout

NAME = "fsdpc.json"
_FORMAT = "fsdpc.checkpoint"
_VERSION = 1
_BETWEEN = ",\n  "
_text = json.encoder.encode_basestring
_PATH = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)  # at most one folder; no hidden names


@dataclass
class Manifest:
    """The content of a manifest. The keys of the following dicts are paths of files.

    ``headers``: for a safetensors file, the size of the file and the digest of its header.
    ``tensors``: in a manifest that was read, the digests of a file's tensors by name. ``written``:
    in a manifest that is being made, the text of these digests. ``files``: for any other file, its
    size and digest. ``codings``: how quantized tensors were made, by name; None if this is unknown.
    For ``published`` see ``steps``, for ``metric`` see ``Checkpointer``.
    """

    step: int | None = None
    world: int = 1
    published: int | None = None
    metric: float | None = None
    block_bytes: int = BLOCK_BYTES
    headers: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Digest]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    codings: dict[str, dict[str, Coding]] | None = field(default_factory=dict)
    digest: int = 0  # digest of the whole text that was read

    def add_set(self, layout: Layout, digests: Digests) -> None:
        """Add a set whose tensors have these digests, in the set's order."""
        forms = zip(*digests.texts(), strict=True)
        for file in layout.files:
            path = layout.path(file)
            self.headers[path] = (file.nbytes, _C.ckpt_crc32c(file.header))
            coded = {p.name: p.coding for p in file.places if p.coding is not None}
            if coded and self.codings is not None:
                self.codings[path] = coded
            pairs = zip(file.keys, forms, strict=False)
            self.written[path] = _BETWEEN.join(
                [f'{key}: ["{whole}"{_BETWEEN}"{own}"]' for key, (whole, own) in pairs]
            )

    def add_file(self, path: str, content: bytes) -> None:
        self.files[path] = (len(content), _C.ckpt_crc32c(content))

    def encode(self) -> bytes:
        """Return the text of the manifest."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            **({} if self.published is None else {"published": self.published}),
            **({} if self.metric is None else {"metric": self.metric}),
            "world": self.world,
            "block_bytes": self.block_bytes,
            "headers": {p: [size, _hex(crc)] for p, (size, crc) in sorted(self.headers.items())},
            "files": {p: [size, _hex(crc)] for p, (size, crc) in sorted(self.files.items())},
            **({} if self.codings is None else {"codes": _forms(self.codings)}),
        }
        most = json.dumps(body, indent=1, ensure_ascii=False).removesuffix("\n}")
        # json.dumps with an indent uses an encoder in Python, which is slow for many tensors.
        read = {path: _BETWEEN.join([_member(name, digest) for name, digest in tensors.items()])
                for path, tensors in self.tensors.items()}  # fmt: skip
        parts = [_record(path, text) for path, text in sorted((self.written | read).items())]
        return _signed(f"{most},\n {_record('tensors', _BETWEEN.join(parts))}\n}}")


def _forms(codings: dict[str, dict[str, Coding]]) -> dict[str, dict[str, list[Any]]]:
    return {
        path: {name: [c.codec, c.row, name_of(c.dtype, name)] for name, c in coded.items()}
        for path, coded in sorted(codings.items())
    }


def split(made: Manifest, parts: list[str], write: Callable[[str, bytes], object]) -> None:
    """Make a manifest for each part, move the part's entries from ``made`` into this manifest, and
    list the manifest as a file in ``made``. ``write`` is called with the path and the content of
    each new manifest.
    """
    for part in parts:
        own = Manifest(made.step, made.world)
        for name in ("headers", "written", "files", "codings"):
            table = getattr(made, name)
            for path in [path for path in table if path.startswith(f"{part}/")]:
                getattr(own, name)[path.removeprefix(f"{part}/")] = table.pop(path)
        content, path = own.encode(), f"{part}/{NAME}"
        write(path, content)
        made.add_file(path, content)


def _signed(text: str) -> bytes:
    """Return the text of a JSON object, with the digest of the text added as the last member."""
    crc = _C.ckpt_crc32c((text + "\n").encode())
    return f'{text[:-2]},\n "crc32c": "{_hex(crc)}"\n}}\n'.encode()


def _check_signature(text: bytes) -> None:
    end = len(_signed("{\n}")) - len(b"{")
    bare = text[:-end] + b"\n}\n"
    if _signed(bare[:-1].decode()) != text:
        raise CheckpointError(f"{NAME} is damaged: its checksum differs")


def is_whole(text: bytes) -> bool:
    """Return whether the text of a manifest is complete and not damaged."""
    try:
        _check_signature(text)
    except (CheckpointError, ValueError):
        return False
    return True


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _record(key: str, members: str) -> str:
    return f"{_text(key)}: {{{members}}}"


def _member(name: str, digest: Digest) -> str:
    """Return the text of a tensor's digests, in the form that ``add_set`` writes."""
    blocks = "".join(map(_hex, digest.blocks)) if len(digest.blocks) > 1 else ""
    return f'{_text(name)}: ["{_hex(digest.whole)}"{_BETWEEN}"{blocks}"]'


def decode(text: bytes) -> Manifest:
    """Return the manifest with this text. Raises ``CheckpointError`` if the text is damaged or has
    another version.
    """
    try:
        return _decode(text)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{NAME} is damaged or is not a manifest: {type(error).__name__}: {error}"
        ) from error


def _decode(text: bytes) -> Manifest:
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CheckpointError(f"{NAME} is damaged or is not a manifest of fsdpc")
    if body.get("version") != _VERSION:
        raise CheckpointError(
            f"{NAME} has version {body.get('version')!r}; this fsdpc reads version {_VERSION}"
        )
    _check_signature(text)
    block = body["block_bytes"]
    if block != BLOCK_BYTES:
        raise CheckpointError(f"{NAME} has blocks of {block!r} bytes; version 1 has {BLOCK_BYTES}")
    for path in {*body["headers"], *body["files"], *body["tensors"]}:
        if not _PATH.fullmatch(path):
            raise CheckpointError(f"{NAME} names the file {path!r}, which is not in the checkpoint")
    manifest = Manifest(
        body["step"],
        body["world"],
        body.get("published"),
        body.get("metric"),
        block,
        digest=_C.ckpt_crc32c(text),
    )
    manifest.headers = {path: (size, int(crc, 16)) for path, (size, crc) in body["headers"].items()}
    manifest.files = {path: (size, int(crc, 16)) for path, (size, crc) in body["files"].items()}
    manifest.tensors = {
        path: {name: _digest(*form) for name, form in tensors.items()}
        for path, tensors in body["tensors"].items()
    }
    coded = body.get("codes")
    manifest.codings = coded and {
        path: {name: _coding(name, *form) for name, form in own.items()}
        for path, own in coded.items()
    }
    return manifest


def _coding(name: str, codec: str, row: int, dtype: str) -> Coding:
    if type(codec) is not str or type(row) is not int:
        raise TypeError(f"{name!r} is coded as {codec!r}, {row!r}")
    return Coding(codec, row, dtype_of(dtype, name))


def _digest(whole: str, blocks: str) -> Digest:
    crc = int(whole, 16)
    parts = [int(blocks[i : i + 8], 16) for i in range(0, len(blocks), 8)] or [crc]
    return Digest(crc, tuple(parts))
