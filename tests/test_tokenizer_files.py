"""Prompts and answers of other people's folders: the token ids and the text that transformers' tokenizer gives.

Each folder is a tokenizer.json beside files that name further tokens. The oracle is transformers' AutoTokenizer for the
same folder. What differs on purpose stands at the end, and in docs/files.md.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import EOS, write_model
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from pagedkv import LLM, SamplingParams
from pagedkv.engine.text.chat import ChatTemplate
from pagedkv.engine.text.tokenizer import Tokenizer

X, END = "<x>", "<|im_end|>"
TEXTS = [
    "", "a", "ab<x>c", "  <x>  ", "a <x>", "<x><x>", "<|im_start|>user\nhi 473+89=<|im_end|>\n<|endoftext|>", "<|im_end|>a",
    "<y><z> <|pad|>", "Abc DEF", "x<X>y", "The quick brown fox jumps.", "it's 12 345\n\n  e\u0301é 漢字 \U0001f600",
    "<unk> <s></s>", "word<x>word word <x>word",
]  # fmt: skip
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # of Qwen3's tokenizer.json


@cache
def byte_level() -> str:
    """As Qwen3's tokenizer.json, with a small vocabulary."""
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(TEXTS * 2, trainer)
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", END])
    return str(library.to_str())


@cache
def words() -> str:
    """A token a character, an unknown token for the others."""
    names = [*"abcdefghijklmnopqrstuvwxyz <>|_", "<unk>", "<eos>"]
    library = Library(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken("<eos>", special=True)])
    return str(library.to_str())


@cache
def pieces() -> str:
    """The kind of Llama 2: metaspace, and tokens for the bytes of unknown characters."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefghijklmnopqrstuvwxyz<>|.", "▁a", "ab"]
    vocab = {name: i for i, name in enumerate(names)}
    library = Library(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(library.to_str())


def token(content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return off | {"content": content, "special": True} | flags


def unmarked(content: str, **flags: bool) -> dict[str, Any]:
    """As special_tokens_map.json has it."""
    return {name: value for name, value in token(content, **flags).items() if name != "special"}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


def write(folder: Path, tokenizer: str, settings: dict | None, **files: Any) -> Path:
    """The folder of a tokenizer: files are JSON by their names without ending; _changes: entries of tokenizer.json."""
    write_model(folder, max_position_embeddings=512)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer) | files.pop("_changes", {})))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<|pad|>",
}  # fmt: skip
BASES = {"bytes": byte_level, "words": words, "pieces": pieces}
FOLDERS: dict[str, tuple[dict | None, dict]] = {
    "alone": ({}, {}),
    "a pad token": ({"pad_token": X}, {}),
    "a named token with flags": ({"mask_token": typed(X, lstrip=True)}, {}),
    "a token named twice": ({"pad_token": X, "sep_token": X, "extra_special_tokens": [X]}, {}),
    "an ordinary word ends": ({"eos_token": "a"}, {}),
    "null tokens": ({"bos_token": None, "pad_token": None, "eos_token": None}, {}),
    "a name of its own": ({"image_token": X, "video_token": "<y>"}, {}),
    "a name of its own with flags": ({"image_token": typed(X, rstrip=True)}, {}),
    "extra special tokens": ({"extra_special_tokens": [X, "<y>"]}, {}),
    "extra special tokens with flags": ({"extra_special_tokens": [typed(X, lstrip=True, rstrip=True), "<z>"]}, {}),
    "extra special tokens with names": ({"extra_special_tokens": {"image_token": X, "y_token": "<y>"}}, {}),
    "additional special tokens": ({"additional_special_tokens": [X, "<z>", "ab"]}, {}),
    "extra and additional": ({"extra_special_tokens": ["<y>"], "additional_special_tokens": [X]}, {}),
    "no extra but additional": ({"extra_special_tokens": [], "additional_special_tokens": [X]}, {}),
    "added tokens": ({"added_tokens_decoder": {"999": token("<y>"), "998": token(X)}}, {}),
    "added tokens that are ordinary": ({"added_tokens_decoder": {"998": token(X, special=False, normalized=True)}}, {}),
    "added tokens that strip": ({"added_tokens_decoder": {"998": token(X, lstrip=True, rstrip=True)}}, {}),
    "added words": ({"added_tokens_decoder": {"998": token("word", single_word=True, special=False)}}, {}),
    "an added token that is named": (
        {"added_tokens_decoder": {"998": token(X, special=False)}, "eos_token": X, "extra_special_tokens": ["<y>"]},
        {},
    ),
    "other flags than tokenizer.json": ({"added_tokens_decoder": {"998": token(END, special=False, lstrip=True)}}, {}),
    "no added tokens": ({"added_tokens_decoder": {}, "pad_token": X}, {"special_tokens_map": {"sep_token": "<y>"}}),
    "special_tokens_map": ({}, {"special_tokens_map": {"pad_token": X, "sep_token": unmarked("<y>", lstrip=True)}}),
    "special_tokens_map wins": ({"pad_token": "<y>"}, {"special_tokens_map": {"pad_token": {"content": X}}}),
    "special_tokens_map of today": (
        {"extra_special_tokens": ["<z>"]},
        {"special_tokens_map": {"extra_special_tokens": [X, unmarked("<y>", rstrip=True)]}},
    ),
    "special_tokens_map of old": ({}, {"special_tokens_map": {"additional_special_tokens": [X, "<y>"]}}),
    "special_tokens_map is not read": (
        {"added_tokens_decoder": {"998": token("<y>")}},
        {"special_tokens_map": {"pad_token": X}},
    ),
    "no tokenizer_config's tokens": ({"model_max_length": 7, "padding_side": "left"}, {}),
    "added_tokens": ({}, {"added_tokens": {X: 998, "<y>": 999}}),
    "added_tokens, of which one is special": ({"sep_token": "<y>"}, {"added_tokens": {X: 998, "<y>": 999}}),
    "added_tokens and special_tokens_map": (
        {}, {"added_tokens": {X: 998, "<y>": 999}, "special_tokens_map": {"sep_token": X}},
    ),
    "added_tokens at ids that are taken": ({"eos_token": X}, {"added_tokens": {X: 1, "<y>": 0}}),
    "own names in both files": ({"image_token": X}, {"special_tokens_map": {"image_token": "<y>", "video_token": "<z>"}}),
    "names and additional": ({"extra_special_tokens": {"image_token": X}, "additional_special_tokens": ["<y>"]}, {}),
    "two flags for one text": ({"sep_token": "<y>", "mask_token": typed("<y>", rstrip=True, normalized=True)}, {}),
    "a token that is normalised": ({"sep_token": typed("é", normalized=True), "eos_token": ""}, {}),
    "listed twice": ({"added_tokens_decoder": {"7": token(X, lstrip=True), "998": token(X, special=False)}}, {}),
    "no pad token beside padding": ({"pad_token": None}, {"_changes": {"padding": PADDING}}),
    "truncation": ({}, {"_changes": {"truncation": TRUNCATION}}),
    "padding, and its token": ({}, {"_changes": {"padding": PADDING}}),
    "padding beside a pad token": ({"pad_token": X}, {"_changes": {"padding": PADDING, "truncation": TRUNCATION}}),
    "special tokens are split": ({"split_special_tokens": True, "pad_token": X}, {}),
    "an end that is added": ({"add_bos_token": True, "add_eos_token": True, "bos_token": X, "eos_token": "<y>"}, {}),
    "a space before": ({"add_prefix_space": True, "clean_up_tokenization_spaces": False}, {}),
    "names beside an empty list of additional ones": (
        {"additional_special_tokens": [], "extra_special_tokens": {"image_token": "<z>"}},
        {"special_tokens_map": {"additional_special_tokens": [X]}},
    ),
    "no additional ones, in one of two files": (
        {"additional_special_tokens": None}, {"special_tokens_map": {"additional_special_tokens": [X]}},
    ),
    "the library's own class": ({"tokenizer_class": "TokenizersBackend", "pad_token": X}, {}),
}  # fmt: skip
QWEN = {
    "Qwen3's settings": {
        "eos_token": END, "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None,
        "additional_special_tokens": ["<|im_start|>", END], "add_prefix_space": False, "errors": "replace",
        "split_special_tokens": False, "clean_up_tokenization_spaces": False,
    },
    "no tokens": {},
    "a pad token": {"pad_token": "<|pad|>", "eos_token": END},
    "a tool's tag": {"eos_token": END, "extra_special_tokens": [X]},
}  # fmt: skip


def check_parity(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' tokenizer")
    oracle, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    for text in TEXTS:
        for special in (True, False):
            right = oracle(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == right, (text, special)
            for skips in (True, False):
                whole = oracle.decode(right, skip_special_tokens=skips)
                assert ours.decode(right, skip_special_tokens=skips) == whole, (text, skips)
                detokenizer = ours.detokenizer(skip_special_tokens=skips)
                for token_id in right:
                    detokenizer.push(token_id)
                detokenizer.finish()
                assert detokenizer.text == whole, (text, skips)
    assert ours.eos_token_ids() == ({oracle.eos_token_id} if oracle.eos_token else set())
    names = ours.named_tokens.texts().items()
    assert set(oracle.special_tokens_map.items()) - set(names) <= {("pad_token", "<|pad|>")}  # that of the padding
    assert set(names) <= set(oracle.special_tokens_map.items())


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("base", BASES)
def test_a_folder(tmp_path, base, case):
    settings, files = FOLDERS[case]
    check_parity(write(tmp_path, BASES[base](), settings, **files))


@pytest.mark.parametrize("case", QWEN)
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_the_class_that_qwen3_names(tmp_path, name, case):
    added = {each.pop("id"): each for each in json.loads(byte_level())["added_tokens"]}
    settings = {"tokenizer_class": name, "added_tokens_decoder": added} | QWEN[case]
    check_parity(write(tmp_path, byte_level(), settings))


NAMES_A_TOKEN: dict[str, tuple[dict, dict]] = {
    "by a text": ({"eos_token": X}, {}),
    "with flags": ({"pad_token": typed(X, lstrip=True)}, {}),
    "by a name of its own": ({"image_token": X}, {}),
    "in special_tokens_map.json": ({}, {"special_tokens_map": {"eos_token": unmarked(X)}}),
    "beside added_tokens.json": ({"eos_token": X}, {"added_tokens": {"<y>": 998}}),
    "beside a list without it": ({"eos_token": X, "added_tokens_decoder": {"998": token("<y>")}}, {}),
    "beside a list that is empty": ({"eos_token": X, "added_tokens_decoder": {}}, {}),
    "without a name": ({"extra_special_tokens": [X]}, {}),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("case", NAMES_A_TOKEN)
def test_an_ordinary_token_that_another_file_names(tmp_path, base, case):
    """tokenizer.json has it as no special one: whether texts leave it out depends on who names it."""
    library = Library.from_str(BASES[base]())
    library.add_tokens([AddedToken(X, special=False, normalized=False)])
    settings, files = NAMES_A_TOKEN[case]
    check_parity(write(tmp_path, str(library.to_str()), settings, **files))


def changed(text: str, **entries: Any) -> str:
    return json.dumps(json.loads(text) | entries)


def with_dropout(text: str) -> str:
    return changed(text, model=json.loads(text)["model"] | {"dropout": 1.0})


# Here transformers reads another tokenizer, or none, out of the first folder. Ours reads what it reads out of the second.
DIFFERENCES = {
    "splits at random are switched off": (
        lambda: (with_dropout(byte_level()), {"pad_token": X}, {}),
        lambda: (byte_level(), {"pad_token": X}, {}),
    ),
    "tokenizer.json counts, not what its class builds in": (
        lambda: (changed(byte_level(), normalizer={"type": "Lowercase"}), {"tokenizer_class": "Qwen2Tokenizer"}, {}),
        lambda: (changed(byte_level(), normalizer={"type": "Lowercase"}), {}, {}),
    ),
    "the space before a text, which LlamaTokenizer leaves out where there is one": (
        lambda: (pieces(), {"tokenizer_class": "LlamaTokenizer", "pad_token": X}, {}),
        lambda: (pieces(), {"pad_token": X}, {}),
    ),
    "without tokenizer_config.json, too": (lambda: (words(), None, {}), lambda: (words(), {}, {})),
    "all its added tokens are kept": (
        lambda: (byte_level(), {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {}, "eos_token": END}, {}),
        lambda: (byte_level(), {"eos_token": END}, {}),
    ),
    "a token with flags needs no __type": (
        lambda: (words(), {"eos_token": token(X, lstrip=True)}, {}),
        lambda: (words(), {"eos_token": typed(X, lstrip=True)}, {}),
    ),
    "a text stays as it was decoded": (
        lambda: (words(), {"clean_up_tokenization_spaces": True}, {}),
        lambda: (words(), {}, {}),
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_that_is_wanted(tmp_path, case):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' tokenizer")
    (given, settings, files), (other, others, more) = (each() for each in DIFFERENCES[case])
    ours = Tokenizer(write(tmp_path / "ours", given, settings, **files))
    oracle = transformers.AutoTokenizer.from_pretrained(write(tmp_path / "other", other, others, **more))
    for text in [*TEXTS, "hi . there"]:
        right = oracle(text).input_ids
        assert ours.encode(text) == right, text
        assert ours.decode(right) == oracle.decode(right, skip_special_tokens=True)


def test_bytes_that_are_no_text(tmp_path, seed):
    """An answer that is cut within a character, behind a line end that is a byte, too: streams and whole answers alike."""
    print("seed", seed)
    tokenizer, rng = Tokenizer(write(tmp_path, pieces(), None)), random.Random(seed)
    byte = {i: tokenizer.library.token_to_id(f"<0x{i:02X}>") for i in range(256)}
    cut = [byte[i] for i in b"\n\xf0\x9f"]
    assert tokenizer.decode(cut) == "\n\ufffd\ufffd"
    assert tokenizer.decode([byte[i] for i in "\n\U0001f600".encode()]) == "\n\U0001f600"
    for _ in range(200):
        ids = [rng.choice([rng.choice(list(byte.values())), byte[10], rng.randrange(290)]) for _ in range(rng.randrange(12))]
        for goes_on in (False, True):
            detokenizer, text = tokenizer.detokenizer(goes_on=goes_on), ""
            for token_id in ids:
                detokenizer.push(token_id)
                text += detokenizer.text
                detokenizer.mark_sent()
            detokenizer.finish()
            assert tokenizer.decode(ids, goes_on=goes_on) == text + detokenizer.text, ids


def generate(folder: Path, prompt: str | list[int], **options: Any):
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, **options)
        return llm.generate([prompt], params, use_tqdm=False)[0]


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer_config", "special_tokens_map"])
def test_an_answer_ends_at_the_token_of_any_file(tmp_path, place):
    """The three name different tokens in many fine-tunes of base models."""
    folder, prompt = write_model(tmp_path / "model"), [1, 2, 3]
    answer = generate(folder, prompt).token_ids
    at, last = next((i, token_id) for i, token_id in enumerate(answer) if i > 2 and token_id < EOS and token_id not in answer[:i])
    text = Tokenizer(folder).decode([last])
    content = {"eos_token": text} if "token" in place else {"eos_token_id": last}
    path = folder / f"{place}.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    output = generate(folder, prompt)
    assert output.token_ids == answer[: at + 1] and output.finish_reason == "stop"


def test_ends_that_the_model_cannot_write(tmp_path):
    """Ids beyond its vocabulary, and -1, which means none."""
    folder = write_model(tmp_path, eos_token_id=[-1, 97, 3], vocab_size=EOS + 1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": X}))
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        assert llm.config.eos_token_ids == {3}


def test_a_token_without_an_embedding_is_refused(tmp_path):
    """The tokenizer has more tokens than the model: the request fails, the next is served."""
    folder = write_model(tmp_path, vocab_size=EOS + 1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": X}))
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        bad, good = llm.generate(["ab<x>", "ab"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert bad.finish_reason == "error" and f"token id {EOS + 1} is not in 0..{EOS}" in str(bad.error)
    assert good.finish_reason in ("stop", "length")


def test_a_text_that_the_tokenizer_cannot_encode_is_refused(tmp_path):
    """The library raises a bare Exception where a character has no token, and where it fails itself, what is none."""
    given = json.loads(words())
    given["model"]["unk_token"] = "<nothing>"
    failing = Library.from_str(words())
    failing.normalizer = normalizers.Strip()
    failing.add_tokens([AddedToken("\n\n", normalized=True)])
    for name, tokenizer, bad in (("unknown", json.dumps(given), "aé"), ("failing", failing.to_str(), "a é")):
        with LLM(write(tmp_path / name, tokenizer, None), device="cpu", num_blocks=64) as llm:
            for text in (bad, bad * 3000):
                first, second = llm.generate([text, "ab"], SamplingParams(max_tokens=2), use_tqdm=False)
                assert isinstance(first.error, ValueError) and "the tokenizer cannot encode the text: " in str(first.error)
                assert second.error is None and len(second.outputs[0].token_ids) == 2


def test_a_chat_template_may_write_all_named_tokens(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token("</s>"), "chat_template": "{{ bos_token }}{{ eos_token }}"}))  # fmt: skip
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert ChatTemplate.from_folder(tmp_path).render([{"role": "user", "content": "hi"}]) == "<s></s>"


BROKEN = {
    "a list": ("tokenizer_config", "[]", "tokenizer_config.json: a JSON object was expected, not list"),
    "no JSON": ("special_tokens_map", "{", "special_tokens_map.json: "),
    "a number": ("tokenizer_config", '{"extra_special_tokens": [5]}', "tokenizer_config.json .*: 5 is no token"),
    "a flag": ("tokenizer_config", '{"eos_token": {"content": "x", "lstrip": 1}}', "tokenizer_config.json .*: lstrip must be true or false"),
    "false": ("tokenizer_config", '{"pad_token": false}', "tokenizer_config.json .*: False is no token"),
    "half a character": ("tokenizer_config", '{"eos_token": "\\ud800"}', "tokenizer_config.json .*surrogates not allowed"),
    "no flags": ("tokenizer_config", '{"added_tokens_decoder": {"7": "<x>"}}', "tokenizer_config.json .*added_tokens_decoder is {'7': '<x>'} but"),
    "no number": ("added_tokens", '{"<x>": null}', "added_tokens.json holds {'<x>': None} but must hold token ids"),
    "no ids": ("tokenizer_config", '{"added_tokens_decoder": {"x": "<x>"}}', "tokenizer_config.json .*'x'"),
    "a pointer": (
        "tokenizer",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n",
        "tokenizer.json: a git-lfs pointer stands in place of the file: run `git lfs pull`",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(tmp_path, case):
    name, content, message = BROKEN[case]
    write(tmp_path, words(), None)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path).encode("a")


def test_a_closed_engine_leaves_no_tokenizer(tmp_path):
    """Those of large models take tens of megabytes. Byte-level ones keep a table of their tokens' bytes."""
    folder, kept = write(tmp_path, byte_level(), {}), []
    for _ in range(2):
        with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
            for _ in llm.stream([1, 2, 3], SamplingParams(max_tokens=3, stop=["zz"])):
                pass
            kept.append(weakref.ref(llm.tokenizer.library))
        del llm
    gc.collect()
    assert [each() for each in kept] == [None, None]
