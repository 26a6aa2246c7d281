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


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, NotImplementedError, MemoryError, ImportError, pagedkv.CudaError) as error:
        print(f"pagedkv {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="pagedkv", description="A paged KV cache, paged attention and a Qwen3 engine.")
    names = ",".join(command.__name__.rpartition(".")[2] for command in COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    for command in COMMANDS:
        command.add(commands)
    return parser
