"""A server in a thread of the test, over any EngineClient, and clients that stand in for an engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

import pagedkv
from pagedkv import SamplingParams
from pagedkv.engine.outputs import CompletionOutput, EngineCounters, EngineStats, RequestMetrics, RequestOutput
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.engine.text.tokenizer import Tokenizer
from pagedkv.serve.app import make_app
from pagedkv.serve.lifecycle import Lifecycle, addresses_of, bind
from pagedkv.serve.model import ServedModel
from pagedkv.serve.server import Server

DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
ENGINE = {"device": "cpu", "block_size": 4, "num_blocks": 400, "max_num_seqs": 16, "seed": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ more }}"


def model_of(folder: Path = DEMO) -> ServedModel:
    """For clients that are no engine."""
    return ServedModel(["demo"], folder, Tokenizer(folder), SamplingParams(temperature=0), 128, 16, TEMPLATE)


def write_long_model(folder: Path, length: int) -> Path:
    """The demo model, whose answers may be long."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    return folder


@contextmanager
def serving(client, model=None, *, api_keys=(), origins=(), with_page=True, with_admin=False, host="127.0.0.1", **limits):
    """The address of a server, and the Server."""
    server = Server(client, model or ServedModel.of_engine(client.engine, ["demo"], TEMPLATE), **limits)
    how = {"api_keys": api_keys, "origins": origins, "with_page": with_page, "with_admin": with_admin}
    app, listeners = make_app(server, **how), bind(host, 0)
    life = Lifecycle(server, app)
    address = addresses_of(listeners, "http")
    thread = threading.Thread(target=life.run, args=(listeners,))
    thread.start()
    try:
        wait_for(lambda: life.started or not thread.is_alive())
        yield address, server
    finally:
        life.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def post(http, path, status=200, **body):
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def wait_for(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def events_of(text: str) -> list[dict]:
    """Of a body of server-sent events."""
    lines = text.split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]", text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def streamed(response: httpx.Response) -> dict[int, dict]:
    """The choices of a stream, put together: text, token_ids, logprobs, finish_reason."""
    assert response.status_code == 200, response.text
    choices: dict[int, dict] = {}
    for chunk in events_of(response.text):
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": []})
            whole["text"] += choice.get("text", choice.get("delta", {}).get("content")) or ""
            whole["token_ids"] += choice.get("token_ids", ())
            if choice["logprobs"]:
                whole["logprobs"].append(choice["logprobs"])
            assert whole.get("finish_reason") is None, "nothing follows the end"
            whole["finish_reason"] = choice["finish_reason"]
    return choices


class CountingClient:
    """Says "0", "1", ... in steps of `seconds`, as many as max_tokens; counts requests that have not ended."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.num_running, self.num_given = seconds, 0, 0
        self.is_closed, self.step_seconds, self.num_waiting = False, None, 0

    async def generate(self, prompt, params=None, request_id=None, *, lora_request=None, priority=0, salt=b""):
        self.num_running += 1
        try:
            is_stream = params.output_kind is RequestOutputKind.DELTA
            text, ids = "", []
            for i in range(params.max_tokens):
                await asyncio.sleep(self.seconds)
                self.num_given += 1
                is_last = i == params.max_tokens - 1
                text, ids = text + str(i % 10), [*ids, 3 + i % 10]
                if is_stream or is_last:
                    one = CompletionOutput(0, text, ids, None, None, "length" if is_last else None, None)
                    yield RequestOutput("0", None, [3], None, [one], is_last, None, 0, RequestMetrics(0.0, 0.0, 0.0, 0))
                    text, ids = "", []
        finally:
            self.num_running -= 1

    def stats(self) -> EngineStats:
        pool = {"used": 0, "num_blocks": 1, "lookup_tokens": 0, "hit_tokens": 0}
        return EngineStats(self.num_running, self.num_waiting, 0, 0, EngineCounters(), pool, {}, {}, {})

    def health(self) -> float | None:
        if self.is_closed:
            raise RuntimeError("this client is closed")
        return self.step_seconds
