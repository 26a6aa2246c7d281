"""/v1/responses and /v1/messages: what goes in, and what comes out, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import random
import re

import extra_serve  # noqa: F401
import httpx
import pytest
import tool_models
from served import post, serving
from tool_models import (
    CALL,
    CUSTOM,
    FUNCTIONS,
    HI,
    PATCH,
    PERSON,
    SAID,
    TEMPLATES_BY_NAME,
    THINKING,
    ScriptedClient,
    model_of,
    saying,
)

from pagedkv import AsyncEngine
from pagedkv.engine.requests.prompts import ids_of
from pagedkv.engine.text.tokenizer import Tokenizer
from pagedkv.serve.errors import ApiError
from pagedkv.serve.message_input import messages_of as chat_of_messages
from pagedkv.serve.model import ServedModel
from pagedkv.serve.response_input import messages_of as chat_of_input

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


folder, llm = tool_models.folder, tool_models.llm


@pytest.fixture
def http(folder):
    server, client = saying(folder, SAID)
    with server as (url, _), httpx.Client(base_url=url) as http:
        http.client, client.folder = client, folder
        yield http


def named_events(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without(value, *names):
    """A value without the fields that are drawn anew each time."""
    if isinstance(value, dict):
        return {key: without(each, *names) for key, each in value.items() if key not in names}
    return [without(each, *names) for each in value] if isinstance(value, list) else value


# --- /v1/responses


def test_a_response(http):
    found = post(http, RESPONSES, input="Weather?", tools=FUNCTIONS, max_output_tokens=99, instructions="Be brief.", metadata={"a": "b"})
    assert (found["object"], found["status"], found["model"], found["max_output_tokens"]) == ("response", "completed", "demo", 99)
    assert found["metadata"] == {"a": "b"}
    thoughts, message, *calls = found["output"]
    assert thoughts["type"] == "reasoning" and thoughts["content"] == [{"type": "reasoning_text", "text": "The weather."}]
    assert message["type"] == "message" and message["content"][0]["text"] == "I look." and message["role"] == "assistant"
    assert [(each["type"], each["name"], json.loads(each["arguments"])) for each in calls] == [
        ("function_call", "get_weather", {"city": "Paris", "days": 3}), ("function_call", "get_time", {"zone": "utc"}),
    ]  # fmt: skip
    assert all(each["status"] == "completed" for each in found["output"])
    assert len({each["id"] for each in found["output"]}) == 4
    usage = found["usage"]
    assert usage["output_tokens"] == 1
    assert usage["input_tokens"] == len(http.client.seen[0][0]) == usage["total_tokens"] - 1
    assert http.client.seen[0][1].max_tokens == 99
    text = Tokenizer(http.client.folder).decode(http.client.seen[0][0])
    assert "Be brief." in text and "get_time" in text


@pytest.mark.parametrize("number", range(4))
def test_events_of_a_response(http, number):
    """They tell of all that the whole response has, whatever the pieces are."""
    http.client.rng.seed(number)
    body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}], "tools": FUNCTIONS}
    whole = post(http, RESPONSES, **body)
    events = named_events(http.post(RESPONSES, json=body | {"stream": True}))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"] and events[-1]["type"] == "response.completed"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    drawn = ("id", "call_id", "created_at", "usage")
    assert without(events[-1]["response"], *drawn) == without(whole, *drawn)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [each for each in events if each.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["status"] == "in_progress"
        assert own[-1] == own[-1] | {"type": "response.output_item.done", "item": item}
        assert {each["item_id"] for each in own[1:-1]} == {item["id"]}
        deltas = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        done = next(each for each in own if each["type"].endswith(("text.done", "arguments.done")))
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas == text == done.get("text", done.get("arguments"))


def test_responses_that_are_cut_or_fail(folder):
    with saying(folder, ("I th", "length", None))[0] as (url, _), httpx.Client(base_url=url) as http:
        found = post(http, RESPONSES, input="Hi")
        assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][0]["status"] == "incomplete"
        assert named_events(http.post(RESPONSES, json={"input": "Hi", "stream": True}))[-1]["type"] == "response.incomplete"


def test_what_goes_into_a_response(http):
    items = [
        {"role": "developer", "content": "Short."}, {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I think."}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "I ", "annotations": []}, {"type": "output_text", "text": "look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Sunny."}, {"role": "assistant", "content": "At noon."},
    ]  # fmt: skip
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}} for i, name, arguments in ((1, "get_weather", '{"city": "Rome"}'), (2, "get_time", "{}"))]
    assert chat_of_input(items, "Be.") == [
        {"role": "system", "content": "Be."}, {"role": "developer", "content": "Short."}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "I think.", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "content": "Sunny."}, {"role": "assistant", "content": "At noon."},
    ]  # fmt: skip
    assert post(http, RESPONSES, input=items, tools=FUNCTIONS)["status"] == "completed"
    for wrong in (None, [], 3, [3], [{"type": "item_reference", "id": "x"}], [{"type": "additional_tools", "tools": "x"}], [{"role": "user"}], [{"role": 3, "content": "x"}],
                  [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], [{"type": "function_call", "name": "f"}]):
        error = post(http, RESPONSES, 400, input=wrong)["error"]
        assert error["param"] == "input" and "input" in error["message"], wrong
    for body, param in (({"previous_response_id": "x"}, "previous_response_id"), ({"n": 2}, "n"), ({"text": {"format": {"type": "x"}}}, "text"),
                        ({"tools": [{"type": "file_search"}]}, "tools"), ({"tools": [PATCH | {"format": {"type": "x"}}]}, "tools"), ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools"), ({"tools": [{"type": "namespace", "name": "x", "tools": [3]}]}, "tools"), ({"truncation": "some"}, "truncation"), ({"inputs": "x"}, "inputs"), ({"background": True}, "background")):
        assert post(http, RESPONSES, 400, **{"input": "Hi"} | body)["error"]["param"] == param
    warned = http.post(RESPONSES, json={"input": "Hi", "store": True, "include": [], "reasoning": {"effort": "low"}}).headers["x-pagedkv-warning"]
    assert warned == "without effect: store, include, reasoning_effort"


def test_what_codex_sends(folder):
    """Functions of MCP in namespaces, and tools that the server does not have; the calls come back with their namespaces."""
    call = '<tool_call>{"name": "mcp__fs.read", "arguments": {"zone": "utc"}}</tool_call>'
    tools = [FUNCTIONS[0], {"type": "namespace", "name": "mcp__fs", "description": "files", "tools": [FUNCTIONS[1] | {"name": "read"}]}, {"type": "web_search", "external_web_access": False}]
    server, client = saying(folder, call)
    with server as (url, _), httpx.Client(base_url=url) as http:
        items = [{"type": "additional_tools", "role": "developer", "tools": tools[1:]}, {"role": "user", "content": "Hi"}]
        body = {"input": items, "tools": tools[:1], "tool_choice": "auto", "client_metadata": {"a": "b"}, "parallel_tool_calls": False, "store": False, "stream": True}
        answer = http.post(RESPONSES, json=body)
        assert answer.headers["x-pagedkv-warning"] == "without effect: client_metadata, store, tools.web_search"
        (item,) = named_events(answer)[-1]["response"]["output"]
        assert (item["namespace"], item["name"], item["arguments"]) == ("mcp__fs", "read", '{"zone": "utc"}')
        post(http, RESPONSES, input=[{"role": "user", "content": "Hi"}, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}], tools=tools)
        assert Tokenizer(folder).decode(ids_of(client.seen[1][0])).count('"name": "mcp__fs.read"') == 2  # the tool, the call


@pytest.mark.parametrize("template", ["hermes", "qwen3_coder", "llama3_json", "mistral"])
def test_custom_tools(folder, template):
    """As Codex has them: for the model a function with one argument, for the client a text, which comes as it grows."""
    patch, rng = '*** Begin Patch\n+"a\\tb" \\\\ \U0001f600 é\t</x>\n*** End', random.Random(5)
    counts = []
    for number in range(2):
        said = json.dumps({"name": "fs.apply_patch", "arguments" if template != "llama3_json" else "parameters": {"input": patch}}, ensure_ascii=number % 2 == 0)
        said = {"hermes": f"<tool_call>{said}</tool_call>", "mistral": f"[TOOL_CALLS][{said}]", "qwen3_coder": f"<function=fs.apply_patch>\n<parameter=input>\n{patch}\n</parameter>\n</function>"}.get(template, said)
        server, client = saying(folder, said, TEMPLATES_BY_NAME[template])
        client.rng.seed(rng.randrange(1000))
        with server as (url, _), httpx.Client(base_url=url) as http:
            body = {"input": "Hi", "tools": [FUNCTIONS[0], {"type": "namespace", "name": "fs", "tools": [PATCH]}]}
            answer = http.post(RESPONSES, json=body | {"stream": True})
            assert answer.headers["x-pagedkv-warning"] == "without effect: tools.format"
            *_, last = events = named_events(answer)
            (item,) = last["response"]["output"]
            assert item == {"type": "custom_tool_call", "id": item["id"], "call_id": item["call_id"], "name": "apply_patch", "namespace": "fs", "input": patch, "status": "completed"}
            own = [each for each in events if "custom_tool_call_input" in each["type"]]
            assert "".join(each["delta"] for each in own[:-1]) == patch
            counts.append(len(own))
            assert own[-1] == {"type": "response.custom_tool_call_input.done", "sequence_number": own[-1]["sequence_number"], "item_id": item["id"], "output_index": 0, "input": patch}
            assert without(post(http, RESPONSES, **body)["output"], "id", "call_id") == without([item], "id", "call_id")
            text = Tokenizer(folder).decode(ids_of(client.seen[0][0]))
            assert "Edits files." in text and "lark grammar:" in text and "start: /.+/" in text
    assert max(counts) > 3
    call = {"id": "c1", "type": "function", "function": {"name": "fs.apply_patch", "arguments": json.dumps({"input": patch}, ensure_ascii=False)}}
    back = [item | {"call_id": "c1"}, {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}]
    assert chat_of_input(back, None) == [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "Done."}]


def test_a_conversation_that_is_cut(folder):
    """truncation: the first messages go, and never an answer or a tool's result without its question, nor instructions."""
    turns = [{"role": "user", "content": f"<{i}>" + "x" * 300} if i % 2 == 0 else {"role": "assistant", "content": f"<{i}>" + "y" * 200} for i in range(61)]
    server, client = saying(folder, "a")
    with server as (url, _), httpx.Client(base_url=url) as http:
        body = {"input": [{"role": "developer", "content": "Be."}, *turns], "instructions": "Be brief."}
        whole = post(http, RESPONSES + "/input_tokens", **body)
        assert whole["object"] == "response.input_tokens" and whole["input_tokens"] > 4096
        for most in (None, 700, 9000):
            found = post(http, RESPONSES, truncation="auto", max_output_tokens=most, **body)
            room = 4096 - {None: 1, 700: 700, 9000: 2048}[most]
            assert found["truncation"] == "auto" and room - 700 < found["usage"]["input_tokens"] <= room
            text = Tokenizer(folder).decode(ids_of(client.seen[-1][0]))
            kept = [i for i in range(61) if f"<{i}>" in text]
            assert kept == list(range(kept[0], 61)) and kept[0] % 2 == 0 and "Be brief." in text and "Be." in text
            assert post(http, RESPONSES + "/input_tokens", truncation="auto", max_output_tokens=most, **body)["input_tokens"] == found["usage"]["input_tokens"]
        short = post(http, RESPONSES, input="Hi", truncation="auto")["usage"]["input_tokens"]
        assert short == post(http, RESPONSES + "/input_tokens", input="Hi")["input_tokens"]


def test_a_response_of_a_schema(llm):
    pytest.importorskip("xgrammar")
    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], THINKING)) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        form = {"type": "json_schema", "name": "person", "schema": PERSON}
        found = post(http, RESPONSES, input="Hi", text={"format": form}, temperature=1.0, seed=4, max_output_tokens=2000)
        thoughts, message = found["output"]
        assert thoughts["type"] == "reasoning" and 0 <= json.loads(message["content"][0]["text"])["age"] <= 99
        details = found["usage"]["output_tokens_details"]
        assert 0 < details["reasoning_tokens"] < found["usage"]["output_tokens"]
        wrong = post(http, RESPONSES, 400, input="Hi", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}})["error"]
        assert wrong["param"] == "text" and wrong["message"].startswith("text.format.")
        only = post(
            http, RESPONSES, input="Hi", tools=FUNCTIONS, tool_choice={"type": "function", "name": "get_time"},
            temperature=1.0, seed=4, max_output_tokens=2000,
        )
        assert [each["name"] for each in only["output"] if each["type"] == "function_call"] == ["get_time"]


# --- /v1/messages


def test_tools_that_come_and_go(http):
    """As Claude Code says it, in messages of the system; a result of a search names a tool; a reminder is for one turn."""
    f, g, h = (CUSTOM[1] | {"name": name, "defer_loading": True} for name in ("tool_f", "tool_g", "tool_h"))

    def change(kind, name=None, **tool):
        return {"type": f"tool_{kind}", "tool": tool or {"type": "tool_reference", "name": name}}

    def ask(messages, tools, status=200):
        return post(http, MESSAGES, status, max_tokens=9, messages=messages, tools=tools)

    first, last = ({"role": "system", "content": f"Remember {it}.", "clear_at": "next_user_message"} for it in "AB")
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "tool_f", "input": {}}]}
    found = [{"type": "tool_reference", "tool_name": "tool_g"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": found}]}
    for changes, names in (
        ([], "fg"),
        ([change("addition", "tool_g")], "fg"),
        ([change("removal", "tool_f")], "g"),
        ([change("addition", type="tool_definition", definition=h), change("removal", "tool_g")], "fh"),
        ([change("removal", "tool_f"), change("addition", "tool_f")], "gf"),
    ):
        ask([*HI, first, used, result, last, *([{"role": "system", "content": changes}] if changes else [])], [f, g])
        text = Tokenizer(http.client.folder).decode(ids_of(http.client.seen[-1][0]))
        assert re.findall('"name": "tool_(.)", "param', text) == [*names] and text.count("tool_response") == 2
        assert "Remember B." in text and "Remember A." not in text
    for wrong in ([change("addition", "x")], [{"type": "tool_removal"}]):
        refusal = ask([*HI, {"role": "system", "content": wrong}], [f], 400)
        assert "none of the tools" in refusal["error"]["message"]
    refusal = ask([{"role": "system", "content": [change("removal", "tool_f")]}], [f], 400)
    assert "messages is missing or empty" in refusal["error"]["message"]


BLOCKS = [
    {"type": "thinking", "thinking": "The weather.", "signature": ""}, {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris", "days": 3}}, {"type": "tool_use", "name": "get_time", "input": {"zone": "utc"}},
]  # fmt: skip


def test_a_message(http):
    found = post(http, MESSAGES, model="demo", max_tokens=50, messages=HI, tools=CUSTOM, system="Be brief.")
    assert without(found["content"], "id") == BLOCKS
    assert (found["type"], found["role"], found["stop_reason"], found["stop_sequence"]) == ("message", "assistant", "tool_use", None)
    assert found["usage"] == {"input_tokens": len(http.client.seen[0][0]), "output_tokens": 1, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    assert post(http, COUNT, messages=HI, tools=CUSTOM, system=[{"type": "text", "text": "Be brief."}]) == {"input_tokens": found["usage"]["input_tokens"]}


@pytest.mark.parametrize("number", range(4))
def test_events_of_a_message(http, number):
    http.client.rng.seed(number)
    body = {"max_tokens": 50, "messages": HI, "tools": CUSTOM, "stream": True}
    events = named_events(http.post(MESSAGES, json=body))
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0
    blocks, is_open = [], False
    for each in events[1:-2]:
        if each["type"] == "content_block_start":
            assert not is_open and each["index"] == len(blocks)
            blocks.append(each["content_block"] | ({"input": ""} if each["content_block"]["type"] == "tool_use" else {}))
        assert each["index"] == len(blocks) - 1
        is_open = each["type"] != "content_block_stop"
        if each["type"] == "content_block_delta":
            (name,) = set(each["delta"]) - {"type"}
            assert each["delta"]["type"] == {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}[name]
            blocks[-1][{"partial_json": "input"}.get(name, name)] += each["delta"][name]
    assert not is_open
    assert without([b | ({"input": json.loads(b["input"])} if "input" in b else {}) for b in blocks], "id") == BLOCKS


def test_ends_of_messages(folder):
    cases = [
        (("abc", "length", None), "max_tokens", None, "abc"), (("abc", "stop", "END"), "stop_sequence", "END", "abc"),
        (("abc", "stop", None), "end_turn", None, "abc"), (("<tool_call>{\"name\": \"f\", \"arguments\": {\"a", "length", None), "max_tokens", None, None),
    ]  # fmt: skip
    for said, reason, sequence, text in cases:
        with saying(folder, said)[0] as (url, _), httpx.Client(base_url=url) as http:
            found = post(http, MESSAGES, max_tokens=5, messages=HI, stop_sequences=["END"], tools=CUSTOM)
            assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
            if text is None:
                assert found["content"][0]["input"] == {"invalid_json": '{"a'}
            else:
                assert found["content"] == [{"type": "text", "text": text}]


def test_half_of_a_surrogate_pair_in_a_tools_input(folder):
    """It is JSON, but no text that could be sent as UTF-8."""
    said = CALL.replace("Paris", r"\ud800")
    with saying(folder, said)[0] as (url, _), httpx.Client(base_url=url) as http:
        found = post(http, MESSAGES, max_tokens=5, messages=HI, tools=CUSTOM)
        assert found["content"][0]["input"] == {"invalid_json": '{"city": "\\ud800", "days": 3}'}


def test_what_goes_into_a_message(http):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Now?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I think.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}, {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]
    assert chat_of_messages(messages, [{"type": "text", "text": "Be."}]) == [
        {"role": "system", "content": "Be."}, {"role": "user", "content": "Weather?\nNow?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "I think.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert post(http, MESSAGES, max_tokens=9, messages=messages, tools=CUSTOM)["stop_reason"] == "tool_use"
    prefilled = [*HI, {"role": "assistant", "content": "<think>\n\n</think>\n\nIt is"}]
    post(http, MESSAGES, max_tokens=9, messages=prefilled)
    prompt = http.client.seen[-1][0]  # with its text, which the answer goes on with
    assert Tokenizer(http.client.folder).decode(prompt["prompt_token_ids"]).endswith("It is") and prompt["prompt"].endswith("It is")
    bad = [
        ({}, "max_tokens is missing"), ({"max_tokens": 5, "messages": []}, "messages is missing"), ({"max_tokens": 5, "messages": [{"role": "tool", "content": "x"}]}, "role is 'tool'"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is of type 'image'"),
        ({"max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] is of type 'bash_20250124'"),
        ({"max_tokens": 5, "tools": CUSTOM, "tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"), ({"max_tokens": 5, "thinking": {"type": "x"}}, "thinking.type is 'x'"),
        ({"max_tokens": 5, "output_config": {"format": {"type": "xml"}}}, "output_config.format"), ({"max_token": 5}, "did you mean 'max_tokens'?"),
        ({"max_tokens": 5, "stop_sequences": ["a", ""]}, "stop_sequences[1] is empty"), ({"max_tokens": 5, "stop_sequences": ["a"] * 1025}, "stop_sequences has 1,025"),
        ({"max_tokens": 5, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format.json_schema.schema is missing"),
    ]  # fmt: skip
    for body, text in bad:
        error = post(http, MESSAGES, 400, **{"messages": HI} | body)
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert text in error["error"]["message"]
    assert post(http, MESSAGES, 404, max_tokens=5, messages=HI, model="gpt")["error"]["type"] == "not_found_error"
    assert http.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"


def test_thinking_is_switched(http):
    for thinking, ends in (({"type": "disabled"}, "<think>\n\n</think>\n\n"), ({"type": "enabled", "budget_tokens": 1024}, "assistant\n"), ({"type": "adaptive"}, "assistant\n")):
        post(http, MESSAGES, max_tokens=9, messages=HI, thinking=thinking)
        assert Tokenizer(http.client.folder).decode(http.client.seen[-1][0], skip_special_tokens=False).endswith(ends)


def test_keys_of_anthropics_clients(folder):
    with serving(saying(folder, "a")[1], model_of(folder), api_keys=["k"]) as (url, _), httpx.Client(base_url=url) as http:
        body = {"max_tokens": 5, "messages": HI}
        assert http.post(MESSAGES, json=body, headers={"x-api-key": "k"}).status_code == 200
        refused = http.post(MESSAGES, json=body, headers={"x-api-key": "other"})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


def test_streams_that_fail_end_with_an_error(folder):
    async def half(prompt, params=None, request_id=None, **options):
        async for output in type(client).generate(client, prompt, params):
            yield output
            await asyncio.sleep(0.05)
            raise ApiError(503, "the server has ended this answer")

    server, client = saying(folder, "abc def ghi")
    client.generate = half
    client.rng.seed(1)
    with server as (url, _), httpx.Client(base_url=url) as http:
        last = named_events(http.post(RESPONSES, json={"input": "Hi", "stream": True}))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["message"] == "the server has ended this answer"
        last = named_events(http.post(MESSAGES, json={"max_tokens": 5, "messages": HI, "stream": True}))[-1]
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"


def test_a_response_that_fails_behind_a_comment_was_created(folder):
    """OpenAI's client takes no other event before response.created."""

    async def fail(*args, **options):
        await asyncio.sleep(0.1)
        raise ApiError(503, "the server has ended this answer")
        yield

    client = ScriptedClient(None)
    client.generate = fail
    with serving(client, model_of(folder), keep_alive=0.02) as (url, _):
        text = httpx.post(url + RESPONSES, json={"input": "Hi", "stream": True}).text
        assert text.startswith(": keep-alive\n\n")
        events = [json.loads(each.partition("data: ")[2]) for each in text.split("\n\n") if "data: " in each]
        assert [each["type"] for each in events] == ["response.created", "response.in_progress", "response.failed"]
        assert [each["sequence_number"] for each in events] == [0, 1, 2] and events[0]["response"]["error"] is None
        assert [each["response"]["status"] for each in events] == ["in_progress", "in_progress", "failed"]
