"""torchrun's error file, from which torchrun's summary names the rank that failed first.

torchrun reports the failure with the smallest timestamp, in whole seconds, as the root cause. A
rank that fails because of another rank therefore writes a timestamp one second later.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress

from fsdpc import _C


def write_error_file(error: BaseException) -> None:
    """Write the file that ``TORCHELASTIC_ERROR_FILE`` names, unless the variable is unset or the
    file exists. Local; never raises.
    """
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
    """Whether the error was caused by another rank's failure or absence."""
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            return False
        if isinstance(seen, _C.CommError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
