"""What families of models write beside plain text: thoughts, and calls of tools. parser.py runs these tables of states.

A table is found by the chat template, which has shown the model what to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Table = Mapping[str, "State"]


class State(NamedTuple):
    """A place within an answer.

    text: what the text here is. "content" and "reasoning" are shown as such, "skip" is not; "name" is a function's;
        "before" comes before it; "inside" is between the parameters of a call, "key" and "value" are parts of one;
        "call" is a JSON object with a name and arguments, and "arguments" a JSON value
    exits: by the literal that ends it, the state after it; content after the beginning of a call: it was none
    other: the state from the first character on that is no white space and begins no exit, or behind a JSON value
    kept: the literal that ends this state and is the beginning of the next one's text
    """

    text: str
    exits: Mapping[str, str] = {}
    other: str | None = None
    kept: str | None = None


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    table: begins with the state "answer"
    plain: the state after what looked like a call and was none
    is_bare: nothing but the name of a tool tells a call from other JSON
    forced: the state of an answer that has to be calls
    has_special_tokens: the literals are special tokens, which texts leave out unless they are asked for
    begin, end, separator: what a grammar writes around the arguments of a call, and between calls; NAME is the
        function's name, as a JSON string has it
    style: of the arguments, by xgrammar's name
    around: what a grammar writes around all calls of an answer that has to call
    trigger: text that is followed by a call wherever it stands; None: there is none
    id_length: of the letters and digits of a call's id, where the template asks for so many
    """

    name: str
    table: Table
    begin: str
    end: str
    separator: str
    style: str = "json"
    plain: str = "answer"
    is_bare: bool = False
    forced: str = "answer"
    around: tuple[str, str] = ("", "")
    trigger: str | None = None
    has_special_tokens: bool = False
    id_length: int | None = None


NO_CALLS: Table = {"answer": State("content")}

THOUGHTS: Table = {
    "begin": State("content", {"<think>": "think"}, other="answer"),
    "think": State("reasoning", {"</think>": "after"}),
    "after": State("skip", other="answer"),
}
THINK, THINK_END = "<think>", "</think>"

# {"name": ..., "arguments": {...}} within tags.
HERMES = CallFormat(
    "hermes",
    {
        "answer": State("content", {"<tool_call>": "call"}),
        "call": State("call", other="ended"),
        "ended": State("skip", {"</tool_call>": "answer", "<tool_call>": "call"}, other="answer"),
    },
    begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>", separator="\n",
    trigger="<tool_call>",
)  # fmt: skip

# A tag for each parameter, whose value is no JSON where the schema says that it is a text.
QWEN3_CODER = CallFormat(
    "qwen3_coder",
    {
        "answer": State("content", {"<tool_call>": "open", "<function=": "name"}),
        "open": State("before", {"<function=": "name"}, other="answer"),
        "name": State("name", {">": "inside", "\n": "answer"}),
        "inside": State("inside", {"<parameter=": "key", "</function>": "closed", "</tool_call>": "answer"}),
        "key": State("key", {">": "value"}),
        "value": State("value", {"</parameter>": "inside"}),
        "closed": State(
            "skip", {"</tool_call>": "answer", "<tool_call>": "open", "<function=": "name"}, other="answer"
        ),
    },
    begin="<tool_call>\n<function=NAME>\n", end="</function>\n</tool_call>", separator="\n", style="qwen_xml",
    trigger="<tool_call>",
)  # fmt: skip

# An answer that is {"name": ..., "parameters": {...}} and nothing else.
LLAMA3_JSON = CallFormat(
    "llama3_json",
    {
        "answer": State("content", {"<|python_tag|>": "call", "{": "call"}, other="text", kept="{"),
        "text": State("content"),
        "call": State("call", other="ended"),
        "ended": State("skip", {";": "call", "<|eom_id|>": "ended"}, other="text"),
    },
    begin='{"name": "NAME", "parameters": ', end="}", separator="; ", plain="text", is_bare=True,
)  # fmt: skip

# [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and in newer models [TOOL_CALLS]name[ARGS]{...}.
MISTRAL = CallFormat(
    "mistral",
    {
        "answer": State("content", {"[TOOL_CALLS]": "calls"}),
        "calls": State("name", {"[": "list", "[ARGS]": "arguments", "[CALL_ID]": "id", "\n": "answer"}),
        "id": State("before", {"[ARGS]": "arguments"}),
        "arguments": State("arguments", other="answer"),
        "list": State("call", other="listed"),
        "listed": State("skip", {",": "list", "]": "answer"}, other="answer"),
    },
    begin='{"name": "NAME", "arguments": ', end="}", separator=", ", forced="calls", around=("[", "]"),
    has_special_tokens=True, id_length=9,
)  # fmt: skip

CALL_FORMATS = {each.name: each for each in (HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL)}
# By what a template holds, the first of which counts.
OF_TEMPLATES = (
    ("<function=", QWEN3_CODER), ("<tool_call>", HERMES), ("[TOOL_CALLS]", MISTRAL), ('"parameters": ', LLAMA3_JSON),
    ("<|python_tag|>", LLAMA3_JSON),
)  # fmt: skip


def find_call_format(template: str) -> CallFormat | None:
    """None: the template writes no calls that are known here."""
    return next((found for literal, found in OF_TEMPLATES if literal in template), None)
