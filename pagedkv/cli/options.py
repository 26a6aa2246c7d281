"""What the commands that run a user's model have in common."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pagedkv import LLM, SamplingParams

MODEL_HELP = "folder with config.json, *.safetensors and tokenizer.json, or a name on the Hugging Face hub"
STDIN = "-"
FEW = 64  # requests, below the engine's defaults for every device
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed", "ignore_eos", "stop",
)  # fmt: skip

Commands = Any  # what ArgumentParser.add_subparsers() returns


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:  # argparse's own prints the usage first
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (default: auto)")


def add_model_options(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int | None) -> None:
    """How answers are sampled, and the engine's own options."""
    group = parser.add_argument_group("sampling")
    most = f"new tokens at most (default: {max_tokens or '1024, or half of what the model takes'})"
    group.add_argument("--max-tokens", type=at_least(0), default=max_tokens, help=most)
    greedy = f"0 is greedy (default: {temperature:g})"
    group.add_argument("--temperature", type=float, default=temperature, help=greedy)
    group.add_argument("--top-k", type=int, default=0, help="only this many of the likeliest tokens (default: all)")
    together = "only the most likely tokens, whose probabilities sum to this (default: 1)"
    group.add_argument("--top-p", type=float, default=1.0, help=together)
    share = "only tokens that have at least this share of the most likely one's probability"
    group.add_argument("--min-p", type=float, default=0.0, help=share)
    less = "above 1: tokens seen become less likely"
    group.add_argument("--repetition-penalty", type=float, default=1.0, help=less)
    group.add_argument("--seed", type=int, help="makes the same tokens again at temperature > 0")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    group = parser.add_argument_group("engine")
    add_device(group)
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto)")
    group.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a page (default: 16)")
    group.add_argument("--max-model-len", type=at_least(1), help="the most tokens of a request, prompt and new ones")


def add_inputs(parser: argparse.ArgumentParser, what: str) -> None:
    """Where prompts or messages come from, besides the arguments."""
    whole = f"a text file is one {what}; may be repeated"
    parser.add_argument("--file", action="append", default=[], metavar="FILE", help=whole)
    parser.add_argument("--jsonl", metavar="FILE", help=f"JSON lines in ({STDIN}: stdin), JSON lines out")


def params_of(args: argparse.Namespace, **more: Any) -> SamplingParams:
    from pagedkv import SamplingParams

    given = {name: getattr(args, name) for name in SAMPLING} | more
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def llm_of(args: argparse.Namespace, num_requests: int) -> LLM:
    """For so many requests at a time. Few need few CUDA graphs, which are captured at the start."""
    from pagedkv import LLM

    options = {name: getattr(args, name) for name in ("device", "dtype", "block_size", "max_model_len")}
    num_seqs = max(num_requests, 1) if num_requests < FEW else None
    logging.getLogger("pagedkv.engine.llm").setLevel(logging.ERROR)  # the commands name requests that fail themselves
    return LLM(args.model, **options, max_num_seqs=num_seqs)


def texts_of(args: argparse.Namespace, given: list[str]) -> list[str]:
    """Texts of the command line ("-" is stdin) and of files. Without any: stdin, unless it is a terminal."""
    texts = [sys.stdin.read() if text == STDIN else text for text in given]
    texts += [read_text(Path(name)) for name in args.file]
    if not texts and not sys.stdin.isatty():
        texts.append(sys.stdin.read())
    return texts


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text ({error.reason} at byte {error.start})") from None


def json_lines(name: str) -> Iterator[dict[str, Any] | ValueError]:
    """The object of each line that is not blank, or what is wrong with it."""
    text = sys.stdin.read() if name == STDIN else read_text(Path(name))
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() cuts within strings, at U+2028 say
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield ValueError(f"line {number}: no JSON: {error}")
            continue
        yield value if isinstance(value, dict) else ValueError(f"line {number}: no JSON object")


def print_json(**row: Any) -> None:
    given = {name: value for name, value in row.items() if value is not None}
    try:
        print(json.dumps(given, ensure_ascii=False), flush=True)
    except UnicodeEncodeError:  # half of a surrogate pair, say
        print(json.dumps(given), flush=True)
