"""Structured outputs through the engine: what comes out always follows them."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, random_weights, safetensors_bytes, write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import pagedkv
from pagedkv import LLM, SamplingParams

pytest.importorskip("xgrammar")
from pagedkv.engine import StructuredOutputsParams
from pagedkv.engine.sampling.grammars import GrammarMask

DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"
PIECES = [*'{}[]":,.-+ ', *"0123456789", *"abcdefghijklmnopqrstuvwxyz", '": ', ', "', '{"', "true", "false", "null", "ab", '"name"', "12", "\t", "\x01"]
END = len(PIECES)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9999},
                   "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose tokens are characters and pieces of JSON; special ones spell JSON, too, and are no text."""
    folder = write_model(tmp_path_factory.mktemp("model"), generation={"eos_token_id": [END, END + 1]})
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", "<stop>", '"abc"', "7")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_json_schema(folder, device, seed):
    """Random tokens at any temperature make JSON of the schema, each of which ends by itself."""
    with LLM(folder, device=device, block_size=4, num_blocks=500, max_num_seqs=16) as llm:
        shape = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        params = [SamplingParams(temperature=(i % 4) * 0.7, seed=seed + i, max_tokens=200, structured_outputs=shape) for i in range(24)]
        outputs = llm.generate(["abc"] * 24, params, use_tqdm=False)
        several = llm.generate(["abc"], SamplingParams(seed=seed, max_tokens=200, structured_outputs=shape, n=6), use_tqdm=False)[0]
    texts = [output.text for output in outputs] + [one.text for one in several.outputs]
    for output, text in zip([*outputs, *[several] * 6], texts, strict=True):
        assert output.error is None and output.finish_reason == "stop"
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags", "ok"] and len(value["name"]) <= 12 and 0 <= value["age"] <= 9999
        assert set(value["tags"]) <= {"a", "bc"} and len(value["tags"]) <= 3 and isinstance(value["ok"], bool)
    assert len(set(texts)) > 15


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_strings_with_bounds_are_json(folder, kind, seed):
    """Control characters would not be."""
    schema = {"type": "string", "minLength": 5, "maxLength": 20}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    shape = StructuredOutputsParams(**{kind: schema if kind == "json" else tag})
    with LLM(folder, device="cpu", block_size=4, num_blocks=500) as llm:
        params = [SamplingParams(temperature=2, seed=seed + i, max_tokens=60, structured_outputs=shape) for i in range(16)]
        texts = [output.text for output in llm.generate(["abc"] * 16, params, use_tqdm=False)]
    assert all(5 <= len(json.loads(text)) <= 20 for text in texts)


def test_regex_beside_requests_without(folder, device):
    pattern = r"(ab|cd){2,3}-[0-9]{3}(\.[a-f]+)?"
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, device=device, block_size=4, num_blocks=500) as llm:
        expected = llm.generate(["xyz"] * 2, greedy, use_tqdm=False)[0].token_ids
        shape = StructuredOutputsParams(regex=pattern)
        params = [greedy if i % 2 else SamplingParams(seed=i, max_tokens=60, structured_outputs=shape) for i in range(12)]
        outputs = llm.generate(["xyz"] * 12, params, use_tqdm=False)
    for output, one in zip(outputs, params, strict=True):
        if one is greedy:
            assert output.token_ids == expected
        elif output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text)
        else:
            assert re.match(r"(ab|cd){2,3}-[0-9]{3}\.[a-f]+$", output.text) and len(output.token_ids) == 60


def test_the_model_in_the_package():
    """It adds; a grammar makes it answer with leading zeros."""
    with LLM(DEMO_MODEL, device="cpu", block_size=4, num_blocks=64) as llm:
        for shape, expected in [
            ({"regex": "[0-9]+"}, ["46", "104"]),
            ({"json": {"type": "integer"}}, ["46", "104"]),
            ({"json": '{"type": "integer"}'}, ["46", "104"]),
            ({"choice": ["46", "104", "1045"]}, ["46", "104"]),
            ({"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]+"}}}, ["46", "104"]),
            ({"grammar": 'root ::= "00" [0-9]*'}, ["0046", "00104"]),
        ]:
            outputs = llm.generate(["12+34=", "99+5="], SamplingParams(temperature=0, max_tokens=9, structured_outputs=StructuredOutputsParams(**shape)), use_tqdm=False)
            texts = [output.text for output in outputs]
            is_free = expected[0].startswith("00")  # what follows the zeros is the model's
            assert texts == expected or (is_free and all(re.fullmatch("00[0-9]*", text) for text in texts))


def test_preempted_and_restarted_answers_go_on(folder, device):
    """A pool too small for all: the matchers see the same tokens again."""
    with LLM(folder, device=device, block_size=4, num_blocks=40, max_num_seqs=8) as llm:
        shape = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        params = [SamplingParams(seed=i, max_tokens=150, structured_outputs=shape) for i in range(12)]
        alone = [llm.generate(["abc"], one, use_tqdm=False)[0].token_ids for one in params]
        together = [output.token_ids for output in llm.generate(["abc"] * 12, params, use_tqdm=False)]
        assert together == alone and llm.scheduler.queues.num_preemptions > 0


def test_after_the_end_nothing_but_ends(folder):
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="ab"))
        output = llm.generate(["x"], params, use_tqdm=False)[0]
    assert output.text == "ab" and set(output.token_ids[-5:]) <= {END, END + 1}


class Counted(list):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def test_each_token_is_read_once(folder, monkeypatch):
    """A mask costs the same for the last token of a long answer as for the first."""
    given = []

    def ask(mask, request, tokens):
        tokens = Counted(tokens)
        bits = call(mask, request, tokens)
        given.append((len(tokens), tokens.num_read))
        return bits

    call = GrammarMask.__call__
    monkeypatch.setattr(GrammarMask, "__call__", ask)
    with LLM(folder, device="cpu", block_size=4, num_blocks=500) as llm:
        params = SamplingParams(max_tokens=100, min_tokens=100, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
        llm.generate(["abc"], params, use_tqdm=False)
    assert given == [(i, min(i, 1)) for i in range(100)]


def test_errors(folder, tmp_path):
    def ask(llm, **shape):
        return llm.generate(["x"], SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(**shape)), use_tqdm=False)[0]

    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        for kind, text in (("json", "{"), ("json", ""), ("regex", "("), ("grammar", "x"), ("grammar", ""), ("structural_tag", "{}")):
            with pytest.raises(ValueError, match=re.escape(f"structured_outputs.{kind} is {text!r}, of which xgrammar says: ")):
                ask(llm, **{kind: text})
        with pytest.raises(ValueError, match="nothing"):
            ask(llm, json={"type": "nothing"})
        forced = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="ab"), allowed_token_ids=[5])
        output = llm.generate(["x"], forced, use_tqdm=False)[0]
        assert str(output.error) == "structured_outputs and allowed_token_ids leave no token to sample"
        assert ask(llm, regex="ab").text == "ab"
    endless = write_model(tmp_path)
    (endless / "model.safetensors").write_bytes(safetensors_bytes(random_weights(TINY)))
    with LLM(endless, device="cpu", num_blocks=20) as llm, pytest.raises(ValueError, match="no end-of-sequence token"):
        ask(llm, regex="ab")


@pytest.mark.parametrize(("options", "text"), [
    ({}, "structured_outputs has nothing but must have one of json, regex, choice, "),
    ({"regex": "a", "json_object": True}, "structured_outputs has regex and json_object but"),
    ({"json_object": False}, "has nothing"), ({"choice": []}, "choice is empty"), ({"choice": [""]}, "choice[0] is empty"),
    ({"regex": 3}, "structured_outputs.regex is 3 but must be a text"), ({"json": [1]}, "structured_outputs.json is [1]"),
    ({"json_object": 3}, "json_object is 3 but must be True or False"), ({"regex": np.ones(2)}, "regex is array([1., 1.]) but"),
])  # fmt: skip
def test_wrong_options(options, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        StructuredOutputsParams(**options)


def test_wrong_params():
    with pytest.raises(TypeError, match="structured_outputs is {} but must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={})
    with pytest.raises(ValueError, match="both given"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), mask=lambda *_: None)


def test_they_are_plain_data():
    """Another process can get them, and they are the same there."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(pickle.loads(pickle.dumps(params)))
    choice = StructuredOutputsParams(choice=["a", "b"])
    assert pickle.loads(pickle.dumps(choice)) == choice


def test_choices_of_any_characters(folder):
    """Quotes, backslashes and lines in choices are no syntax."""
    texts = ['a"b', "{}", "[a]: ab"]
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        shape = StructuredOutputsParams(choice=texts)
        found = {llm.generate(["x"], SamplingParams(seed=i, max_tokens=30, temperature=2, structured_outputs=shape), use_tqdm=False)[0].text for i in range(20)}
    assert found <= set(texts) and len(found) > 1


def test_a_complete_answer_ends_below_min_tokens(folder):
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        params = SamplingParams(max_tokens=9, min_tokens=7, temperature=0, structured_outputs=StructuredOutputsParams(regex="ab"))
        output = llm.generate(["x"], params, use_tqdm=False)[0]
        assert (output.text, output.finish_reason, output.error) == ("ab", "stop", None)
