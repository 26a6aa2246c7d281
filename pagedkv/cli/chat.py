"""pagedkv chat: a conversation in the terminal, with answers as they grow, or one answer per text or JSON line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .options import (
    ERRORS,
    MODEL_HELP,
    OF_A_REQUEST,
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
    read_text,
    sampling_options,
    texts_of,
    utf8,
)  # fmt: skip

if TYPE_CHECKING:
    from pagedkv import LLM

Message = dict[str, Any]
EXAMPLES = """\
examples:
  pagedkv chat Qwen/Qwen3-0.6B                                    a conversation
  pagedkv chat Qwen/Qwen3-0.6B --no-thinking "Why is the sky blue?"
  pagedkv chat ./model --system "Answer in French." < question.txt
  pagedkv chat ./model --jsonl chats.jsonl > answers.jsonl

In a conversation /reset forgets what was said, /quit (or the end of the input) leaves, and /help says so; Ctrl-C ends
an answer, and at the prompt the conversation. A line of --jsonl is {"messages": [{"role", "content"}, ...]}, with
max_tokens, temperature and the like for this chat alone; its answer is {"text", "num_tokens", "finish_reason"}, or
{"error"}.
"""
COMMANDS = "/reset forgets what was said, /quit leaves, /help says this"


def add(commands: Commands) -> None:
    text = "talk with a model of your own"
    chat = commands.add_parser("chat", help=text, description=text, epilog=EXAMPLES)
    chat.add_argument("model", help=MODEL_HELP)
    help = "each gets one answer; -: stdin; none: all of stdin is one message, and a terminal a conversation"
    chat.add_argument("texts", metavar="message", nargs="*", default=(), help=help)
    chat.add_argument("--system", metavar="TEXT", type=utf8, help="the system's message, before all others")
    thinks = "whether the model thinks before it answers (default: what its template does)"
    chat.add_argument("--thinking", action=argparse.BooleanOptionalAction, help=thinks)
    chat.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    add_model_options(chat, "message", "what fits where neither does")
    chat.set_defaults(run=run, what="message")


def run(args: argparse.Namespace) -> int:
    from pagedkv.engine.text.chat import ChatTemplate
    from pagedkv.models.hub import model_folder

    sampling_options(args)
    texts = [] if args.jsonl is not None else texts_of(args)
    if args.jsonl is None and not texts and not is_terminal(sys.stdin):
        raise ValueError("no message: give one, or --file, --jsonl, or a text on stdin, or a terminal to talk in")
    template = None if args.chat_template is None else read_text(args.chat_template)
    folder = model_folder(args.model, getattr(args, "revision", None))
    if template is None and not ChatTemplate.from_folder(folder).templates:
        raise ValueError(f"{folder}: no chat template in the model's folder: --chat-template FILE gives one")
    with llm_of(args, num_requests=1, model=folder) as llm:  # one after the other
        chat = Chat(llm, args, template)
        if args.jsonl is not None:
            return _answer_lines(chat, args)
        for text in texts:
            chat.reset()
            chat.say(text)
        if not texts:
            _converse(chat, args)
    return 0


class Chat:
    """The messages of a conversation, and its next answers."""

    def __init__(self, llm: LLM, args: argparse.Namespace, template: str | None) -> None:
        self._llm, self._args, self._template = llm, args, template
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._args.system is None else [{"role": "system", "content": self._args.system}]

    def say(self, text: str) -> None:
        """Prints the answer as it grows. An interrupted one is kept as far as it came; one that fails is forgotten."""
        before, answer, note = list(self.messages), "", None
        self.messages.append({"role": "user", "content": text})
        try:
            row, note = self.answer(self.messages, {}, lambda new: print(new, end="", flush=True))
            answer = row["text"]
        except KeyboardInterrupt as interrupt:
            answer = "".join(interrupt.args)
            raise
        except BaseException:
            self.messages = before
            raise
        finally:
            if len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": answer})
                print(flush=True)
        if note:
            print_note(self._args, note)

    def answer(
        self, messages: list[Message], options: dict[str, Any], show: Callable[[str], None]
    ) -> tuple[dict[str, Any], str | None]:
        """text, num_tokens and finish_reason, and a note where it was cut. A KeyboardInterrupt carries the text."""
        llm = self._llm
        params = replace(llm.default_params, **(sampling_options(self._args) | options))
        text, num_tokens, reason, note = "", 0, None, None
        try:
            for output in llm.stream(
                messages, params, lora_request=lora_of(self._args), chat_template=self._template,
                enable_thinking=self._args.thinking,
            ):  # fmt: skip
                if output.error is not None:
                    raise output.error
                show(output.text or "")
                text, reason = text + (output.text or ""), output.finish_reason
                num_tokens += len(output.token_ids)
                if reason == "length":
                    note = cut_note(llm, len(output.prompt_token_ids), num_tokens, params.max_tokens)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(text) from None
        return {"text": text, "num_tokens": num_tokens, "finish_reason": reason}, note


def _converse(chat: Chat, args: argparse.Namespace) -> None:
    """Until /quit, the end of the input, or Ctrl-C at the prompt."""
    try:
        import readline  # noqa: F401  edits lines, and has a history
    except ImportError:
        pass
    while True:
        try:
            text = utf8(input("> ")).strip()
        except EOFError:
            print()
            return
        except (UnicodeDecodeError, argparse.ArgumentTypeError) as error:
            print_error(args, error)
            continue
        if text == "/quit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(COMMANDS)
        elif text:
            try:
                chat.say(text)
            except KeyboardInterrupt:
                continue  # it ends this answer alone
            except OF_A_REQUEST as error:  # another message may work
                has_history = any(message["role"] == "assistant" for message in chat.messages)
                help = "/reset forgets what was said" if has_history else "a shorter message may fit"
                is_too_long = "prompt tokens" in str(error)  # for max_model_len or the pool
                print_error(args, f"{error}; {help}" if is_too_long else error)


def _answer_lines(chat: Chat, args: argparse.Namespace) -> int:
    """Answers one line after the other, and prints each answer as soon as it is complete."""
    from pagedkv.engine.text.messages import plain_messages

    num_errors = 0
    for line in json_lines(args.jsonl):
        try:
            if isinstance(line, ValueError):
                raise line
            messages, options = options_of_line(line, "messages")
            chat.reset()
            messages = [*chat.messages, *plain_messages(messages)]
            row, _ = chat.answer(messages, options, lambda new: None)
            print_json(**row)
        except BrokenPipeError:
            raise
        except (TypeError, *ERRORS) as error:
            num_errors += 1
            print_json(error=" ".join(str(error).split()))
    return 1 if num_errors else 0
