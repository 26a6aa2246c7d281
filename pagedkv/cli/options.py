"""What the commands have in common: options, texts that come in, and lines that go out."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, get_args, get_type_hints

import pagedkv
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.options import EngineOptions, descriptions
from pagedkv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedkv import LLM

MODEL_HELP = "folder with config.json, *.safetensors and tokenizer.json, or a name on the Hugging Face hub"
STDIN = "-"
FEW = 64  # requests, below the engine's defaults for every device
SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop", "ignore_eos",
)  # fmt: skip
OF_A_LINE = (*SAMPLING, "seed")  # of --jsonl; on the command line --seed is the engine's
OF_A_REQUEST = ValueError, ArithmeticError, MemoryError  # errors after which other requests may succeed
ERRORS = *OF_A_REQUEST, OSError, NotImplementedError, ImportError, BufferError, pagedkv.CudaError

Commands = Any  # what ArgumentParser.add_subparsers() returns


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:  # argparse's own prints the usage first
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


# --- options


def integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def add_options(
    group: argparse._ActionsContainer, cls: type, names: tuple[str, ...], none: str, **defaults: object
) -> None:
    """Options of the command line for fields of a dataclass, explained as in its docstring, with `none` in place of its
    "None:"; `defaults` are those that the help shows instead of the dataclass's. args has the options that were given
    and no others."""
    hints, texts = get_type_hints(cls), descriptions(cls)
    own = {each.name: each.default for each in fields(cls)}
    for name in names:
        kinds = {kind for kind in (get_args(hints[name]) or (hints[name],)) if kind is not NoneType}
        number = next((kind for kind in (float, int) if kind in kinds), None)
        how: dict[str, Any] = {"metavar": {float: "X", int: "N", None: "TEXT"}[number], "type": number or utf8}
        if bool in kinds:
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(own[name], tuple):
            how["action"] = "append"
        shown = defaults.get(name, own[name])
        default = "" if shown in (None, False, ()) else f" (default: {shown})"
        help = f"{texts.get(name, '')}{default}".replace("None:", none).replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", help=help, default=argparse.SUPPRESS, **how)


def add_engine_options(parser: argparse.ArgumentParser, *names: str, **defaults: object) -> None:
    """All of the engine's options, or those named."""
    group = parser.add_argument_group("engine")
    of_engine = names or tuple(each.name for each in fields(EngineOptions))
    add_options(group, EngineOptions, of_engine, "not given:", **defaults)


def add_model_options(parser: argparse.ArgumentParser, what: str, max_tokens: str) -> None:
    """Where prompts or messages come from, how answers are sampled, and the engine's own options."""
    whole = f"a text file is one {what}; may be repeated"
    parser.add_argument("--file", action="append", default=[], metavar="FILE", help=whole)
    parser.add_argument("--jsonl", metavar="FILE", help=f"JSON lines in ({STDIN}: stdin), JSON lines out")
    help = "folder of an adapter of low rank, with which all answers are computed; its rank is at most --max-lora-rank"
    parser.add_argument("--lora", metavar="FOLDER", help=help)
    about = f"What is not given is as the model's generation_config.json says; max_tokens is {max_tokens}."
    group = parser.add_argument_group("sampling", about)
    add_options(group, SamplingParams, SAMPLING, "null in --jsonl:", **dict.fromkeys(SAMPLING))
    add_engine_options(parser)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given."""
    return {each.name: getattr(args, each.name) for each in fields(EngineOptions) if hasattr(args, each.name)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given; a wrong one raises."""
    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    SamplingParams(**given)
    return given


def llm_of(args: argparse.Namespace, num_requests: int, model: str | Path | None = None) -> LLM:
    """For so many requests at a time. Few need few CUDA graphs, which are captured at the start."""
    from pagedkv import LLM

    options = engine_options(args)
    if args.lora is not None:
        options = {"enable_lora": True} | options
    if num_requests < FEW:
        options = {"max_num_seqs": min(max(num_requests, 1), options.get("max_num_batched_tokens", FEW))} | options
    logging.getLogger("pagedkv.engine.llm").setLevel(logging.ERROR)  # the commands name requests that fail themselves
    return LLM(args.model if model is None else model, **options)


def lora_of(args: argparse.Namespace) -> LoRARequest | None:
    return None if args.lora is None else LoRARequest(args.lora, 1, args.lora)


# --- what comes in


def is_terminal(stream: TextIO | None) -> bool:
    """Python has None for a stream that was closed when it started."""
    return stream is not None and stream.isatty()


def texts_of(args: argparse.Namespace) -> list[str]:
    """Texts of the command line ("-" is stdin) and of files. Without any: stdin, unless it is a terminal or closed."""
    texts = [read_text(text) if text == STDIN else text for text in args.texts]
    texts += [read_text(name) for name in args.file]
    if not texts and sys.stdin is not None and not is_terminal(sys.stdin):
        texts.append(read_text(STDIN))
    return texts


def read_text(name: str) -> str:
    """All of a file, or of stdin, whatever the terminal's encoding is."""
    if name == STDIN and sys.stdin is None:
        raise ValueError("stdin is closed, but a text is to come from there")
    try:
        with open(0 if name == STDIN else name, encoding="utf-8-sig", closefd=name != STDIN) as file:
            return file.read()
    except UnicodeDecodeError as error:
        where = "stdin" if name == STDIN else name
        raise ValueError(f"{where}: is no UTF-8 text ({error.reason} at byte {error.start})") from None


def utf8(word: str) -> str:
    """A word of the command line, in which Python keeps bytes of other encodings as halves of surrogate pairs."""
    try:
        return os.fsencode(word).decode() if any("\udc80" <= char <= "\udcff" for char in word) else word
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no UTF-8 text ({error.reason} at byte {error.start})") from None


def json_lines(name: str) -> Iterator[dict[str, Any] | ValueError]:
    """The object of each line that is not blank, or what is wrong with it."""
    for number, line in enumerate(read_text(name).split("\n"), 1):  # splitlines() cuts within strings, at U+2028 say
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield ValueError(f"line {number}: no JSON: {error}")
            continue
        yield value if isinstance(value, dict) else ValueError(f"line {number}: no JSON object")


def options_of_line(line: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """The prompt or the messages of a JSON line, and its sampling options."""
    options = dict(line)
    content = options.pop(name, None)
    unknown = sorted(options.keys() - set(OF_A_LINE))
    if unknown:
        raise ValueError(f"no option {unknown[0]!r}: there are {name}, {', '.join(OF_A_LINE)}")
    return content, options


# --- what goes out


def print_json(**row: Any) -> None:
    given = {name: value for name, value in row.items() if value is not None}
    text = json.dumps(given, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal that is not UTF-8, or half of a surrogate pair
        text = json.dumps(given)
    print(text, flush=True)


def print_error(args: argparse.Namespace, error: object) -> None:
    print_note(args, f"error: {' '.join(str(error).split()) or type(error).__name__}")


def print_note(args: argparse.Namespace, text: str) -> None:
    """A line on stderr, where it does not mix with answers."""
    if sys.stderr is not None:  # print() takes None for stdout
        print(f"pagedkv {args.command}: {text}", file=sys.stderr, flush=True)


def cut_note(llm: LLM, num_prompt: int, num_tokens: int, max_tokens: int | None) -> str:
    """Why an answer of so many tokens has finish_reason "length"."""
    cut = f"the answer was cut after {num_tokens:,} token{'s' * (num_tokens != 1)}"
    if num_tokens == max_tokens:
        return f"{cut} (--max-tokens)"
    if num_prompt + num_tokens >= llm.max_model_len:
        return f"{cut}: prompt and answer fill the {llm.max_model_len:,} of max_model_len"
    return f"{cut}: prompt and answer fill the pool of pages (--num-blocks)"
