"""torchrun's error file, from which torchrun's summary names the rank that failed first.

torchrun calls the failure with the smallest time stamp, in whole seconds, the root cause. A rank
that fails because of another one therefore writes a later stamp.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress

from fsdpc import _C


def write_error_file(error: BaseException) -> None:
    """Write ``TORCHELASTIC_ERROR_FILE``, unless it is unset or exists. Local; never raises."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    stamp = int(time.time()) + int(follows(error))
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(stamp),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    unfinished = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(unfinished, path)


def follows(error: BaseException) -> bool:
    """Whether another rank's failure or absence is behind this error."""
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            return False
        if isinstance(seen, _C.CommError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
