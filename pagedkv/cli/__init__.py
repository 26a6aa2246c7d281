"""The command pagedkv. An error is one line on stderr and exit code 1 (2: wrong usage; 130: Ctrl-C).

Each command is a module here: add(commands) declares its arguments, run(args) runs it. Heavy modules are imported when
a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import pagedkv

from . import bench, chat, demo, generate, info
from .options import Parser

COMMANDS = (demo, generate, chat, bench, info)
ERRORS = OSError, ValueError, NotImplementedError, MemoryError, ImportError, BufferError, pagedkv.CudaError


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ERRORS as error:
        print(f"pagedkv {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    """argparse leaves over the texts that come after an option which comes after the model."""
    parser = _parser()
    args, left_over = parser.parse_known_args(argv)
    texts: list[str] | None = getattr(args, getattr(args, "texts", ""), None)
    if left_over and (texts is None or any(text.startswith("-") for text in left_over)):
        parser.error(f"unrecognized arguments: {' '.join(left_over)}")
    if texts is not None:
        texts += left_over
    return args


def _parser() -> Parser:
    parser = Parser(prog="pagedkv", description="A paged KV cache, paged attention and a Qwen3 engine.")
    names = ",".join(command.__name__.rpartition(".")[2] for command in COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    for command in COMMANDS:
        command.add(commands)
    return parser
