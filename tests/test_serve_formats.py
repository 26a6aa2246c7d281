"""Thoughts and calls in answers: whatever a family writes comes out as it was meant, wherever the pieces are cut."""

from __future__ import annotations

import json
import random

import extra_serve  # noqa: F401
import pytest

from pagedkv.serve.call_xml import as_json, types_of
from pagedkv.serve.formats import CALL_FORMATS, OF_TEMPLATES, find_call_format
from pagedkv.serve.parser import Parser

HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL = CALL_FORMATS.values()
TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}},
    "f": {"type": "object", "properties": {"city": {"type": "string"}, "flag": {"type": "boolean"}}},
}
TEXTS = (
    "", "Paris", "a\nb\n", "\n", "</tool_call>", '"', "\\", "{", "}]", "<function=f>", "é☃😀", "<think>", " x ",
    "a, b: c;", "[TOOL_CALLS]",
)


def draw_arguments(rng, is_xml):
    arguments = {}
    for key, make in (("city", lambda: rng.choice(TEXTS)), ("days", lambda: rng.randrange(-3, 99)), ("flag", lambda: rng.random() < 0.5),
                      ("where", lambda: {"x": [1, rng.choice(TEXTS), {"y": None}]}), ("more", lambda: rng.choice((1.5, None, [1, 2], {})))):
        if rng.random() < 0.5:
            arguments[key] = make()
    return {key: value for key, value in arguments.items() if not (is_xml and "</" in str(value))}


def write(name, rng, calls):
    """As the family's template has it."""
    if name == "hermes":
        texts = [json.dumps({"name": f, "arguments": arguments}, ensure_ascii=rng.random() < 0.5) for f, arguments in calls]
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": f, "parameters": arguments}, indent=rng.choice((None, 2))) for f, arguments in calls)
    if name == "mistral":
        if rng.random() < 0.5:
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{json.dumps(arguments)}" for f, arguments in calls)
        return "[TOOL_CALLS] " * bool(calls) + (json.dumps([{"name": f, "arguments": arguments} for f, arguments in calls]) if calls else "")
    parts = []
    for f, arguments in calls:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        parts.append(f"<tool_call>\n<function={f}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(parts)


def read(calls, text, start, cuts, max_calls=None):
    """What the events say, put together: thoughts, content, calls."""
    parser = Parser(calls, TOOLS, start, max_calls)
    events, at = [], 0
    for cut in cuts:
        events += parser.feed(text[at:cut])
        at = cut
    events += parser.feed(text[at:], is_last=True)
    found = {"reasoning": "", "content": "", "calls": []}
    for event in events:
        if event.kind == "call":
            assert event.call == len(found["calls"])
            found["calls"].append([event.text, ""])
        elif event.kind == "arguments":
            assert event.call == len(found["calls"]) - 1 and event.text
            found["calls"][-1][1] += event.text
        else:
            assert event.text
            found[event.kind] += event.text
    return found


def cuts_of(rng, text):
    kind = rng.randrange(3)
    return range(1, len(text)) if kind == 0 else sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((1, 3, 12))))


@pytest.mark.parametrize("name", [*CALL_FORMATS])
def test_what_a_family_writes_is_read(name, seed):
    rng = random.Random(seed)
    for _ in range(400):
        start = rng.choice(("begin", "think", "answer"))
        thoughts = rng.choice(("", "hm", "a < b\n\nso <think> and {", "<tool_call> would be \n early"))
        content = rng.choice(("", "I look it up.", "a <b> c\n\n{ d }", "é☃"))
        calls = [(rng.choice([*TOOLS]), draw_arguments(rng, name == "qwen3_coder")) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
        if name == "llama3_json":  # calls or content
            content = content * (not calls)
        text = {"think": f"{thoughts}\n</think>\n\n", "begin": f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "", "answer": ""}[start]
        text += content + "\n" * bool(content and calls) + write(name, rng, calls)
        expected = thoughts * (start != "answer"), content, calls
        for cuts in ((), cuts_of(rng, text), cuts_of(rng, text)):
            found = read(CALL_FORMATS[name], text, start, cuts)
            got = found["reasoning"], found["content"], [(f, json.loads(arguments)) for f, arguments in found["calls"]]
            assert got == expected, (text, list(cuts))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_line_ends_in_strings_are_escaped(name, seed):
    """As they have to be in JSON. Models that write code forget it."""
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices(("a", "\n", "\t", "\x01", "{", "}", '"', " ", "é"), k=rng.randrange(12)))
        calls = [("f", {"code": text, "b": [text, 1], text: None})]
        written = write(name, rng, calls).replace("\\n", "\n").replace("\\t", "\t").replace("\\u0001", "\x01")
        for cuts in ((), cuts_of(rng, written)):
            found = read(CALL_FORMATS[name], written, "answer", cuts)["calls"]
            assert [(f, json.loads(arguments)) for f, arguments in found] == calls, (written, list(cuts))
    within = '<tool_call>{"name": "f", "arguments": "{\\"code\\": \\"a\n\\"}"}</tool_call>'
    assert json.loads(read(CALL_FORMATS["hermes"], within, "answer", ())["calls"][0][1]) == {"code": "a\n"}
    escaped = '<tool_call>{"name": "f", "arguments": {"code": "a\\\n\\\\\n"}}</tool_call>'
    assert json.loads(read(CALL_FORMATS["hermes"], escaped, "answer", range(len(escaped)))["calls"][0][1]) == {"code": "a\n\\\n"}


BITS = (
    "<tool_call>", "</tool_call>", "<function=", "f", "get_weather", ">", "<parameter=", "city", "</parameter>", "</function>", "\n", " ", "{", "}",
    '"name"', ":", '"f"', '"arguments"', '{"a": 1}', ",", '"', "\\", "[TOOL_CALLS]", "[", "[ARGS]", "[CALL_ID]", "]", "<think>", "</think>", "<", "x",
    ";", "<|python_tag|>", '"parameters"', "null", "3", '{"name": "f", "arguments": {', "é",
)  # fmt: skip


@pytest.mark.parametrize("name", [*CALL_FORMATS, None])
def test_nonsense_is_read_the_same_in_any_pieces(name, seed):
    rng, calls = random.Random(seed), CALL_FORMATS.get(name)
    for _ in range(1500):
        text = "".join(rng.choice(BITS) for _ in range(rng.randrange(25)))
        start = rng.choice(("begin", "think", "answer", *([calls.forced] if calls else ())))
        whole = read(calls, text, start, ())
        for cuts in (cuts_of(rng, text), cuts_of(rng, text)):
            assert read(calls, text, start, cuts) == whole, (name, start, text, list(cuts))
        if calls is None and start == "answer":
            assert whole == {"reasoning": "", "content": text, "calls": []}


@pytest.mark.parametrize(("calls", "text", "content", "found"), [
    (HERMES, "a<tool_call>junk</tool_call>b ", "a<tool_call>junk</tool_call>b ", []),
    (HERMES, '<tool_call>\n{"name": "f"}\n</tool_call>', "", [["f", "{}"]]),
    (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "g"}</tool_call> bye ', "bye", [["g", '{"a": 1}']]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [["f", "{}"]]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [["f", '{"a": "b']]),
    (HERMES, '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f"}', "", [["f", "{}"], ["f", "{}"]]),
    (QWEN3_CODER, "<function=f><parameter=city></parameter></function> ok", "ok", [["f", '{"city": ""}']]),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=flag>\nTrue\n</parameter>\n</tool_call>", "", [["f", '{"flag": true}']]),
    (QWEN3_CODER, "<function=g><parameter=a>\n 1 \n</parameter></function>", "", [["g", '{"a": 1}']]),
    (QWEN3_CODER, "<function=f\n>", "<function=f\n>", []),
    (QWEN3_CODER, "a <tool_call> b", "a <tool_call> b", []),
    (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', "", [["f", '{"a": 1}']]),
    (LLAMA3_JSON, ' {"name": "nobody", "parameters": {}}', ' {"name": "nobody", "parameters": {}}', []),
    (LLAMA3_JSON, '{"city": "Rome"} \n', '{"city": "Rome"} \n', []),
    (LLAMA3_JSON, 'See {"name": "f"}', 'See {"name": "f"}', []),
    (MISTRAL, 'a[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}', "a", [["f", '{"a": 1}']]),
    (MISTRAL, "[TOOL_CALLS] [3]", "[TOOL_CALLS] [3]", []),
], ids=str)  # fmt: skip
def test_what_is_no_call_is_text(calls, text, content, found):
    for cuts in ((), range(1, len(text))):
        assert read(calls, text, "answer", cuts) == {"reasoning": "", "content": content, "calls": found}


def test_only_so_many_calls():
    text = "".join(f'<tool_call>{{"name": "f", "arguments": {{"a": {i}}}}}</tool_call>' for i in range(3))
    assert read(HERMES, text, "answer", (), max_calls=1)["calls"] == [["f", '{"a": 0}']]


def test_thoughts_without_an_end():
    assert read(HERMES, "<think>\n\n hm \n", "begin", ()) == {"reasoning": "hm", "content": "", "calls": []}
    assert read(None, " <thi", "begin", ()) == {"reasoning": "", "content": " <thi", "calls": []}
    assert read(None, "\n ", "begin", (1,)) == {"reasoning": "", "content": "\n ", "calls": []}


def test_values_get_the_types_of_the_schema():
    cases = [
        ({"type": "string"}, {"string"}), ({"type": ["integer", "null"]}, {"integer", "null"}), ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/x"}]}, {"number", "boolean"}), ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"const": None}, {"null"}), (True, set()), ({"$ref": "#/$defs/self"}, set()), ({"$ref": "#/nothing"}, set()),
    ]  # fmt: skip
    root = {"$defs": {"x": {"type": "boolean"}, "self": {"$ref": "#/$defs/self"}}}
    for schema, types in cases:
        assert types_of(schema, root) == types
    for text, types, value in [
        ("3", {"integer"}, 3), ("3", {"string", "null"}, "3"), ("null", {"string", "null"}, None), ("3.0", {"number"}, 3.0), ("3", {"number"}, 3),
        ("True", {"boolean"}, True), ("None", set(), None), ("NaN", {"number"}, "NaN"), ("[1", {"array"}, "[1"), (" [1] ", set(), [1]),
        ("1" * 5000, {"string", "null"}, "1" * 5000), ("x", {"integer"}, "x"), ("", set(), ""),
    ]:  # fmt: skip
        assert json.loads(as_json(text, types)) == value


def test_the_template_tells_the_format():
    for literal, calls in OF_TEMPLATES:
        assert find_call_format(f"{{{{ x }}}} {literal} y") is calls
    assert find_call_format("<tool_call> <function=") is QWEN3_CODER and find_call_format("{{ messages }}") is None
