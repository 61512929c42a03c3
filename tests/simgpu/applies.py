"""Python tests of several ranks that do not apply on the simulated GPU, each with its reason."""

from __future__ import annotations

# A file below tests/, or a file and the beginning of a test's name.
SKIPPED: dict[str, str] = {
    "dist/test_comm.py": "shared memory of a host, tested as such",
    "dist/test_harness.py": "the harness itself",
}


def reason_to_skip(file: str, test: str) -> str | None:
    for place, reason in SKIPPED.items():
        path, _, name = place.partition("::")
        if path == file and test.startswith(name):
            return reason
    return None
