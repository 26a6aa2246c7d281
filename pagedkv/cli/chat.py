"""pagedkv chat: a conversation in the terminal, with answers as they grow, or one answer per text or JSON line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    read_text,
    texts_of,
)  # fmt: skip

if TYPE_CHECKING:
    from pagedkv import LLM

Message = dict[str, Any]
EXAMPLES = """\
examples:
  pagedkv chat Qwen/Qwen3-0.6B                                    a conversation
  pagedkv chat Qwen/Qwen3-0.6B "Why is the sky blue?"             one answer
  pagedkv chat ./model --system "Answer in French." < question.txt
  pagedkv chat ./model --jsonl chats.jsonl > answers.jsonl

In a conversation /reset forgets what was said, /quit (or the end of the input) leaves, and /help says so; Ctrl-C ends
an answer, and at the prompt the conversation. A line of --jsonl is {"messages": [{"role", "content"}, ...]}, with
max_tokens, temperature and the like for this chat alone; its answer is {"text", "num_tokens", "finish_reason"}, or
{"error"}.
"""


def add(commands: Commands) -> None:
    text = "talk with a Qwen3 model of your own"
    chat = commands.add_parser("chat", help=text, description=text, epilog=EXAMPLES)
    chat.add_argument("model", help=MODEL_HELP)
    chat.add_argument("message", nargs="*", help="each gets one answer; -: stdin; none: a conversation")
    chat.add_argument("--system", metavar="TEXT", help="the system's message, before all others")
    chat.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    add_inputs(chat, "message")
    add_model_options(chat, temperature=0.6, max_tokens=None)
    chat.set_defaults(run=run, texts="message")


def run(args: argparse.Namespace) -> int:
    params_of(args)  # raises for wrong options before the model is loaded
    texts = [] if args.jsonl is not None else texts_of(args, args.message)
    with llm_of(args, num_requests=1) as llm:  # one after the other
        chat = Chat(llm, args)
        if args.jsonl is not None:
            return _answer_lines(chat, args)
        for text in texts:
            chat.reset()
            chat.say(text)
        if not texts:
            _converse(chat)
    return 0


class Chat:
    """The messages of a conversation, and its next answers."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm, self._args = llm, args
        self._template = None if args.chat_template is None else read_text(Path(args.chat_template))
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._args.system is None else [{"role": "system", "content": self._args.system}]

    def say(self, text: str) -> None:
        """Prints the answer as it grows. An interrupted one is kept as far as it came; one that fails is forgotten."""
        before, answer = list(self.messages), ""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self.answer(self.messages, {}, lambda new: print(new, end="", flush=True))["text"]
        except KeyboardInterrupt as interrupt:
            answer = "".join(interrupt.args)
            raise
        except BaseException:
            self.messages = before
            raise
        finally:
            if len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": answer})
                print()

    def answer(self, messages: list[Message], options: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
        """text, num_tokens and finish_reason; a KeyboardInterrupt carries the text so far."""
        if self._args.max_tokens is None:
            options = {"max_tokens": min(1024, self._llm.max_model_len // 2)} | options
        params = params_of(self._args, **options)
        text, num_tokens, reason = "", 0, None
        try:
            for output in self._llm.stream(messages, params, chat_template=self._template):
                if output.error is not None:
                    raise output.error
                show(output.text or "")
                text, reason = text + (output.text or ""), output.finish_reason
                num_tokens += len(output.token_ids)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(text) from None
        return {"text": text, "num_tokens": num_tokens, "finish_reason": reason}


def _converse(chat: Chat) -> None:
    """Until /quit, the end of the input, or Ctrl-C at the prompt."""
    try:
        import readline  # noqa: F401  edits lines, and has a history
    except ImportError:
        pass
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print("/reset forgets what was said, /quit leaves, /help says this")
        elif text:
            try:
                chat.say(text)
            except KeyboardInterrupt:
                continue  # it ends this answer alone
            except ValueError as error:  # such as a chat that is too long now: another message may work
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def _answer_lines(chat: Chat, args: argparse.Namespace) -> int:
    """Answers one line after the other, and prints each answer as soon as it is complete."""
    from pagedkv.engine.messages import plain_messages

    num_errors = 0
    for line in json_lines(args.jsonl):
        try:
            if isinstance(line, ValueError):
                raise line
            options = dict(line)
            messages = options.pop("messages", None)
            unknown = sorted(options.keys() - set(SAMPLING))
            if unknown:
                raise ValueError(f"no option {unknown[0]!r}: there are messages, {', '.join(SAMPLING)}")
            plain_messages(messages)
            chat.reset()
            print_json(**chat.answer([*chat.messages, *messages], options, lambda new: None))
        except (TypeError, ValueError) as error:
            num_errors += 1
            print_json(error=" ".join(str(error).split()))
    return 1 if num_errors else 0
