"""The command line ``python -m fsdpc COMMAND``.

A command is a module with two functions: ``add_arguments(parser)``, and ``run(arguments)``, which
returns the exit code. The module is imported when the command is called.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

# For each command: its module, and its description in the usage text.
COMMANDS = {
    "check": ("fsdpc.plan.check", "does the sharded model train like the unsharded one?"),
    "checkpoint": ("fsdpc.checkpoint.cli", "verify, inspect, compare and convert checkpoints"),
    "doctor": (
        "fsdpc.plan.doctor",
        "is this machine ready? versions, limits, a round trip of two ranks",
    ),
    "plan": ("fsdpc.plan.command", "memory and time of a training step, before it runs"),
    "simulate": (
        "fsdpc.plan.simulate",
        "a step at 8 to 100,000 ranks: where each strategy stops scaling",
    ),
}
READER_ENDED = 141  # the exit code that shells report for a program that SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the command's exit code, 2 if the command line is wrong, or 141 if
    the program that reads the output (such as ``| head``) has ended.
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_ended():  # another pipe is broken, such as one to a rank
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return READER_ENDED
    return code


def _reader_ended() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        return _usage(arguments)
    name = arguments.pop(0)
    module = import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"fsdpc {name}")
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


def _usage(arguments: Sequence[str]) -> int:
    asked = not arguments or arguments[0] in ("-h", "--help", "help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        print(f"fsdpc: unknown command {arguments[0]!r}", file=out)
    print("usage: fsdpc COMMAND [options]; fsdpc COMMAND --help lists the options", file=out)
    for name, (_, about) in COMMANDS.items():
        print(f"  {name:12} {about}", file=out)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
