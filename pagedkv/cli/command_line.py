"""From the words of the shell to a command, and from its errors to one line.

Each command is a module here: add(commands) declares its arguments, run(args) runs it. Heavy modules are imported when
a command runs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

import pagedkv

from . import batch, bench, chat, demo, generate, info, serve
from .options import ERRORS, Parser, print_error, utf8

COMMANDS = (demo, generate, chat, serve, batch, bench, info)


def run(argv: list[str] | None = None) -> int:
    """The exit code. Wrong usage and --help raise SystemExit, as argparse does."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # None: closed. What a terminal's encoding lacks is written as \u20ac
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser().print_help()
        return 2
    args = parse(words)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        code = command(args)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ERRORS as error:
        print_error(args, error)
    return 1


def parse(words: list[str]) -> argparse.Namespace:
    """The texts of a command (prompts, messages) may stand anywhere; those that begin with "-" stand behind "--"."""
    end = words.index("--") if "--" in words else len(words)
    args, left_over = parser().parse_known_args(words[:end])  # argparse leaves over texts that come after an option
    takes_texts = hasattr(args, "texts")
    unknown = [word for word in left_over if not takes_texts or _is_option(word)]
    unknown += [] if takes_texts else words[end + 1 :]
    if unknown:
        hint = '; texts that begin with "-" go behind "--"' if takes_texts else ""
        _refuse(args, f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if takes_texts:
        try:
            args.texts = [utf8(word) for word in [*args.texts, *left_over, *words[end + 1 :]]]
        except argparse.ArgumentTypeError as error:
            _refuse(args, str(error))
        if args.jsonl is not None and (args.texts or args.file):
            _refuse(args, f"--jsonl has all {args.what}s: give none beside it")
    return args


def _is_option(word: str) -> bool:
    """What argparse takes for one: neither "-" nor a negative number, and no text with spaces."""
    return word.startswith("-") and word != "-" and " " not in word and not re.fullmatch(r"-\d+|-\d*\.\d+", word)


def _refuse(args: argparse.Namespace, message: str) -> None:
    Parser(prog=f"pagedkv {args.command}").error(message)


def parser() -> Parser:
    parser = Parser(prog="pagedkv", description="A paged KV cache, paged attention and an engine for models.")
    parser.add_argument("--version", action="version", version=f"pagedkv {pagedkv.__version__}")
    names = ",".join(command.__name__.rpartition(".")[2] for command in COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    for command in COMMANDS:
        command.add(commands)
    return parser
