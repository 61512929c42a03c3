"""The command ``checkpoint``: verify, inspect, diff and convert, without a model or a GPU.

The exit code is 0 if all is good, 1 if something is damaged or different, and 2 if a folder is not
a checkpoint or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import sys

from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.storage import local_path, place_of

_PATHS = {"path", "one", "other", "source", "target"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own subcommands and their arguments."""
    commands = parser.add_subparsers(dest="checkpoint_command", required=True)
    verify = commands.add_parser("verify", help="compare every byte with the checksums")
    verify.add_argument("path")
    inspect = commands.add_parser("inspect", help="list files and tensors")
    inspect.add_argument("path")
    diff = commands.add_parser("diff", help="compare the tensors of two checkpoints")
    diff.add_argument("one")
    diff.add_argument("other")
    diff.add_argument(
        "--quick", action="store_true", help="believe the manifests' checksums, and read no tensor"
    )
    convert = commands.add_parser(
        "convert", help="to a checkpoint folder, tensor by tensor, or to a folder of torch's DCP"
    )
    convert.add_argument("source", help="safetensors, a torch.save file or a DCP folder")
    convert.add_argument("target")
    convert.add_argument("--dtype", help="of the model's floats, such as bfloat16")
    convert.add_argument(
        "--values", action="store_true", help="write the values that codes stand for (nf4)"
    )
    convert.add_argument("--to", choices=("safetensors", "dcp"), default="safetensors")
    convert.add_argument(
        "--prefix",
        default="",
        help="of the names to take from a DCP folder or a torch.save file, such as model.",
    )
    convert.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read an index of a DCP folder also with other classes than torch's: it can run code",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand. Returns the exit code."""
    try:
        as_path = local_path if args.checkpoint_command == "convert" else place_of
        for name in _PATHS & vars(args).keys():
            setattr(args, name, as_path(getattr(args, name)))
        return _COMMANDS[args.checkpoint_command](args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _verify(args: argparse.Namespace) -> int:
    from fsdpc.checkpoint.verify import verify

    report = verify(args.path)
    for line in report.damaged:
        print(f"damaged: {line}")
    checked = "checksums" if report.has_checksums else "headers and sizes (no checksums)"
    state = "damaged" if report.damaged else "good"
    print(f"{args.path}: {state}; {report.tensors} tensors, {report.nbytes} bytes, by {checked}")
    return 1 if report.damaged else 0


def _inspect(args: argparse.Namespace) -> int:
    from fsdpc.checkpoint.verify import describe

    for line in describe(args.path):
        print(line)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from fsdpc.checkpoint.verify import compare

    if args.quick:
        print("by the checksums in manifests: the tensors were not read", file=sys.stderr)
    lines = compare(args.one, args.other, quick=args.quick)
    for line in lines:
        print(line)
    return 1 if lines else 0


def _convert(args: argparse.Namespace) -> int:
    from fsdpc.checkpoint.convert import convert

    left = convert(
        args.source,
        args.target,
        args.dtype,
        args.to,
        args.trust_pickle,
        args.prefix,
        args.values,
    )
    for name in left:
        print(f"not converted: {name}")
    return 0


_COMMANDS = {"verify": _verify, "inspect": _inspect, "diff": _diff, "convert": _convert}


def main() -> int:
    """Run the command from ``python -m fsdpc.checkpoint``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fsdpc.checkpoint")
    add_arguments(parser)
    return run(parser.parse_args())
