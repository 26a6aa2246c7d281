"""Grammars of xgrammar as masks, through the engine: what comes out always follows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import TINY, random_weights, safetensors_bytes, write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import pagedkv
from pagedkv import LLM, SamplingParams

pytest.importorskip("xgrammar")
from pagedkv.integrations.xgrammar import Grammars

DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"
PIECES = [*'{}[]":,.-+ ', *"0123456789", *"abcdefghijklmnopqrstuvwxyz", '": ', ', "', '{"', "true", "false", "null", "ab", '"name"', "12"]
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
        mask = Grammars(llm).json_schema(SCHEMA, any_whitespace=False)
        params = [SamplingParams(temperature=(i % 4) * 0.7, seed=seed + i, max_tokens=200, mask=mask, n=1) for i in range(24)]
        outputs = llm.generate(["abc"] * 24, params, use_tqdm=False)
        several = llm.generate(["abc"], SamplingParams(seed=seed, max_tokens=200, mask=mask, n=6), use_tqdm=False)[0]
        assert len(mask._matchers) == 0, "matchers outlive their answers"
    texts = [output.text for output in outputs] + [one.text for one in several.outputs]
    for output, text in zip([*outputs, *[several] * 6], texts, strict=True):
        assert output.error is None and output.finish_reason == "stop"
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags", "ok"] and len(value["name"]) <= 12 and 0 <= value["age"] <= 9999
        assert set(value["tags"]) <= {"a", "bc"} and len(value["tags"]) <= 3 and isinstance(value["ok"], bool)
    assert len(set(texts)) > 15


def test_regex_beside_requests_without(folder, device):
    pattern = r"(ab|cd){2,3}-[0-9]{3}(\.[a-f]+)?"
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, device=device, block_size=4, num_blocks=500) as llm:
        expected = llm.generate(["xyz"] * 2, greedy, use_tqdm=False)[0].token_ids
        mask = Grammars(llm).regex(pattern)
        params = [greedy if i % 2 else SamplingParams(seed=i, max_tokens=60, mask=mask) for i in range(12)]
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
        grammars = Grammars(llm)
        for mask, expected in [
            (grammars.regex("[0-9]+"), ["46", "104"]),
            (grammars.json_schema({"type": "integer"}), ["46", "104"]),
            (grammars.grammar('root ::= "00" [0-9]*'), ["0046", "00104"]),
        ]:
            outputs = llm.generate(["12+34=", "99+5="], SamplingParams(temperature=0, max_tokens=9, mask=mask), use_tqdm=False)
            texts = [output.text for output in outputs]
            is_free = expected[0].startswith("00")  # what follows the zeros is the model's
            assert texts == expected or (is_free and all(re.fullmatch("00[0-9]*", text) for text in texts))


def test_preempted_and_restarted_answers_go_on(folder, device):
    """A pool too small for all: the matchers see the same tokens again."""
    with LLM(folder, device=device, block_size=4, num_blocks=40, max_num_seqs=8) as llm:
        mask = Grammars(llm).json_schema(SCHEMA, any_whitespace=False)
        params = [SamplingParams(seed=i, max_tokens=150, mask=mask) for i in range(12)]
        alone = [llm.generate(["abc"], one, use_tqdm=False)[0].token_ids for one in params]
        together = [output.token_ids for output in llm.generate(["abc"] * 12, params, use_tqdm=False)]
        assert together == alone and llm.scheduler.queues.num_preemptions > 0


def test_after_the_end_nothing_but_ends(folder):
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, mask=Grammars(llm).regex("ab"))
        output = llm.generate(["x"], params, use_tqdm=False)[0]
    assert output.text == "ab" and set(output.token_ids[-5:]) <= {END, END + 1}


def test_errors(folder, tmp_path):
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        grammars = Grammars(llm)
        with pytest.raises(ValueError, match="json_schema is '{', of which xgrammar says: "):
            grammars.json_schema("{")
        with pytest.raises(ValueError, match=r"regex is '\(', of which"):
            grammars.regex("(")
        with pytest.raises(ValueError, match="grammar is 'x', of which"):
            grammars.grammar("x")
        with pytest.raises(TypeError, match="regex is 3 but must be a string"):
            grammars.regex(3)
        forced = SamplingParams(max_tokens=9, mask=grammars.regex("ab"), allowed_token_ids=[5])
        output = llm.generate(["x"], forced, use_tqdm=False)[0]
        assert str(output.error) == "mask and allowed_token_ids leave no token to sample"
    endless = write_model(tmp_path)
    (endless / "model.safetensors").write_bytes(safetensors_bytes(random_weights(TINY)))
    with LLM(endless, device="cpu", num_blocks=20) as llm, pytest.raises(ValueError, match="no end-of-sequence token"):
        Grammars(llm)


def test_a_complete_answer_ends_below_min_tokens(folder):
    with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
        params = SamplingParams(max_tokens=9, min_tokens=7, temperature=0, mask=Grammars(llm).regex("ab"))
        output = llm.generate(["x"], params, use_tqdm=False)[0]
        assert (output.text, output.finish_reason, output.error) == ("ab", "stop", None)
