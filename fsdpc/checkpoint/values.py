"""Plain values in JSON: numbers, texts, containers, and small tensors and arrays as base64.

The format is that of the messages between ranks (``fsdpc._comm.plain``), so reading a value runs no
code from the file.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from fsdpc._comm.plain import Malformed, decode, parts_of
from fsdpc.checkpoint.errors import CheckpointError


def to_json(value: Any, what: str) -> dict[str, Any]:
    """Return the JSON form of a value. ``TypeError``: the value contains an object that is no plain
    value; the error names its position.
    """
    try:
        form, raw = parts_of(value)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    return {"value": form, "bytes": base64.b64encode(b"".join(raw)).decode()}


def from_json(form: Any, what: str) -> Any:
    """Return the value of a form that ``to_json`` made. ``CheckpointError``: ``to_json`` does not
    make such a form.
    """
    try:
        text = json.dumps(form["value"], separators=(",", ":")).encode()
        raw = base64.b64decode(form["bytes"], validate=True)
        return decode(b"fsdpc1" + len(text).to_bytes(8, "little") + text + raw)
    except (Malformed, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def dump(body: dict[str, Any]) -> bytes:
    """Return the contents of a JSON file with ``body``."""
    return (json.dumps(body) + "\n").encode()
