"""pagedkv batch: a file of requests in OpenAI's form becomes a file of answers."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from pagedkv.optional import need

from .options import MODEL_HELP, Commands, add_engine_options, engine_options, integer, print_note
from .serve import PACKAGES, add_serving_options, serving_options

EXAMPLES = """\
examples:
  pagedkv batch requests.jsonl -o answers.jsonl
  pagedkv batch requests.jsonl -o answers.jsonl --model ./model

A request is a line such as
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "./model", "prompt": "1+1="}}
A run that was ended goes on where it was, when the same command is given again.
"""


def add(commands: Commands) -> None:
    text = "answer a file of requests in OpenAI's form; a run that was ended goes on"
    batch = commands.add_parser("batch", help=text, description=text, epilog=EXAMPLES)
    batch.add_argument("requests", metavar="REQUESTS", help="JSON lines with custom_id, method, url and body")
    help = "where the answers go; those there are kept"
    batch.add_argument("-o", "--output", metavar="FILE", required=True, help=help)
    help = f"{MODEL_HELP}, for all requests, whatever model they name (default: the one that they name)"
    batch.add_argument("--model", help=help)
    help = "requests in work at a time (default: %(default)s)"
    batch.add_argument("--at-a-time", metavar="N", type=integer, default=512, help=help)
    add_serving_options(batch.add_argument_group("answers"))
    add_engine_options(batch)
    batch.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    need("pagedkv batch", "serve", *PACKAGES)
    from pagedkv import AsyncEngine
    from pagedkv.progress import progress_bar
    from pagedkv.serve.app import make_app
    from pagedkv.serve.batch import AnswerFile, RequestFile, answer_all
    from pagedkv.serve.model import ServedModel
    from pagedkv.serve.server import Server

    requests = RequestFile(Path(args.requests))
    options, template, adapters = serving_options(args, [])
    named = [name for name in requests.models if name not in adapters]
    if args.model is None and len(named) != 1:
        which = f"the requests name {', '.join(named)}" if named else "the requests name no model"
        raise ValueError(f"--model is missing: {which}")
    model_name = named[0] if args.model is None else args.model
    answers = AnswerFile(Path(args.output), requests.ids)
    num_there, statuses = len(answers.done), list[int]()
    try:
        if num_there < len(requests.ids):
            client = AsyncEngine(model_name, **(options | engine_options(args)))
            try:
                model = ServedModel.of_engine(client.engine, named or [model_name], template, adapters)
                model.tool_call_parser, model.reasoning_parser = args.tool_call_parser, args.reasoning_parser
                no_limit = 1 << 40
                app = make_app(Server(client, model, max_body_size=no_limit, max_answers=no_limit))
                with progress_bar(len(requests.ids) - num_there, "requests", "request") as bar:

                    def tell(status: int) -> None:
                        statuses.append(status)
                        if bar is not None:
                            bar.update()

                    asyncio.run(answer_all(app, requests, answers, args.at_a_time, tell))
            finally:
                client.close()
    finally:
        answers.close()
    num_good = sum(status == 200 for status in statuses)
    print_note(args, f"{num_good} answered, {len(statuses) - num_good} refused or failed, {num_there} were there")
    return 0
