"""pagedkv serve when clients leave, are slow, are many, or send nonsense, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import extra_serve  # noqa: F401
import httpx
import pytest
import tiny_engine
from served import CHAT, COMPLETIONS, DEMO, ENGINE, CountingClient, events_of, model_of, serving, streamed, wait_for

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.serve.answers import Answers
from pagedkv.serve.errors import ApiError
from pagedkv.serve.gate import Gate

LONG = {"prompt": "1+1=", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, **ENGINE) as llm:
        yield llm


@pytest.fixture
def slow(llm):
    """The engine, whose steps take 20 ms more."""
    tiny_engine.slow(llm, 0.02)
    yield llm
    tiny_engine.full_speed(llm)


def is_idle(llm) -> bool:
    return not len(llm._book) and llm.manager.stats()["used"] == 0


# --- clients that leave or are slow


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("prompt", ["1+1=", ["1+1=", "2+2="]], ids=["one", "two"])
def test_a_client_that_leaves_ends_its_request(slow, is_stream, prompt):
    with serving(AsyncEngine(slow)) as (url, server):
        with httpx.Client(base_url=url) as http, pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json=LONG | {"prompt": prompt, "stream": False}, timeout=0.3)
        if is_stream:
            with httpx.Client(base_url=url) as http, http.stream("POST", COMPLETIONS, json=LONG | {"prompt": prompt, "stream": True}) as response:
                parts = response.iter_bytes()  # httpx closes the response with it
                assert next(parts).startswith(b"data: ")
                assert len(slow._book) > 0 and server.gate.num_inside > 0
        left = time.monotonic()
        wait_for(lambda: is_idle(slow))
        assert time.monotonic() - left < 1, "100 tokens take 2 s"
        wait_for(lambda: server.gate.num_inside == 0)


@pytest.mark.parametrize(("num_behind", "is_stream"), [(1, True), (1, False), (3, True)])
def test_requests_that_came_behind_one_another_end_with_their_client(is_stream, num_behind):
    """It sends some before the first is answered."""
    client = CountingClient(0.02)
    body = json.dumps({"prompt": "1", "max_tokens": 100, "stream": is_stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with serving(client, model_of()) as (url, server):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
            connection.sendall(head + body)
            wait_for(lambda: client.num_given >= 3)
            connection.sendall((head + body) * num_behind)
            if is_stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        left = time.monotonic()
        wait_for(lambda: client.num_running == 0 and server.gate.num_inside == 0)
        assert time.monotonic() - left < 1, "100 tokens take 2 s"
        time.sleep(0.2)
        assert client.num_running == 0, "nor do those behind begin"


def test_too_many_prompts_are_refused_before_they_are_prepared():
    """Hundreds of thousands of them fit into a body."""
    with pytest.raises(ApiError, match="asks for 4 answers"):
        Answers(None, Gate(3), ["1+1="] * 2, SamplingParams(temperature=1, n=2), lora_request=None, priority=0, salt=b"")


def test_a_slow_reader_finds_its_tokens_merged(llm):
    """Nothing waits for it, and what it has not taken is one piece."""
    params = SamplingParams(temperature=1, seed=5, max_tokens=90, ignore_eos=True, logprobs=1, n=2, output_kind=RequestOutputKind.DELTA)
    expected = llm.generate("1+1=", replace(params, output_kind=RequestOutputKind.FINAL_ONLY), use_tqdm=False)[0]

    async def main():
        answers = Answers(AsyncEngine(llm), Gate(2), ["1+1="], params, lora_request=None, priority=0, salt=b"")
        pieces = answers.pieces()
        first = await anext(pieces)
        while len(llm._book):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        rest = await anext(pieces)
        assert len(rest) == 2 and all(each.finish_reason == "length" for each in rest)
        for one in expected.outputs:
            both = [each for each in (*first, *rest) if each.index == one.index]
            assert "".join(each.text for each in both) == one.text
            assert [token for each in both for token in each.token_ids] == one.token_ids
            assert [of_ids for each in both for of_ids in each.logprobs] == one.logprobs
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)

    asyncio.run(main())


def test_more_than_it_takes_are_told_to_come_later():
    client = CountingClient(0.02)
    with serving(client, model_of(), max_answers=2) as (url, server), httpx.Client(base_url=url) as http:
        with http.stream("POST", COMPLETIONS, json={"prompt": ["1", "2"], "max_tokens": 100, "stream": True}) as response:
            parts = response.iter_bytes()
            assert next(parts)
            refused = http.post(COMPLETIONS, json={"prompt": "1", "max_tokens": 1})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        wait_for(lambda: server.gate.num_inside == 0 and client.num_running == 0)
        assert http.post(COMPLETIONS, json={"prompt": "1", "max_tokens": 1}).status_code == 200


# --- many


def test_many_clients_of_whom_some_leave_and_some_are_wrong(llm, seed):
    """64 requests of 8 clients: each good one is right, and nothing stays."""
    sums = [(a, b) for a in range(10, 18) for b in range(20, 28)]
    expected = llm.generate([f"{a}+{b}=" for a, b in sums], SamplingParams(temperature=0), use_tqdm=False)
    texts = [each.text for each in expected]
    rng = random.Random(seed)
    kinds = [rng.choice(("whole", "stream", "chat", "leave", "bad", "unknown")) for _ in sums]

    def ask(http, i):
        prompt, kind = f"{sums[i][0]}+{sums[i][1]}=", kinds[i]
        body = {"prompt": prompt, "max_tokens": 64}
        if kind == "whole":
            return http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        if kind == "stream":
            return streamed(http.post(COMPLETIONS, json=body | {"stream": True}))[0]["text"]
        if kind == "chat":
            chat = {"messages": [{"role": "user", "content": prompt}], "stream": True}
            return streamed(http.post(CHAT, json=chat))[0]["text"]
        if kind == "leave":
            with http.stream("POST", COMPLETIONS, json=body | {"stream": True, "ignore_eos": True}) as response:
                next(response.iter_bytes())
            return texts[i]
        headers = {"authorization": "Bearer wrong"} if kind == "unknown" else {}
        answer = http.post(COMPLETIONS, json={"prompt": [prompt, 1]}, headers=headers)
        assert answer.status_code == (401 if kind == "unknown" else 400) and answer.json()["error"]["message"]
        return texts[i]

    def client(url, k):
        with httpx.Client(base_url=url, headers={"authorization": "Bearer key"}, timeout=30) as http:
            return [ask(http, i) for i in range(k, 64, 8)]

    with serving(AsyncEngine(llm), api_keys=["key"]) as (url, server), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda k: client(url, k), range(8)))
        assert [answers[i % 8][i // 8] for i in range(64)] == texts
        wait_for(lambda: is_idle(llm) and server.gate.num_inside == 0)


# --- nonsense

VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**400, 0.5, -0.5, 1e300, "", "1", "1+1=", "a\u2603", "\x00", [], [0], [3, 4, 5],
    [-1], [2**40], ["1", "2"], [[3], [4]], [[]], [None], {}, {"a": 1}, {"3": 5}, {"include_usage": True}, [{}],
    [{"role": "user", "content": "1+1="}], [{"role": "user"}], [{"role": "user", "content": ["1"]}], [{"role": 1, "content": "1"}],
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
    "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "logit_bias", "ignore_eos", "priority",
    "cache_salt", "return_token_ids", "presence_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "user", "tools",
    "response_format", "echo", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "input", "tokens",
    "encoding_format", "skip_special_tokens", "include_stop_str_in_output", "nonsense",
)  # fmt: skip
GOOD = {
    COMPLETIONS: {"prompt": "1+1="}, CHAT: {"messages": [{"role": "user", "content": "1+1="}]},
    "/tokenize": {"prompt": "1+1="}, "/detokenize": {"tokens": [3]}, "/v1/embeddings": {"input": "1"},
}  # fmt: skip


def test_nonsense_is_refused_or_answered(llm, seed):
    """300 bodies: never a failure of the server, and an answer has the form of one."""
    rng = random.Random(seed)
    count = {200: 0, 400: 0, 404: 0}
    with serving(AsyncEngine(llm)) as (url, server), httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(300):
            path = rng.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, *GOOD))
            body = dict(GOOD[path]) | {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))}
            content = json.dumps(body).encode()
            if rng.random() < 0.1:
                at = rng.randrange(len(content))
                content = content[:at] + bytes([rng.randrange(256)]) + content[at + rng.randrange(3) :]
            response = http.post(path, content=content)
            assert response.status_code in count, (path, content, response.text)
            count[response.status_code] += 1
            if response.status_code != 200:
                assert response.json()["error"]["message"], (path, content)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert all("error" not in each for each in events_of(response.text)), (path, content)
                assert all(each["finish_reason"] for each in streamed(response).values())
            elif path in (COMPLETIONS, CHAT):
                assert all(each["finish_reason"] in ("stop", "length") for each in response.json()["choices"])
        wait_for(lambda: is_idle(llm) and server.gate.num_inside == 0)
    assert count[200] > 30 and count[400] > 100, count


# --- the end


def test_a_silent_stream_gets_comments():
    """Before the first token and between two; whole answers and streams that go on have none."""
    for is_stream, interval in ((True, 0.05), (False, 0.05), (True, 20)):
        with serving(CountingClient(0.2), model_of(), keep_alive=interval) as (url, _):
            body = {"prompt": "1", "max_tokens": 3, "stream": is_stream}
            events = httpx.post(url + COMPLETIONS, json=body, timeout=20).text.split("\n\n")
            comments = [event for event in events if event.startswith(":")]
            assert set(comments) <= {": keep-alive"} and bool(comments) == (is_stream and interval < 1)
            if comments:
                after_a_token = [events[i + 1] for i, event in enumerate(events) if event.startswith("data: {")]
                assert events[0] == ": keep-alive" in after_a_token
                assert len(events_of("\n\n".join(event for event in events if event not in comments))) == 3


def test_an_error_after_a_comment_is_an_event():
    class Failing(CountingClient):
        async def generate(self, *args, **options):
            await asyncio.sleep(0.2)
            raise ValueError("prompt: it is not to be")
            yield

    with serving(Failing(), model_of(), keep_alive=0.05) as (url, _):
        response = httpx.post(url + COMPLETIONS, json={"prompt": "1", "stream": True})
        events = [event for event in response.text.split("\n\n") if event]
        assert response.status_code == 200 and set(events[:-2]) == {": keep-alive"} and events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "prompt: it is not to be"
        assert httpx.post(url + COMPLETIONS, json={"prompt": "1"}).status_code == 400


@pytest.mark.parametrize("head", ["", "connection: keep-alive\r\n"])
def test_http_1_0(head):
    """No chunks: a stream ends with the connection."""
    with serving(CountingClient(), model_of()) as (url, _):
        for stream in (False, True):
            body = json.dumps({"prompt": "1", "max_tokens": 5, "stream": stream}).encode()
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(f"POST {COMPLETIONS} HTTP/1.0\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            start, _, content = answer.partition(b"\r\n\r\n")
            assert b"200" in start and b"chunked" not in start.lower() and b"connection: close" in start.lower()
            if stream:
                assert "".join(event["choices"][0]["text"] for event in events_of(content.decode())) == "01234"
            else:
                assert json.loads(content)["choices"][0]["text"] == "01234"


def test_an_engine_that_has_ended():
    client = CountingClient()
    with LLM(DEMO, **ENGINE) as llm:
        engine = AsyncEngine(llm)
        with serving(engine) as (url, _), httpx.Client(base_url=url) as http:
            assert http.get("/health").status_code == 200
            llm.close()
            assert http.get("/health").status_code == 503 and "is closed" in http.get("/health").json()["error"]["message"]
            for more in ({}, {"stream": True}):
                refused = http.post(COMPLETIONS, json=LONG | more)
                assert refused.status_code == 503 and refused.json()["error"]["type"] == "service_unavailable_error"
    with serving(client, model_of()) as (url, server):
        server.is_draining = True
        assert httpx.get(f"{url}/health").status_code == 503


def test_idle_busy_and_stuck_are_different_and_a_queue_has_an_end():
    client = CountingClient()
    with serving(client, model_of(), stuck_after=60, max_waiting=3) as (url, _), httpx.Client(base_url=url) as http:
        for seconds, status, text in ((None, 200, '"idle"'), (0.5, 200, '"busy"'), (59.0, 200, "59.0"), (61.0, 503, "stuck: a step has taken 61 s")):
            client.step_seconds = seconds
            answer = http.get("/health")
            assert answer.status_code == status and text in answer.text
            assert f'pagedkv:step_in_work_seconds{{model_name="demo"}} {seconds or 0.0}' in http.get("/metrics").text
        for waiting, status in ((3, 200), (4, 429)):
            client.num_waiting = waiting
            for more in ({}, {"stream": True}):
                assert http.post(COMPLETIONS, json={"prompt": "1", "max_tokens": 1} | more).status_code == status
        client.is_closed = True
        assert http.get("/health").status_code == 503
        assert 'pagedkv:step_in_work_seconds{model_name="demo"} +Inf' in http.get("/metrics").text


def test_ids_of_requests_come_back_where_a_header_may_hold_them():
    with serving(CountingClient(), model_of()) as (url, _), httpx.Client(base_url=url) as http:
        body = {"prompt": "1", "max_tokens": 1}
        for given, shown in ((b"abc-1", True), (b"", True), (b"x" * 200, True), (b"x" * 201, False), (b"a\tb", False), (b"\xff", False)):
            for more in ({}, {"stream": True}, {"prompt": 1}):
                headers = http.post(COMPLETIONS, json=body | more, headers={"x-request-id": given}).headers
                assert headers.get("x-request-id") == (given.decode() if shown else None), given
        assert "x-request-id" not in http.post(COMPLETIONS, json=body).headers


def test_an_engine_that_ends_within_an_answer(slow):
    with serving(AsyncEngine(slow)) as (url, _), httpx.Client(base_url=url) as http:
        whole = ThreadPoolExecutor(1).submit(http.post, COMPLETIONS, json=LONG)
        with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            parts = response.iter_text()
            text = next(parts)
            for request in slow._book.requests:
                slow.abort(request.id)
            *_, last = events_of(text + "".join(parts))
        assert last["error"]["type"] == "service_unavailable_error"
        assert whole.result().status_code == 503


@contextmanager
def started(*command: str):
    """A server of its own process."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


SLOW_SERVER = """
import sys; sys.path.insert(0, {tests!r})
from served import CountingClient, model_of
from pagedkv.serve.app import make_app
from pagedkv.serve.lifecycle import Lifecycle, addresses_of, bind
from pagedkv.serve.server import Server
client = CountingClient(0.02)
server = Server(client, model_of())
listeners = bind("127.0.0.1", 0)
print("at", addresses_of(listeners, "http"), flush=True)
Lifecycle(server, make_app(server)).run(listeners)
print("running:", client.num_running, "given:", client.num_given, flush=True)
"""


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_drains_and_a_second_one_stops(num_signals):
    code = SLOW_SERVER.format(tests=os.path.dirname(__file__))
    with started("-c", code) as process:
        url = process.stdout.readline().split()[1]
        with httpx.Client(timeout=20) as http, http.stream("POST", url + COMPLETIONS, json={"prompt": "1", "max_tokens": 50, "stream": True}) as response:
            parts = response.iter_text()
            text = next(parts)
            for _ in range(num_signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.15)
            if num_signals == 1:
                (choice,) = streamed(httpx.Response(200, text=text + "".join(parts))).values()
                assert choice["text"] == "0123456789" * 5 and choice["finish_reason"] == "length"
            else:
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    list(parts)
        out, _ = process.communicate(timeout=20)
        given = int(out.split()[-1])
        assert process.returncode == 0 and out.startswith("running: 0") and (given == 50) == (num_signals == 1), out
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")


def test_the_command(tmp_path):
    """Over a Unix socket, with options of the engine."""
    socket = tmp_path / "socket"
    command = ["-m", "pagedkv", "serve", str(DEMO), "--uds", str(socket), "--device", "cpu", "--num-blocks", "9", "--api-key", "k"]
    with started(*command, "--served-model-name", "one", "--served-model-name", "two") as process:
        assert process.stdout.readline() == f"pagedkv serve: unix:{socket} serves one\n"
        headers = {"authorization": "Bearer k"}
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://x", headers=headers) as http:
            found = http.post(COMPLETIONS, json={"prompt": "473+89=", "model": "two"}).json()
            assert (found["model"], found["choices"][0]["text"]) == ("two", "562")
            assert "chat template" in http.post(CHAT, json={"messages": [{"role": "user", "content": "1"}]}).json()["error"]["message"]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
