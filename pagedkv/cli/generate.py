"""pagedkv generate: continues texts, in one batch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .options import (
    MODEL_HELP,
    SAMPLING,
    Commands,
    add_inputs,
    add_model_options,
    json_lines,
    llm_of,
    params_of,
    print_json,
    texts_of,
)  # fmt: skip

EXAMPLES = """\
examples:
  pagedkv generate Qwen/Qwen3-0.6B "The capital of France is" --max-tokens 20
  pagedkv generate ./model - < story.txt
  pagedkv generate ./model --file a.txt --file b.txt
  pagedkv generate ./model --jsonl requests.jsonl > answers.jsonl

A line of --jsonl is {"prompt": "..."}, with max_tokens, temperature and the like for this prompt alone; its answer is
{"prompt", "text", "num_tokens", "finish_reason"}, or {"error"}, in the same order.
"""


def add(commands: Commands) -> None:
    text = "continue prompts with a Qwen3 model of your own"
    generate = commands.add_parser("generate", help=text, description=text, epilog=EXAMPLES)
    generate.add_argument("model", help=MODEL_HELP)
    generate.add_argument("prompt", nargs="*", help="one or several texts, served as one batch; -: stdin")
    add_inputs(generate, "prompt")
    add_model_options(generate, temperature=0.0, max_tokens=64)
    generate.set_defaults(run=run, texts="prompt")


def run(args: argparse.Namespace) -> int:
    if args.jsonl is not None:
        return _run_lines(args)
    prompts, params = texts_of(args, args.prompt), params_of(args)
    if not prompts:
        raise ValueError("no prompt: give one, or --file, --jsonl, or a text on stdin")
    with llm_of(args, len(prompts)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        if output.error is None:
            print(f"{output.prompt}{output.text}")
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise errors[0]
    return 0


def _run_lines(args: argparse.Namespace) -> int:
    """Each line is a request; a bad line gets its error as its answer."""
    rows: list[Any] = [_request(args, line) for line in json_lines(args.jsonl)]
    requests = [row for row in rows if not isinstance(row, Exception)]
    with llm_of(args, len(requests)) as llm:
        prompts, params = [prompt for prompt, _ in requests], [one for _, one in requests]
        outputs = iter(llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()))
    num_errors = 0
    for row in rows:
        output = None if isinstance(row, Exception) else next(outputs)
        error = row if output is None else output.error
        num_errors += error is not None
        if output is None or error is not None:
            print_json(prompt=None if output is None else output.prompt, error=str(error))
        else:
            num_tokens = len(output.token_ids)
            print_json(
                prompt=output.prompt, text=output.text, num_tokens=num_tokens, finish_reason=output.finish_reason
            )
    return 1 if num_errors else 0


def _request(args: argparse.Namespace, line: dict[str, Any] | ValueError) -> Any:
    """(prompt, params), or the error."""
    if isinstance(line, ValueError):
        return line
    options = dict(line)
    prompt = options.pop("prompt", None)
    if not isinstance(prompt, str):
        return ValueError(f"prompt is {prompt!r} but must be a text")
    unknown = sorted(options.keys() - set(SAMPLING))
    if unknown:
        return ValueError(f"no option {unknown[0]!r}: there are {', '.join(SAMPLING)}")
    try:
        return prompt, params_of(args, **options)
    except (TypeError, ValueError) as error:
        return error
