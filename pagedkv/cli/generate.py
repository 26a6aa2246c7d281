"""pagedkv generate: continues texts, in one batch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .options import (
    MODEL_HELP,
    Commands,
    add_model_options,
    cut_note,
    is_terminal,
    json_lines,
    llm_of,
    lora_of,
    options_of_line,
    print_error,
    print_json,
    print_note,
    sampling_options,
    texts_of,
)  # fmt: skip

if TYPE_CHECKING:
    from pagedkv import LLM, SamplingParams

MAX_TOKENS = 64  # of an answer where neither the user nor the model says; a base model may go on for ever
EXAMPLES = """\
examples:
  pagedkv generate Qwen/Qwen3-0.6B "The capital of France is" --max-tokens 20 --temperature 0
  pagedkv generate ./model - < story.txt
  pagedkv generate ./model --file a.txt --file b.txt
  pagedkv generate ./model --jsonl requests.jsonl > answers.jsonl
  pagedkv generate ./model -- "-5 is"

Each prompt is printed behind "> ", and its continuation below. A line of --jsonl is {"prompt": "..."}, with max_tokens,
temperature and the like for this prompt alone; its answer is {"prompt", "text", "num_tokens", "finish_reason"}, or
{"error"}, in the same order.
"""


def add(commands: Commands) -> None:
    text = "continue prompts with a model of your own"
    generate = commands.add_parser("generate", help=text, description=text, epilog=EXAMPLES)
    generate.add_argument("model", help=MODEL_HELP)
    help = "one or several texts, served as one batch; -: stdin; none: what stdin has, unless it is a terminal"
    generate.add_argument("texts", metavar="prompt", nargs="*", default=(), help=help)
    add_model_options(generate, "prompt", f"{MAX_TOKENS} where neither does")
    generate.set_defaults(run=run, what="prompt")


def run(args: argparse.Namespace) -> int:
    sampling_options(args)
    if args.jsonl is not None:
        return _run_lines(args)
    prompts = texts_of(args)
    if not prompts:
        raise ValueError("no prompt: give one, or --file, --jsonl, or a text on stdin")
    with llm_of(args, len(prompts)) as llm:
        params = _params(llm, args, {})
        outputs = llm.generate(prompts, params, lora_request=lora_of(args), use_tqdm=is_terminal(sys.stderr))
    num_errors = 0
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        which = f"prompt {number}: " if len(prompts) > 1 else ""
        if output.error is not None:
            num_errors += 1
            print_error(args, f"{which}{output.error}")
            continue
        quoted = "".join(f"> {line}\n" for line in prompt.split("\n"))
        print("\n" * (number > 1) + quoted + (output.text or ""), flush=True)
        if output.finish_reason == "length":
            num_prompt, num_tokens = len(output.prompt_token_ids), len(output.token_ids)
            print_note(args, which + cut_note(llm, num_prompt, num_tokens, params.max_tokens))
    return 1 if num_errors else 0


def _params(llm: LLM, args: argparse.Namespace, more: dict[str, Any]) -> SamplingParams:
    """What the line says, else the command line, else the model."""
    given = {"max_tokens": MAX_TOKENS if llm.default_params.max_tokens is None else llm.default_params.max_tokens}
    return replace(llm.default_params, **(given | sampling_options(args) | more))


def _run_lines(args: argparse.Namespace) -> int:
    """Each line is a request; a bad line gets its error as its answer."""
    lines = list(json_lines(args.jsonl))
    with llm_of(args, len(lines)) as llm:
        rows = [_request(llm, args, line) for line in lines]
        requests = [row for row in rows if not isinstance(row, Exception)]
        prompts, params = [prompt for prompt, _ in requests], [one for _, one in requests]
        outputs = iter(llm.generate(prompts, params, lora_request=lora_of(args), use_tqdm=is_terminal(sys.stderr)))
    num_errors = 0
    for row in rows:
        output = None if isinstance(row, Exception) else next(outputs)
        error = row if output is None else output.error
        num_errors += error is not None
        if output is None or error is not None:
            print_json(prompt=None if output is None else output.prompt, error=" ".join(str(error).split()))
        else:
            num_tokens = len(output.token_ids)
            print_json(
                prompt=output.prompt, text=output.text, num_tokens=num_tokens, finish_reason=output.finish_reason
            )
    return 1 if num_errors else 0


def _request(llm: LLM, args: argparse.Namespace, line: dict[str, Any] | ValueError) -> Any:
    """(prompt, params), or the error."""
    if isinstance(line, ValueError):
        return line
    try:
        prompt, options = options_of_line(line, "prompt")
        if not isinstance(prompt, str):
            return ValueError(f"prompt is {prompt!r} but must be a text")
        return prompt, _params(llm, args, options)
    except (TypeError, ValueError) as error:
        return error
