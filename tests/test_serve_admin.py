"""The server's paths for training loops: behind a flag, by query and by body, through the engine's process and in this one."""

from __future__ import annotations

import asyncio
import shutil
import threading

import extra_serve  # noqa: F401
import httpx
import numpy as np
import pytest
from checkpoints import safetensors_bytes
from served import COMPLETIONS, DEMO, ENGINE, serving, wait_for, write_long_model
from test_serve_processes import server, stop
from test_serve_remote import connected

from pagedkv import LLM, AsyncEngine, SamplingParams, ops
from pagedkv.engine.control import CALLS
from pagedkv.models.update import read_files
from pagedkv.serve.admin import ROUTES

SUM = {"prompt": "473+89=", "max_tokens": 8, "temperature": 0}
RIGHT = "562"
LONG = {"prompt": "1+1=", "max_tokens": 1500, "ignore_eos": True}  # for a second


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The demo model with a head of which one row is the greatest: it says the same token again and again."""
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("other") / "model")
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(other_weights())
    return folder


def other_weights() -> bytes:
    tensors = {name: ops.asarray(tensor, "float32").numpy() for name, tensor in read_files(DEMO).items()}
    tensors["model.norm.weight"] = np.zeros_like(tensors["model.norm.weight"])  # all logits are 0: the token 0
    return safetensors_bytes(tensors)


@pytest.fixture
def http():
    """A client of a server in this process."""
    client = AsyncEngine(DEMO, dtype="float32", **ENGINE)
    with serving(client, with_admin=True) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        yield http
    client.close()


def version_of(http) -> int | str:
    """Of the weights that an answer was computed with, as it says itself."""
    found = told(http.post(COMPLETIONS, json=SUM | {"return_token_ids": True}))["choices"][0]["weight_version"]
    assert {"weight_version": found} == told(http.get("/weight_version"))
    return found


def answer(http) -> str:
    response = http.post(COMPLETIONS, json=SUM)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def told(response, status=200):
    assert response.status_code == status, response.text
    return response.json()


def test_behind_a_flag_and_a_key():
    client = AsyncEngine(DEMO, **ENGINE)
    with serving(client) as (url, _):
        for method, path, _ in ROUTES:
            assert httpx.request(method, url + path).status_code == 404, path
    with serving(client, with_admin=True, api_keys=("secret",)) as (url, _):
        for method, path, _ in ROUTES:
            assert httpx.request(method, url + path).status_code == 401, path
        assert told(httpx.get(url + "/is_sleeping", headers={"authorization": "Bearer secret"})) == {"is_sleeping": False}
        assert httpx.get(url + "/sleep", headers={"authorization": "Bearer secret"}).status_code == 405
        client.close()
        ended = told(httpx.post(url + "/pause", headers={"authorization": "Bearer secret"}), 503)["error"]
        assert ended["type"] == "service_unavailable_error" and "is closed" in ended["message"]


@pytest.mark.parametrize("as_body", [False, True], ids=["query", "body"])
def test_sleep_and_wake(http, as_body, other):
    def post(path, **options):
        return told(http.post(path, json=options) if as_body else http.post(path, params=options))

    assert answer(http) == RIGHT
    assert post("/sleep", level=1, mode="wait") == {"is_sleeping": True} == told(http.get("/is_sleeping"))
    assert post("/wake_up", tags=["weights"]) == {"is_sleeping": True}
    assert post("/wake_up", tags=["kv_cache", "weights"]) == {"is_sleeping": False}
    assert answer(http) == RIGHT
    post("/sleep", level=2)
    assert "asleep: call wake_up(['weights']) first" in told(http.post("/update_weights", json={"path": str(DEMO)}), 409)["error"]["message"]
    assert post("/wake_up") == {"is_sleeping": True}
    assert told(http.post("/update_weights", json={"path": str(other)})) == {"weight_version": 1}
    assert answer(http) != RIGHT
    assert post("/reset_prefix_cache")["num_pages"] > 0 and post("/reset_prefix_cache") == {"num_pages": 0}


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    folder = write_long_model(tmp_path_factory.mktemp("long") / "model", 5000)
    client = AsyncEngine(folder, dtype="float32", **ENGINE | {"num_blocks": 3000})
    with serving(client, with_admin=True) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        yield client, http
    client.close()


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pause(endless, mode):
    """One that is there, and one that comes meanwhile."""
    client, http = endless
    found = {}

    def ask(name: str, body) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.update({name: http.post(COMPLETIONS, json=body).json()}))
        thread.start()
        return thread

    threads = [ask("old", LONG)]
    wait_for(lambda: client.stats().num_running)
    assert told(http.post("/pause", params={"mode": mode}))["is_paused"] and told(http.get("/is_paused"))["is_paused"]
    threads.append(ask("new", SUM))
    threads[0].join(0 if mode == "keep" else 20)
    assert not told(http.post("/resume"))["is_paused"]
    for thread in threads:
        thread.join(20)
    assert found["new"]["choices"][0]["text"] == RIGHT
    if mode == "abort":
        (choice,) = found["old"]["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < found["old"]["usage"]["completion_tokens"] < 1500 and choice["text"]
    else:
        assert found["old"]["usage"]["completion_tokens"] == 1500


def test_new_weights(http, other):
    """From a folder, a file, and the body, with versions."""
    for given, expected in (
        ({"json": {"path": str(other)}}, 1),
        ({"json": {"path": str(DEMO), "weight_version": "second"}}, "second"),
        ({"content": other_weights(), "params": {"weight_version": "3"}, "headers": {"content-type": "application/octet-stream"}}, 3),
        ({"json": {"path": str(next(DEMO.glob("*.safetensors")))}}, 4),
    ):
        before = answer(http)
        assert told(http.post("/update_weights", **given)) == {"weight_version": expected} == told(http.get("/weight_version"))
        assert answer(http) != before and version_of(http) == expected
    assert answer(http) == RIGHT
    assert told(http.post("/update_weight_version", json={"weight_version": "x"})) == {"weight_version": "x"}
    assert told(http.get("/weight_version")) == {"weight_version": "x"}


def test_a_pause_by_vllms_other_options(http):
    answer(http)
    assert told(http.post("/pause", params={"wait_for_inflight_requests": "true", "clear_cache": "True"}))["is_paused"]
    assert told(http.post("/reset_prefix_cache")) == {"num_pages": 0}
    told(http.post("/resume"))
    answer(http)
    assert told(http.post("/pause", json={"mode": "keep", "clear_cache": False}))["is_paused"]
    assert told(http.post("/reset_prefix_cache"))["num_pages"] > 0
    told(http.post("/resume"))


def test_new_weights_in_parts(http):
    """By vLLM's three calls. An answer waits for the last one."""
    parts = [safetensors_bytes({name: ops.asarray(tensor, "float32").numpy()}) for name, tensor in read_files(DEMO).items()]
    assert told(http.post("/start_weight_update", json={"is_checkpoint_format": True})) == {"status": "started"}
    for part in parts:
        told(http.post("/update_weights", content=part, headers={"content-type": "application/octet-stream"}))
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json=SUM, timeout=0.2)
    assert told(http.post("/finish_weight_update", params={"weight_version": 5})) == {"weight_version": 5}
    assert answer(http) == RIGHT and version_of(http) == 5
    told(http.post("/finish_weight_update"), 409)


BAD = [
    ("/sleep", {"level": 3}, "level is 3 but must be 1 or 2"), ("/sleep", {"level": "deep"}, "level is 'deep' but must be an integer"),
    ("/sleep", {"levl": 1}, "levl is no option of this path; it has level, mode"), ("/pause", {"mode": "now"}, "mode is 'now' but"),
    ("/pause", {"mode": 3}, "mode is 3 but must be a text"), ("/pause", {"clear_cache": 1}, "clear_cache is 1 but must be true or false"),
    ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format is False but must be true"),
    ("/finish_weight_update", {"version": 1}, "version is no option of this path; it has weight_version"),
    ("/wake_up", {"tags": ["all"]}, "tags is ['all'] but must be None or a list of weights and kv_cache"),
    ("/wake_up", {"tags": 1}, "tags is 1 but must be a list"), ("/update_weights", {}, "tensors or broadcast must be given"),
    ("/update_weights", {"path": 3}, "path is 3 but must be a text"), ("/update_weights", {"path": "/nowhere"}, "No such file"),
    ("/update_weights", {"path": "x", "weight_version": 1.5}, "weight_version is 1.5 but must be an integer or a text"),
    ("/update_weights", {"update_info": {"names": []}}, "update_info is no option of this path; it has path, tensors, broadcast"), ("/update_weight_version", {}, "weight_version is None but"),
    ("/update_weights", {"path": __file__}, "safetensors"), ("/update_weights", {"path": "x", "tensors": []}, "and one of them"),
    ("/update_weights", {"tensors": [{"name": "x"}]}, "but must hold objects with name, dtype, shape and handle in base64"),
    ("/update_weights", {"tensors": [{"name": "x", "dtype": "bfloat16", "shape": [1], "handle": "AA=="}]}, ""),  # this machine may have no GPU
]  # fmt: skip


def test_bad_options(http):
    for path, body, message in BAD:
        error = told(http.post(path, json=body), 400)["error"]
        assert message in error["message"] and error["type"] == "invalid_request_error", (path, body, error)
    for content in (b"{", b"[]", b"\xff", b"3", b"[" * 100_000):
        assert "the body is no JSON" in told(http.post("/sleep", content=content), 400)["error"]["message"]
    headers = {"content-type": "application/octet-stream"}
    for content in (b"", b"no safetensors", safetensors_bytes({"x": np.zeros(3, np.float32)})):
        told(http.post("/update_weights", content=content, headers=headers), 400)
    assert answer(http) == RIGHT and told(http.get("/weight_version")) == {"weight_version": 0}


def test_through_the_engines_process(other):
    """As it is started, with two front ends, which are told the same."""
    keys = ["--api-key", "k", "--enable-admin", "--front-ends", "2"]
    with server(DEMO, *keys) as processes:
        with httpx.Client(base_url=processes.url, headers={"authorization": "Bearer k"}, timeout=30) as http:
            assert httpx.post(f"{processes.url}/sleep").status_code == 401
            assert answer(http) == RIGHT
            told(http.post("/sleep?level=2"))
            assert told(http.get("/is_sleeping")) == {"is_sleeping": True}
            told(http.post("/wake_up?tags=weights"))
            content = {"content": other_weights(), "headers": {"content-type": "application/octet-stream"}}
            assert told(http.post("/update_weights?weight_version=step-7", **content)) == {"weight_version": "step-7"}
            assert told(http.post("/wake_up?tags=kv_cache")) == {"is_sleeping": False}
            assert answer(http) != RIGHT
            told(http.post("/update_weights", json={"path": str(DEMO), "weight_version": 8}))
            assert answer(http) == RIGHT
            told(http.post("/update_weights", json={"path": "/nowhere"}), 400)
            told(http.post("/pause"))
            told(http.post("/resume"))
        stop(processes)


def test_a_client_of_another_process(other):
    """All calls, and the version in its outputs."""

    async def main() -> None:
        with LLM(DEMO, dtype="float32", **ENGINE) as llm:
            async with connected(llm) as (client,):
                params = SamplingParams(temperature=0, max_tokens=4)

                async def version():
                    async for output in client.generate("1+1=", params):
                        found = output.weight_version
                    return found

                assert await version() == 0
                assert await client.update_weights(str(other), weight_version="a") == "a" == await version()
                with pytest.raises(TypeError, match="the engine is in another process: give a path, or IpcTensors"):
                    await client.update_weights({})
                with pytest.raises(ValueError, match="level is 9"):
                    await client.sleep(9)
                with pytest.raises(ValueError, match="name is 'close' but must be one of sleep"):
                    await client.control("close")
                await client.pause("keep")
                assert await client.is_paused() and not await client.is_sleeping()
                await client.sleep(1)
                await client.resume()
                await client.wake_up()
                await client.update_weight_version(5)
                assert await client.get_weight_version() == 5 == await version()
                assert await client.reset_prefix_cache() >= 0
                assert {"pause", "sleep"} < set(CALLS)

    asyncio.run(main())
