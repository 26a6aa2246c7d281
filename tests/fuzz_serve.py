"""Nonsense for the server: bodies near good ones, and bytes. A status of 4xx or a right answer, never 500, never a stream
without its end.

    python tests/fuzz_serve.py 100000 [seed]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

from tool_models import CODER, QWEN3, write_tool_model

from pagedkv import LLM, AsyncEngine
from pagedkv.serve.app import make_app
from pagedkv.serve.model import ServedModel
from pagedkv.serve.server import Server

MAX_MODEL_LEN = 1200
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
HI = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "x"},
]  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1, "max_tokens": 5, "stop": ["a", "b"], "n": 2, "stream": True, "logit_bias": {"3": 1.0}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}]},
    {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}, {"type": "text", "text": "x"}], "clear_at": "never"},
]  # fmt: skip
GOOD = {
    "/v1/completions": [{"prompt": "Hi", "max_tokens": 4}, {"prompt": ["a", [3, 4]], "logprobs": 2} | SAMPLING, {"prompt": "Hi", "structured_outputs": {"regex": "[ab]{2}"}, "max_tokens": 5}],
    "/v1/chat/completions": [
        {"messages": HI, "max_tokens": 4}, {"messages": CHAT, "tools": [TOOL], "parallel_tool_calls": True} | SAMPLING, {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
        {"messages": HI, "response_format": FORMAT, "max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "response_format": FORMAT, "max_tokens": 9, "logprobs": True, "top_logprobs": 1},
        {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none", "max_completion_tokens": 3},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 4, "instructions": "Be."}, {"input": ITEMS, "tools": [{"type": "function"} | FUNCTION], "max_output_tokens": 6, "stream": True},
        {"input": CHAT[:1] + ITEMS, "truncation": "auto", "max_output_tokens": 4, "tools": [{"type": "namespace", "name": "s", "tools": [{"type": "function"} | FUNCTION]}, {"type": "web_search"}],
         "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "s.f"}]}},
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "reasoning": {"effort": "none"}, "max_output_tokens": 9},
    ],
    "/v1/messages": [
        {"messages": HI, "max_tokens": 4, "system": "Be."}, {"messages": BLOCKS, "max_tokens": 6, "stream": True, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        {"messages": HI, "max_tokens": 6, "thinking": {"type": "disabled"}, "stop_sequences": ["a"], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    "/v1/responses/input_tokens": [{"input": ITEMS, "instructions": "Be."}],
    "/v1/messages/count_tokens": [{"messages": BLOCKS, "tools": [{"name": "f", "input_schema": SCHEMA}]}],
    "/tokenize": [{"prompt": "Hi"}, {"messages": HI, "tools": [TOOL]}], "/detokenize": [{"tokens": [3, 4]}], "/v1/embeddings": [{"input": "Hi"}],
}  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**400, 0.5, -0.5, 1e300, "", "1", "Hi", "a\u2603", "\x00", "\n", [], [0], [3, 4], [-1], ["a"], [[3], [4]],
    [None], {}, {"a": 1}, [{}], [[]], "auto", "none", "required", "text", "f", "object", "string", "user", "assistant", "system", "tool", "json_schema",
    {"type": "text"}, {"type": "function"}, HI, [TOOL], SCHEMA, CHAT, {"role": "user", "content": "x"}, "<think>", "</think>", "<tool_call>", "(", "[a-z]+",
)  # fmt: skip
KEYS = sorted({key for bodies in GOOD.values() for body in bodies for key in body}) + [
    "model", "priority", "cache_salt", "ignore_eos", "min_tokens", "return_token_ids", "echo", "user", "store", "include", "previous_response_id", "nonsense",
    "type", "content", "role", "name", "$ref", "anyOf", "items", "pattern", "minLength", "enum", "const", "format", "structural_tag", "grammar", "choice", "json",
]  # fmt: skip


def nodes_of(value, found=None):
    """All places of a value: (container, key)."""
    found = [] if found is None else found
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            nodes_of(value[key], found)
    return found


def change(rng, body):
    nodes = nodes_of(body)
    if not nodes or rng.random() < 0.25:
        body[rng.choice(KEYS)] = deepcopy(rng.choice(VALUES))
        return
    container, key = rng.choice(nodes)
    kind = rng.random()
    if kind < 0.6:
        container[key] = deepcopy(rng.choice(VALUES))
    elif kind < 0.75:
        del container[key]
    elif kind < 0.9 and isinstance(container, dict):
        container[rng.choice(KEYS)] = deepcopy(rng.choice(VALUES))
    elif isinstance(container, list):
        container.append(deepcopy(container[key]))
    else:
        container[key] = [container[key]]


def draw(rng):
    """A path and the bytes of a body."""
    path = rng.choice([*GOOD, "/v1/chat/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
    body = deepcopy(rng.choice(GOOD[path]))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        change(rng, body)
    content = json.dumps(body).encode()
    for _ in range(rng.choice((1, 2, 5)) if rng.random() < 0.15 else 0):
        at = rng.randrange(len(content) + 1)
        content = content[:at] + bytes(rng.choice((rng.randrange(256), *b'{}[]",:0')) for _ in range(rng.randrange(3))) + content[at + rng.randrange(3) :]
    return path, content


async def ask(app, path, content):
    """Status, content type and body."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
             "root_path": "", "query_string": b"", "client": None, "server": None, "headers": []}  # fmt: skip
    incoming, messages = [{"type": "http.request", "body": content, "more_body": False}], []

    async def receive():
        return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

    async def send(message):
        messages.append(message)

    await asyncio.wait_for(app(scope, receive, send), 60)
    assert not messages[-1].get("more_body"), "it has no end"
    headers = dict(messages[0]["headers"])
    return messages[0]["status"], headers[b"content-type"].decode(), b"".join(each.get("body", b"") for each in messages)


def check(path, content, status, kind, body):
    """Whether that is an answer: its form, its end."""
    assert status in (200, 400, 404), (status, body)
    if status != 200:
        error = json.loads(body)["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        return
    if kind.startswith("text/event-stream"):
        blocks = body.decode().split("\n\n")
        assert blocks.pop() == ""
        if path in ("/v1/chat/completions", "/v1/completions"):
            assert blocks.pop() == "data: [DONE]"
            events = [json.loads(block.removeprefix("data: ")) for block in blocks]
            if "error" in events[-1] and path == "/v1/completions":  # one of several prompts is wrong, another has begun
                assert events[-1]["error"]["type"] == "invalid_request_error" and len(json.loads(content)["prompt"]) > 1
                return
            ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
            assert len(ends) == len(set(ends))
            assert set(ends) == {choice["index"] for event in events for choice in event["choices"]}
            assert ends
        else:
            last = json.loads(blocks[-1].partition("data: ")[2])
            assert last["type"] in ("response.completed", "response.incomplete", "message_stop"), last
        return
    answer = json.loads(body)
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in answer["choices"])
        assert answer["choices"]
    elif path == "/v1/responses":
        assert answer["status"] in ("completed", "incomplete")
    elif path == "/v1/messages":
        assert answer["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")


async def fuzz(app, rng, count: int, at_a_time: int = 8) -> dict[int, int]:
    """How many answers there were by their status."""
    statuses: dict[int, int] = {}

    async def work():
        while sum(statuses.values()) < count:
            path, content = draw(rng)
            try:
                status, kind, body = await ask(app, path, content)
                check(path, content, status, kind, body)
            except Exception:
                print(f"POST {path} {content!r}", file=sys.stderr)
                raise
            statuses[status] = statuses.get(status, 0) + 1
            if sum(statuses.values()) % 5000 == 0:
                print(statuses, file=sys.stderr, flush=True)

    await asyncio.gather(*(work() for _ in range(at_a_time)))
    return statuses


def run(folder: Path, count: int, seed: int) -> dict[int, int]:
    rng = random.Random(seed)
    total: dict[int, int] = {}
    with LLM(folder, device="cpu", block_size=16, num_blocks=1500, max_num_seqs=16, max_model_len=MAX_MODEL_LEN, seed=0) as llm:
        for template in (QWEN3, CODER):
            server = Server(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], template))
            for status, number in asyncio.run(fuzz(make_app(server), rng, count // 2)).items():
                total[status] = total.get(status, 0) + number
            assert server.gate.num_inside == 0 and not len(llm._book) and llm.manager.stats()["used"] == 0
    return total


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(run(write_tool_model(Path(scratch)), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
