"""What holds without a word of the caller's: the sampling of generation_config.json, and as many tokens as fit."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace

import pytest
from checkpoints import write_model
from tiny_engine import GREEDY, engine, generate

from pagedkv import LLM, OutOfBlocks, SamplingParams
from pagedkv.engine.build import read_default_params

# The files of Qwen3-0.6B and of its base, without the fields of transformers' own.
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645, 151643]}
BASE = {"do_sample": False, "max_new_tokens": 2048, "eos_token_id": 151643}
FILES = [
    (None, {}),
    ({}, {}),
    (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    (BASE, {"temperature": 0, "max_tokens": 2048}),
    ({"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
     {"temperature": 0, "repetition_penalty": 1.1}),
    ({"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.05}, {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.05}),
    ({"do_sample": None, "temperature": None, "top_k": None, "max_new_tokens": None}, {}),
    ({"do_sample": True, "temperature": 0, "top_k": 0, "top_p": 1.0}, {"temperature": 0}),
    ({"max_length": 20, "num_beams": 1, "use_cache": True, "transformers_version": "5.24.0"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "expected"), FILES, ids=str)
def test_what_a_file_says(tmp_path, file, expected, caplog):
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert read_default_params(tmp_path) == SamplingParams(**{"max_tokens": None} | expected)
    assert not caplog.records


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot' but must be a number"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": "false"}, "do_sample is 'false' but must be true or false"),
        ({"top_k": 20.5}, "top_k is 20.5 but must be an integer"),
        ({"max_new_tokens": -3}, "max_tokens is -3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, file, message):
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=f"generation_config.json: {message}") as refused:
        read_default_params(tmp_path)
    assert str(refused.value).count("generation_config.json") == 1


def test_what_is_not_followed_is_named(tmp_path, caplog):
    file = QWEN3 | {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "suppress_tokens": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    read_default_params(tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name.startswith("pagedkv")
    assert record.getMessage().endswith("generation_config.json: not followed: num_beams=4, no_repeat_ngram_size=3")


def test_every_way_in_follows_the_file(tmp_path, device):
    """A file with top_k 1 makes the greedy answer; SamplingParams() keeps its own defaults."""
    write_model(tmp_path, generation={"do_sample": True, "temperature": 5.0, "top_k": 1, "max_new_tokens": 9})
    messages = [{"role": "user", "content": "abc"}]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with engine(tmp_path, (device, 1)) as llm:
        assert llm.default_params == SamplingParams(temperature=5.0, top_k=1, max_tokens=9)
        assert llm.get_default_sampling_params() is llm.default_params
        greedy = generate(llm, ["abc"], SamplingParams(temperature=0, max_tokens=9))[0].token_ids
        answers = [generate(llm, ["abc"])[0], generate(llm, "abc")[0], llm.chat(messages, use_tqdm=False)[0]]
        assert [answer.token_ids for answer in answers] == [greedy] * 3
        for prompt in ("abc", messages):
            assert [token for output in llm.stream(prompt) for token in output.token_ids] == greedy
        llm.add_request("abc")
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert outputs[-1].token_ids == greedy
        drawn = generate(llm, ["abc"], SamplingParams(seed=1))[0]
        own = SamplingParams(seed=1, temperature=1.0, top_k=0, max_tokens=64)
        assert drawn.token_ids == generate(llm, ["abc"], own)[0].token_ids
        assert generate(llm, ["abc"], replace(llm.default_params, max_tokens=2))[0].token_ids == greedy[:2]


# --- None


def test_none_is_the_default_of_every_option():
    for each in fields(SamplingParams):
        if each.init and each.name != "max_tokens":
            assert SamplingParams(**{each.name: None}) == SamplingParams(), each.name
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500


@pytest.mark.parametrize("wanted", [None, 253, 254, 10**6])
@pytest.mark.parametrize("count", [1, 3, 254, 255])
def test_an_answer_fills_what_the_model_leaves(folder, place, wanted, count):
    """Its end is called "length", and the first tokens are those of a short answer."""
    with engine(folder, place) as llm:
        output = generate(llm, [[5] * count], replace(GREEDY, max_tokens=wanted))[0]
        short = generate(llm, [[5] * count], replace(GREEDY, max_tokens=min(12, 256 - count)))[0]
        room = 256 - count
        assert len(output.token_ids) == (room if wanted is None else min(wanted, room))
        assert (output.finish_reason, output.error) == ("length", None)
        assert output.token_ids[:12] == short.token_ids
        assert llm.manager.stats()["used"] == 0


@pytest.mark.parametrize("count", [1, 31, 32])
def test_an_answer_fills_what_the_pool_leaves(folder, place, count):
    """Eight pages of four tokens: the last token's KV is never computed. A number that was given is not made smaller."""
    with engine(folder, place, num_blocks=8) as llm:
        prompts, params = [[7] * count] * 3, replace(GREEDY, max_tokens=None)
        for output in generate(llm, prompts, params):  # they wait for one another
            assert (len(output.token_ids), output.finish_reason) == (33 - count, "length")
        refused = generate(llm, prompts[:1], replace(GREEDY, max_tokens=34 - count))[0].error
        assert isinstance(refused, OutOfBlocks) and "but the pool has 8" in str(refused)
        assert isinstance(generate(llm, [[7] * 33], params)[0].error, OutOfBlocks)
        llm.resize_cache(16)
        assert len(generate(llm, prompts, params)[0].token_ids) == 65 - count


def test_an_answer_that_ends_by_itself(folder, place):
    with engine(folder, place) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, stop_token_ids=[3], logit_bias={3: 1000.0})
        output = generate(llm, ["abc"], params)[0]
        assert (output.token_ids, output.finish_reason) == ([3], "stop")
        several = generate(llm, ["abc"], SamplingParams(n=3, max_tokens=None, seed=1, ignore_eos=True))[0]
        assert [len(one.token_ids) for one in several.outputs] == [253] * 3


# --- classes of one's own


def test_subclasses_have_arguments_of_their_own(folder):
    class Params(SamplingParams):
        def __init__(self, label: str, **options):
            super().__init__(**options)
            self.label = label

    class Mine(LLM):
        def __init__(self, model, label, *, colour="red", **options):
            super().__init__(model, **options)
            self.label, self.colour = label, colour

    params = Params("x", temperature=0, max_tokens=3)
    assert (params.label, params.max_tokens) == ("x", 3)
    with pytest.raises(TypeError, match="Params has no option 'topk'; did you mean 'top_k'"):
        Params("x", topk=3)
    with Mine(folder, "a", colour="blue", device="cpu", num_blocks=64, block_size=4) as llm:
        assert (llm.label, llm.colour, repr(llm)[:5]) == ("a", "blue", "<Mine")
        assert len(generate(llm, ["abc"], params)[0].token_ids) == 3
    with pytest.raises(TypeError, match="Mine has no option 'num_block'; did you mean 'num_blocks'"):
        Mine(folder, label="a", num_block=64)
