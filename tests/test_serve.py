"""pagedkv serve over HTTP: answers are those of the engine, whole and streamed."""

from __future__ import annotations

import base64
import codecs
import json
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import extra_serve  # noqa: F401
import httpx
import numpy as np
import pytest
import tool_models
from checkpoints import write_model
from lora_adapters import write_adapter
from served import CHAT, COMPLETIONS, DEMO, ENGINE, events_of, post, serving, streamed
from test_family_tokenizers import write
from tool_models import saying, write_tool_model

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.cli import command_line
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.serve import schema
from pagedkv.serve.lifecycle import bind
from pagedkv.serve.model import ServedModel


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm):
    with serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        yield http


MESSAGES = [{"role": "user", "content": "1+1="}]


# --- answers

SAMPLING = [
    {},
    {"max_tokens": 3},
    {"temperature": 1, "seed": 7, "max_tokens": 30},
    {"temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 20, "ignore_eos": True},
    {"temperature": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": 1, "repetition_penalty": 1.2, "max_tokens": 20},
    {"presence_penalty": 1, "frequency_penalty": 0.5, "max_tokens": 20, "ignore_eos": True},
    {"stop": "6"},
    {"stop": ["62", "0"], "include_stop_str_in_output": True},
    {"stop_token_ids": [9], "max_tokens": 9},
    {"min_tokens": 10, "max_tokens": 12},
    {"logit_bias": {"9": 100, "8": -100}, "max_tokens": 5},
    {"allowed_token_ids": [3, 4], "bad_words": ["00"], "max_tokens": 9},
    {"max_tokens": 0},
    {"skip_special_tokens": False},
    {"priority": -1, "cache_salt": "mine", "stream_options": None},
]  # fmt: skip
OF_HTTP = ("priority", "cache_salt", "stream_options")


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: ",".join(options) or "none")
def test_answers_are_those_of_the_engine(llm, http, options):
    own = {name: value for name, value in options.items() if name not in OF_HTTP}
    if "logit_bias" in own:
        own["logit_bias"] = {int(key): value for key, value in own["logit_bias"].items()}
    params = SamplingParams(**({"temperature": 0, "max_tokens": 16} | own))
    expected = llm.generate("473+89=", params, use_tqdm=False)[0]
    body = {"prompt": "473+89=", "return_token_ids": True} | options
    found = post(http, COMPLETIONS, **body)
    assert len(found["choices"]) == params.n
    parts = streamed(http.post(COMPLETIONS, json=body | {"stream": True}))
    chat = {name: value for name, value in body.items() if name != "prompt"} | {"max_tokens": params.max_tokens}
    chat["messages"] = [{"role": "user", "content": "473+89="}]
    chat_found, chat_parts = post(http, CHAT, **chat), streamed(http.post(CHAT, json=chat | {"stream": True}))
    for one, choice, chat_choice in zip(expected.outputs, found["choices"], chat_found["choices"], strict=True):
        wanted = one.text, one.token_ids, one.finish_reason
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == wanted
        assert (chat_choice["message"]["content"], chat_choice["token_ids"], chat_choice["finish_reason"]) == wanted
        assert choice["stop_reason"] == chat_choice["stop_reason"] == one.stop_reason
        for part in (parts[one.index], chat_parts[one.index]):
            assert (part["text"], part["token_ids"], part["finish_reason"]) == wanted
    count = sum(len(one.token_ids) for one in expected.outputs)
    for each in (found, chat_found):
        usage = each["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, count, 7 + count)
    assert found["choices"][0]["prompt_token_ids"] == chat_found["prompt_token_ids"] == expected.prompt_token_ids


def test_prompts_in_every_form(llm, http):
    ids = llm.tokenizer.encode("473+89=")
    for prompt, count in (("473+89=", 1), (ids, 1), (["473+89="], 1), ([ids], 1), (["473+89=", ids, "1+1="], 3)):
        found = post(http, COMPLETIONS, prompt=prompt)["choices"]
        assert [each["index"] for each in found] == list(range(count))
        assert [each["text"] for each in found] == ["562", "562", "2"][:count]
        parts = streamed(http.post(COMPLETIONS, json={"prompt": prompt, "stream": True}))
        assert [parts[index]["text"] for index in range(count)] == ["562", "562", "2"][:count]
    greedy = post(http, COMPLETIONS, prompt="473+89=", n=5, temperature=2, top_p=0, seed=5)["choices"]  # as OpenAI allows
    assert {each["text"] for each in greedy} == {"562"}
    several = post(http, COMPLETIONS, prompt=["1+1=", "2+2="], n=2, temperature=1, seed=5)["choices"]
    assert [each["index"] for each in several] == [0, 1, 2, 3]
    alone = post(http, COMPLETIONS, prompt="2+2=", n=2, temperature=1, seed=5)["choices"]
    assert [each["text"] for each in several[2:]] == [each["text"] for each in alone]


def test_text_offsets_of_split_characters(tmp_path):
    """A token begins where the text ends that the tokens before it make: at a character's first place for each of its
    bytes, and special tokens take no place."""
    from tokenizers import Tokenizer, decoders, models

    names = [*map(chr, range(33, 127)), *map(chr, (0xE4, 0xBD, 0x142, 0xC3, 0xA9)), "<end>"]
    library = Tokenizer(models.BPE({name: i for i, name in enumerate(names[:-1])}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    folder = write_model(tmp_path, vocab_size=len(names))
    library.save(str(folder / "tokenizer.json"))
    allowed = [names.index(each) for each in ("a", *names[94:])]
    with LLM(folder, **ENGINE) as llm, serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        for skips, hides in ((None, True), (False, False)):
            body = {"prompt": [1], "max_tokens": 60, "temperature": 2, "seed": 1, "allowed_token_ids": allowed, "logprobs": 0}
            body |= {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": skips}
            whole = post(http, COMPLETIONS, **body)["choices"][0]
            (part,) = streamed(http.post(COMPLETIONS, json=body | {"stream": True})).values()
            offsets = whole["logprobs"]["text_offset"]
            assert offsets == [each for some in part["logprobs"] for each in some["text_offset"]]
            decoder, expected = codecs.getincrementaldecoder("utf-8")("replace"), [0]
            for token in whole["token_ids"]:
                name = names[token]
                of_token = b"<end>" * (not hides) if name == "<end>" else {"a": b"a", "\u0142": b"\xa0"}.get(name) or name.encode("latin1")
                expected.append(expected[-1] + len(decoder.decode(of_token)))
            assert offsets == expected[:-1] and len(set(offsets)) < len(offsets)
            assert expected[-1] + len(decoder.decode(b"", final=True)) == len(whole["text"])
        ask = {"messages": MESSAGES, "chat_template_kwargs": {"more": ""}, "top_logprobs": 3} | body | {"logprobs": True, "prompt": None}
        choice = post(http, CHAT, **ask)["choices"][0]
        content = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
        assert content.decode(errors="replace") == choice["message"]["content"] and b"\xe4\xbd" in content


def test_a_text_without_tokens(tmp_path):
    from tokenizers import Tokenizer, models

    folder = write_model(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="<nothing>")).save(str(folder / "tokenizer.json"))
    with LLM(folder, **ENGINE) as llm, serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        for path in (COMPLETIONS, "/tokenize"):
            assert post(http, path, prompt="b", status=400)["error"]["message"].startswith("the tokenizer cannot encode the text")
        assert post(http, "/tokenize", prompt="a")["tokens"] == [0]


def test_logprobs_without_texts(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    with LLM(folder, **ENGINE) as llm, serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        found = post(http, COMPLETIONS, prompt=[1], max_tokens=2, logprobs=0, return_token_ids=True)["choices"][0]
    assert found["logprobs"]["tokens"] == [f"token_id:{i}" for i in found["token_ids"]]
    assert found["logprobs"]["text_offset"] == [0, 0]


def test_logprobs(llm, http):
    params = SamplingParams(temperature=1, seed=4, max_tokens=12, logprobs=2)
    one = llm.generate("473+89=", params, use_tqdm=False)[0].outputs[0]
    options = {"temperature": 1, "seed": 4, "max_tokens": 12}
    body = {"prompt": "473+89=", "logprobs": 2} | options
    (part,) = streamed(http.post(COMPLETIONS, json=body | {"stream": True})).values()
    whole = post(http, COMPLETIONS, **body)["choices"][0]["logprobs"]
    joined = {key: [value for each in part["logprobs"] for value in each[key]] for key in whole}
    texts = [llm.tokenizer.decode([token], skip_special_tokens=False) for token in one.token_ids]
    assert whole["tokens"] == joined["tokens"] == texts and whole["text_offset"] == joined["text_offset"]
    assert whole["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    expected = [of_ids[token] for token, of_ids in zip(one.token_ids, one.logprobs, strict=True)]
    np.testing.assert_allclose(whole["token_logprobs"], expected, atol=1e-5)
    np.testing.assert_allclose(joined["token_logprobs"], expected, atol=1e-5)
    assert [len(each) for each in whole["top_logprobs"]] == [len(of_ids) for of_ids in one.logprobs]
    chat = {"messages": [{"role": "user", "content": "473+89="}], "logprobs": True, "top_logprobs": 2} | options
    (part,) = streamed(http.post(CHAT, json=chat | {"stream": True})).values()
    content = post(http, CHAT, **chat)["choices"][0]["logprobs"]["content"]
    entries = [each for some in part["logprobs"] for each in some["content"]]
    for found in (content, entries):
        assert [each["token"] for each in found] == texts
        np.testing.assert_allclose([each["logprob"] for each in found], expected, atol=1e-5)
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in found)
        for each in found:
            assert len(each["top_logprobs"]) == 2
            assert each["top_logprobs"][0]["logprob"] >= each["top_logprobs"][1]["logprob"]


def test_echo(llm, http):
    """The prompt before the answer, with the log probabilities of its tokens: what lm-eval asks for."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=2)
    output = llm.generate("473+89=", params, use_tqdm=False)[0]
    answer, ids = output.outputs[0].text, output.prompt_token_ids
    options = {"temperature": 0, "max_tokens": 5, "logprobs": 2, "echo": True}
    texts = [llm.tokenizer.decode([token], skip_special_tokens=False) for token in ids + output.outputs[0].token_ids]
    expected = [None, *(of_ids[token] for token, of_ids in zip(ids[1:], output.prompt_logprobs[1:], strict=True))]
    expected += [of_ids[token] for token, of_ids in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)]
    for prompt in ("473+89=", ids):
        found = post(http, COMPLETIONS, prompt=prompt, **options)["choices"][0]
        (part,) = streamed(http.post(COMPLETIONS, json={"prompt": prompt, "stream": True} | options)).values()
        joined = {key: [value for each in part["logprobs"] for value in each[key]] for key in found["logprobs"]}
        assert found["text"] == part["text"] == "473+89=" + answer and found["logprobs"] == joined
        assert joined["tokens"] == texts and joined["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
        assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
        np.testing.assert_allclose(joined["token_logprobs"][1:], expected[1:], atol=1e-5)
    whole = post(http, COMPLETIONS, prompt="473+89=", **options | {"max_tokens": 0}, return_token_ids=True)  # the prompt's score alone
    (part,) = streamed(http.post(COMPLETIONS, json={"prompt": "473+89=", "stream": True} | options | {"max_tokens": 0})).values()
    assert (alone := whole["choices"][0])["text"] == part["text"] == "473+89=" and alone["finish_reason"] == part["finish_reason"] == "length"
    assert part["logprobs"] == [alone["logprobs"]] and alone["logprobs"] == {key: values[: len(ids)] for key, values in joined.items()}
    assert alone["token_ids"] == [] and alone["prompt_token_ids"] == ids
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (0, len(ids))
    one, other = post(http, COMPLETIONS, prompt=["1+1=", "2+2="], echo=True, max_tokens=0)["choices"]
    assert (one["text"], other["text"], one["logprobs"]) == ("1+1=", "2+2=", None)
    assert [each["text"][:4] for each in post(http, COMPLETIONS, prompt="1+1=", echo=True, n=2, temperature=1)["choices"]] == ["1+1="] * 2


@pytest.mark.parametrize("name", ["Llama 3", "Mistral 0.1", "Mistral 0.3"])
def test_where_tokens_of_an_echo_begin(tmp_path, name):
    """In the text that comes, though the prompt has special tokens, one is added before it, and others lack a space."""
    folder = write(tmp_path, name)
    special = "<|eot_id|>" if name == "Llama 3" else "</s>"
    prompt = f"The  quick{special} é\U0001f98a12 {special}brown"
    with LLM(folder, **ENGINE) as llm, serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        ids = llm.tokenizer.encode(prompt)
        for skips in (True, False):
            body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, "skip_special_tokens": skips, "temperature": 0}
            choice = post(http, COMPLETIONS, **body)["choices"][0]
            (part,) = streamed(http.post(COMPLETIONS, json=body | {"stream": True})).values()
            tokens, starts = (choice["logprobs"][key] for key in ("tokens", "text_offset"))
            assert choice["text"].startswith(prompt) and len(tokens) == len(ids) + 2
            assert starts == [start for each in part["logprobs"] for start in each["text_offset"]]
            assert starts[:2] == [0, 0] and starts == sorted(starts) and starts[len(ids)] == len(prompt)
            for token, start in list(zip(tokens, starts, strict=True))[2 : len(ids)]:
                assert prompt[start:].startswith((token.strip() or " ", token)) or token == "\ufffd"
            at = [start for token, start in zip(tokens, starts, strict=True) if token == special][:2]
            assert at == [10, len(prompt) - 5 - len(special)]


def test_usage_of_streams(http):
    body = {"prompt": "473+89=", "stream": True}
    assert not any("usage" in each for each in events_of(http.post(COMPLETIONS, json=body).text))
    *chunks, last = events_of(http.post(COMPLETIONS, json=body | {"stream_options": {"include_usage": True}}).text)
    assert all(each["usage"] is None for each in chunks) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4 and last["usage"]["prompt_tokens"] == 7
    both = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in events_of(http.post(COMPLETIONS, json=body | {"stream_options": both}).text)]
    assert counts == sorted(counts) and counts[-1] == 4


def test_cached_tokens_and_salts(http):
    def cached(salt):
        body = {"prompt": "111+222=", "cache_salt": salt, "max_tokens": 1}
        return post(http, COMPLETIONS, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 8, 0, 8]


def test_tokens_of_texts_and_chats(llm, http):
    ids = llm.tokenizer.encode("12+34=")
    assert post(http, "/tokenize", prompt="12+34=") == {"count": 6, "max_model_len": 128, "tokens": ids}
    assert post(http, "/tokenize", messages=[{"role": "user", "content": "12+34="}])["tokens"] == ids
    kwargs = {"more": "5"}
    assert post(http, "/tokenize", messages=[{"role": "user", "content": "1"}], chat_template_kwargs=kwargs)["count"] == 2
    assert post(http, "/detokenize", tokens=ids) == {"prompt": "12+34="}
    assert post(http, "/tokenize", prompt="")["tokens"] == [] and post(http, "/detokenize", tokens=[])["prompt"] == ""


def test_vectors(tmp_path, http):
    assert "is no embedding model" in post(http, "/v1/embeddings", 400, input="1+1")["error"]["message"]
    folder = shutil.copytree(DEMO, tmp_path / "model")
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    with LLM(folder, **ENGINE) as llm, serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url) as client:
        expected = [each.embedding for each in llm.embed(["1+1", "23"], use_tqdm=False)]
        found = post(client, "/v1/embeddings", input=["1+1", "23"])
        np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected, atol=1e-6)
        assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        coded = post(client, "/v1/embeddings", input=[4, 13, 4], encoding_format="base64")["data"][0]["embedding"]
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), expected[0], atol=1e-6)
        for body in ({"input": ""}, {"input": []}, {"input": [99]}, {"input": "1", "encoding_format": "hex"}, {"input": "1", "dimensions": 2}):
            assert post(client, "/v1/embeddings", 400, **body)["error"]["message"]
        error = post(client, "/v1/embeddings", 400, input=["1+1", "2", ""])["error"]
        assert error["message"] == "input[2]: the prompt is empty" and error["param"] == "input"
        whole = {"input": "1+1", "dimensions": len(expected[0])}  # as some clients say always
        assert post(client, "/v1/embeddings", **whole)["data"][0]["embedding"] == found["data"][0]["embedding"]
        llm.pause("keep")
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(post, client, "/v1/embeddings", 503, **whole)
            while not len(llm._book):
                time.sleep(0.01)
            llm.pause("abort")
            assert ended.result(60)["error"]["message"] == "the server has ended this answer"


def test_adapters_by_name(tmp_path):
    write_model(tmp_path / "base")
    loras = {}
    for number, name in enumerate("ab", 1):
        write_adapter(tmp_path / name, r=4, seed=number)
        loras[name] = LoRARequest(name, number, tmp_path / name)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path / "base", enable_lora=True, max_loras=2, **ENGINE) as llm:
        expected = {name: llm.generate("1+1=", params, lora_request=loras.get(name), use_tqdm=False)[0].token_ids for name in ("base", "a", "b")}
        assert len(set(map(tuple, expected.values()))) == 3
        model = ServedModel.of_engine(llm, ["base"], None, loras | {"gone": LoRARequest("gone", 3, tmp_path / "gone")})
        with serving(AsyncEngine(llm), model) as (url, _), httpx.Client(base_url=url) as http:
            assert [(each["id"], each["parent"]) for each in http.get("/v1/models").json()["data"]][:2] == [("base", None), ("a", "base")]
            body = {"prompt": "1+1=", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            for name, ids in expected.items():
                found = post(http, COMPLETIONS, model=name, **body)
                assert found["model"] == name and found["choices"][0]["token_ids"] == ids
            assert "gone" in post(http, COMPLETIONS, 500, model="gone", **body)["error"]["message"]


# --- the page


def test_the_examples_of_the_page(http, tmp_path, capsys):
    page = Path(__file__).parent.parent / "docs" / "serving.md"
    if not page.exists():
        pytest.skip("not a checkout")
    for package in ("openai", "anthropic", "xgrammar"):
        pytest.importorskip(package)
    calls = re.findall(r"^curl (?:-N )?localhost:8000(\S+) -d '(.*)'$", page.read_text(), re.M)
    said = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    with saying(write_tool_model(tmp_path), said)[0] as (url, _), httpx.Client(base_url=url) as with_tools:
        answers = [(with_tools if '"tools"' in body else http).post(path, content=body) for path, body in calls]
        assert [each.status_code for each in answers] == [200] * 9
        assert answers[0].json()["choices"][0]["message"]["content"] == "2" and len(streamed(answers[2])) == 2
        assert answers[6].json()["choices"][0]["finish_reason"] == "tool_calls"
        assert answers[8].json()["choices"][0]["text"] == "562"
        printed = []
        for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            server = with_tools if "tools=" in example else http
            exec(compile(example.replace("http://localhost:8000", str(server.base_url).rstrip("/")), page.name, "exec"), {})
            printed.append(capsys.readouterr().out.strip().splitlines()[-1])
    assert printed == ["562", 'get_weather {"city": "Paris"}', "562", "562", "562"]


def test_the_page_names_every_field_and_option():
    page = Path(__file__).parent.parent / "docs" / "serving.md"
    if not page.exists():
        pytest.skip("not a checkout")
    text = page.read_text()
    given = [each.name for kind in (schema.CompletionRequest, schema.ChatRequest) for each in fields(kind)]
    known = {*given, *schema.WITHOUT_EFFECT} - {"model", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert [name for name in sorted(known) if f"`{name}`" not in text] == []
    actions = command_line.parse(["serve", "MODEL"])
    own = set(vars(actions)) - {"command", "model", "run"}
    assert len(own) == 24 and [name for name in own if f"`--{name.replace('_', '-')}" not in text] == []


# --- figures


def figures(http) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
    return {name.replace('model_name="demo"', ""): float(value) for name, _, value in lines}


def test_metrics(llm):
    with serving(AsyncEngine(llm)) as (url, _), httpx.Client(base_url=url) as http:
        before = figures(http)
        post(http, COMPLETIONS, prompt=["473+89=", "1+1="])
        streamed(http.post(COMPLETIONS, json={"prompt": "473+89=", "stream": True}))
        post(http, COMPLETIONS, 400, prompt="")
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        after = figures(http)
    values = {name: value - before[name] for name, value in after.items()}
    assert values["vllm:prompt_tokens_total{}"] == 7 + 4 + 7 and values["vllm:generation_tokens_total{}"] == 4 + 2 + 4
    assert values['vllm:request_success_total{finished_reason="stop",}'] == 3
    buckets = [value for name, value in after.items() if name.startswith("vllm:e2e_request_latency_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == after["vllm:e2e_request_latency_seconds_count{}"]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert values[f"vllm:{name}_count{{}}"] == 3 and 0 < values[f"vllm:{name}_sum{{}}"] < 10
    assert values["vllm:inter_token_latency_seconds_count{}"] == 3 + 1 + 3, "of three answers, without their first tokens"
    assert 7 < values["vllm:iteration_tokens_total_sum{}"] <= 18 + 7, "less what the prefix cache has"
    assert values["vllm:iteration_tokens_total_count{}"] == values["pagedkv:steps_total{}"] > 0
    assert values['pagedkv:request_ends_total{finished_reason="error",}'] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert after[f"vllm:{name}{{}}"] == 0
    assert values["vllm:prefix_cache_queries_total{}"] >= values["vllm:prefix_cache_hits_total{}"] > 0


def test_the_board_and_the_page_name_figures_that_there_are(http):
    page = Path(__file__).parent.parent / "docs" / "serving.md"
    if not page.exists():
        pytest.skip("not a checkout")
    board = (page.parent.parent / "examples" / "serving" / "grafana.json").read_text()
    panels = json.loads(board)["panels"]
    shown = set(re.findall(r"((?:vllm|pagedkv):\w+)\{", " ".join(each["expr"] for panel in panels for each in panel["targets"])))
    shown |= {f"{name}_bucket" for name in re.findall(r"((?:vllm|pagedkv):\w+)_bucket", board)}
    known = {name.partition("{")[0] for name in figures(http)}
    families = {name.removesuffix("_bucket") for name in known}
    assert len(panels) > 10 and shown <= known, shown - known
    told = set(re.findall(r"`((?:vllm|pagedkv):\w+)`", page.read_text()))
    assert told <= families and {re.sub("_(count|sum)$", "", name) for name in families} <= told, told ^ families


def test_the_client_of_openai(http):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.completions.create(model="demo", prompt="473+89=").choices[0].text == "562"
        chat = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == "2" and chat.choices[0].logprobs.content[0].token == "2"
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
        )
        *chunks, last = stream
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == "2" and last.usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="temperature is -1"):
            client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            client.completions.create(model="gpt", prompt="1")


def test_a_name_of_several_addresses(tmp_path, monkeypatch):
    """It listens at each that this machine has, with one port."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("203.0.113.1", "127.0.0.1", "127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    server = serving(tool_models.ScriptedClient(lambda params, index: "a"), tool_models.model_of(write_tool_model(tmp_path)), host="name")
    with server as (urls, _):
        monkeypatch.undo()
        first, second = urls.split(" and ")
        assert first.replace("127.0.0.1", "127.0.0.2") == second
        for url in (first, second):
            assert httpx.post(url + CHAT, json={"messages": MESSAGES}).json()["choices"][0]["message"]["content"] == "a"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found[:1])
    with pytest.raises(OSError, match="assign requested address"):
        bind("name", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found[2:0:-1])
        with pytest.raises(OSError, match="in use"):
            bind("name", taken.getsockname()[1])
