"""pagedkv serve: requests that are wrong say why, and who may ask."""

from __future__ import annotations

import gzip
import re
import socket
import time

import extra_serve  # noqa: F401
import httpx
import pytest
from served import CHAT, COMPLETIONS, DEMO, ENGINE, CountingClient, model_of, post, serving

from pagedkv import AsyncEngine


@pytest.fixture(scope="module")
def http():
    engine = AsyncEngine(DEMO, **ENGINE)
    with serving(engine) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        yield http
    engine.close()


MESSAGES = [{"role": "user", "content": "1+1="}]
REFUSED = [
    (COMPLETIONS, {"prompt": "1", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (COMPLETIONS, {"prompt": "1", "temperature": -1}, "temperature", "temperature is -1.0"),
    (COMPLETIONS, {"prompt": "1", "temperature": "hot"}, "temperature", "Expected `float"),
    (COMPLETIONS, {"prompt": "1", "n": True}, "n", "Expected `int"),
    (COMPLETIONS, {"prompt": "1", "n": 2, "temperature": 0}, "n", "all answers are the same"),
    (COMPLETIONS, {"prompt": "1", "n": 5000, "temperature": 1}, None, "takes 1024 at a time"),
    (COMPLETIONS, {"prompt": ["1"] * 5000}, None, "asks for 5000 answers"),
    (COMPLETIONS, {"prompt": "1", "stop": ["1"] * 1025}, "stop", "stop has 1,025 entries but may have 1,024"),
    (COMPLETIONS, {"prompt": "1", "bad_words": ["1"] * 1025}, "bad_words", "bad_words has 1,025 entries"),
    (COMPLETIONS, {"prompt": "1", "allowed_token_ids": [1] * 17}, "allowed_token_ids", "has 17 entries but may have 16"),
    (COMPLETIONS, {"prompt": "1", "stop_token_ids": [1] * 17}, "stop_token_ids", "has 17 entries but may have 16"),
    (COMPLETIONS, {"prompt": "1", "logit_bias": {str(i): 1 for i in range(17)}}, "logit_bias", "has 17 entries but may have 16"),
    (COMPLETIONS, {"prompt": "1", "logprobs": 21}, "logprobs", "at most 20"),
    (COMPLETIONS, {"prompt": "1", "seed": 2**63}, "seed", "seed is"),
    (COMPLETIONS, {"prompt": "1", "stop": [""]}, "stop", "is empty"),
    (COMPLETIONS, {"prompt": "1", "logit_bias": {"99": 1}}, "logit_bias", "not in 0..15"),
    (COMPLETIONS, {"prompt": "1", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias: Expected `int`"),
    (COMPLETIONS, {"prompt": "1", "priority": 2**40}, "priority", "priority is"),
    (COMPLETIONS, {"prompt": "1", "stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    (COMPLETIONS, {"prompt": "1", "stream": True, "stream_options": {"include_use": 1}}, "stream_options.include_use", "include_usage"),
    (CHAT, {"messages": MESSAGES, "echo": True}, "echo", "not served"),
    (COMPLETIONS, {}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": ""}, None, "the prompt is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [1, "1"]}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [1, 16]}, None, "token id 16"),
    (COMPLETIONS, {"prompt": "1" * 200}, None, "200 prompt tokens"),
    (COMPLETIONS, {"prompt": ["1+1=", ""]}, "prompt", "prompt[1]: the prompt is empty"),
    (COMPLETIONS, {"prompt": [[1], [3], [16]]}, "prompt", "prompt[2]: token id 16"),
    (COMPLETIONS, {"prompt": ["1", "2"], "logit_bias": {"99": 1}}, "logit_bias", "logit_bias holds token id 99"),
    (COMPLETIONS, {"prompt": "1", "logit_bias": {"3": 1, "-1": 1}}, "logit_bias", "logit_bias.keys[1] is -1 but must be at least 0"),
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": [{"content": "1"}]}, "messages", "messages[0]: role is None"),
    (CHAT, {"messages": [{"role": "user", "content": {"type": "text", "text": "1"}}]}, "messages", "messages[0]: content is of type 'dict'"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages", "messages[1]: content is of type 'int'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages", "only text"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "tools[0] has no function"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format", "must be one of text, json_object, json_schema"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21 but"),
    (CHAT, {"messages": MESSAGES, "max_tokens": -3}, "max_tokens", "max_tokens is -3"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": -3}, "max_completion_tokens", "max_completion_tokens is -3"),
    ("/v1/responses", {"input": "x", "max_output_tokens": -3}, "max_output_tokens", "max_output_tokens is -3"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 3, "max_tokens": 2}, "max_output_tokens", "max_tokens is 2 but max_output_tokens is 3"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "x"}}}, "text", "text.format.type is 'x'"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "max_tokens is 2"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs", "'template'"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "'messages'"),
    (CHAT, {"messages": MESSAGES, "chat_template": "x"}, "chat_template", "not served"),
    ("/v1/responses", {"input": "x", "top_logprobs": 2}, "top_logprobs", "top_logprobs is not served"),
    ("/tokenize", {}, "prompt", "one of the two"),
    ("/detokenize", {"tokens": [16]}, "tokens", "not in 0..15"),
    ("/detokenize", {"tokens": [10**30]}, "tokens", "not in 0..15"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_wrong_is_named(http, path, body, param, text):
    error = post(http, path, 400, **body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert text in error["message"] and error["param"] == param
    if path in (COMPLETIONS, CHAT) and "stream" not in body and "stream_options" not in body:
        assert post(http, path, 400, **body | {"stream": True})["error"] == error


def test_bodies_that_are_no_requests(http):
    for content in (
        b"", b"{", b"[]", b'"a"', b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000,
        b'{"a":' * 50_000,
    ):
        response = http.post(COMPLETIONS, content=content)
        assert response.status_code == 400 and "the body is no JSON" in response.json()["error"]["message"]


def test_a_prompt_that_is_too_long_has_a_code(http):
    """Agents shorten their prompts when they see it."""
    for path, body in ((COMPLETIONS, {"prompt": "1" * 128}), (CHAT, {"messages": [{"role": "user", "content": "1" * 200}]})):
        error = post(http, path, 400, **body)["error"]
        assert error["code"] == "context_length_exceeded" and "max_model_len=128" in error["message"]
    assert post(http, COMPLETIONS, 400, prompt="")["error"]["code"] is None
    body = {"messages": [{"role": "user", "content": "1" * 200}], "max_tokens": 3}
    assert post(http, "/v1/messages", 400, **body)["error"]["message"].startswith("prompt is too long: 200 prompt tokens")


def test_other_paths_models_and_methods(http):
    assert post(http, COMPLETIONS + "/", 404, prompt="1")["error"]["type"] == "not_found_error"  # no redirect
    assert post(http, COMPLETIONS, 404, prompt="1", model="gpt")["error"]["code"] == "model_not_found"
    assert post(http, COMPLETIONS, prompt="1+1=", model="demo")["model"] == "demo"
    assert post(http, "/v1/nothing", 404)["error"]["type"] == "not_found_error"
    assert http.get(COMPLETIONS).status_code == 405 and "POST" in http.get(COMPLETIONS).headers["allow"]
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "demo" and model["max_model_len"] == 128 and http.get("/v1/models/demo").json() == model
    assert http.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_fields_without_effect_are_told(http):
    plain, told = (http.post(CHAT, json={"messages": MESSAGES} | more) for more in ({}, {"user": "me", "store": True}))
    assert told.headers["x-pagedkv-warning"] == "without effect: user, store" and "x-pagedkv-warning" not in plain.headers
    assert plain.json()["choices"] == told.json()["choices"]
    nothing = {"tools": [], "tool_choice": "none", "top_logprobs": 0, "response_format": {"type": "text"}, "echo": None}
    assert "x-pagedkv-warning" not in http.post(CHAT, json={"messages": MESSAGES} | nothing).headers


@pytest.mark.parametrize("start", [
    b"GET /version HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nname: ", b"GET /",
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nname: ",  # after the body
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;",
])  # fmt: skip
def test_a_head_without_end(start):
    """Takes no memory: the connection ends, whether it is one long header or many."""
    header = b"a" * 4096 if start.endswith((b" ", b"/", b";")) else b"name: " + b"a" * 4088 + b"\r\n"
    with serving(CountingClient(), model_of()) as (url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(start)
            with pytest.raises(ConnectionError):
                for _ in range(4096):  # 16 MiB
                    client.sendall(header)
                    time.sleep(0)


def test_a_large_head_and_a_body_in_small_parts(http):
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=20) as client:
        body = b'{"prompt": "1+1="' + b" " * 20_000 + b"}"
        client.sendall(b"POST /tokenize HTTP/1.1\r\nname: " + b"a" * 50_000 + b"\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("cut", ["nowhere", "behind the head", "everywhere"])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_passed_over(http, upgrade, cut):
    """As Java's client makes it for HTTP/2: the body counts, and so does what comes after it."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    body = b'{"prompt": "1+1="}'
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    asked += head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    asked += head.replace(b"POST /tokenize", b"GET /version") + b"\r\n" + b"GET /none HTTP/1.1\r\nConnection: close\r\n\r\n"
    end = asked.index(b"{")
    parts = {"nowhere": [asked], "behind the head": [asked[:end], asked[end:]]}.get(cut) or [bytes([byte]) for byte in asked]
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
            time.sleep(0.05 if cut == "behind the head" else 0)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"200", b"404"], answer
    assert answer.count(b'{"count":4,"max_model_len":') == 2 and answer.count(b'"version"') == 1


def test_a_compressed_body(http):
    answer = http.post("/tokenize", content=gzip.compress(b'{"prompt": "1"}'), headers={"content-encoding": "gzip"})
    assert answer.status_code == 400 and "content-encoding 'gzip', which is not read" in answer.json()["error"]["message"]
    assert http.post("/tokenize", json={"prompt": "1"}, headers={"content-encoding": "Identity"}).status_code == 200


def test_keys_origins_and_sizes():
    options = {"api_keys": ["one", "two"], "origins": ["https://here.example"], "max_body_size": 1000}
    with serving(CountingClient(), model_of(), **options) as (url, _), httpx.Client(base_url=url) as http:
        body = {"prompt": "1", "max_tokens": 3}
        for header in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}, {"authorization": "Bearer \xff"}, {"authorization": "Bearer"}):
            refused = http.post(COMPLETIONS, json=body, headers={k: v.encode("latin-1") for k, v in header.items()})
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "two"):
            answer = http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.json()["choices"][0]["text"] == "012"
        key = {"authorization": "Bearer one"}
        told = http.post(COMPLETIONS, json=body | {"user": "me"}, headers=key | {"origin": "https://here.example", "x-request-id": "7"}).headers
        assert told["x-request-id"] == "7" and "user" in told["x-pagedkv-warning"]
        assert set(told["access-control-expose-headers"].split(", ")) == {"x-request-id", "x-pagedkv-warning", "retry-after"}
        assert [http.get(path).status_code for path in ("/health", "/metrics", "/version", "/v1/models")] == [200, 200, 200, 401]
        large = http.post(COMPLETIONS, json={"prompt": "1" * 1000}, headers=key)
        assert large.status_code == 413 and "1,000 bytes" in large.json()["error"]["message"]
        asked = {"origin": "https://here.example", "access-control-request-method": "POST"}
        allowed = http.options(COMPLETIONS, headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://here.example"
        assert http.options(COMPLETIONS, headers=asked | {"origin": "https://there.example"}).status_code == 400
