"""The tokenizers of Llama 3 and Mistral, built here with the tokenizers library: ids, streamed text, and one BOS.

The oracles are the library's decode() of everything, and transformers' AutoTokenizer and apply_chat_template.
"""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path

import pytest
from checkpoints import write_model
from test_detokenizer import random_text
from test_tokenizer_files import check_parity
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from pagedkv import LLM, SamplingParams
from pagedkv.engine.text.chat import encode_chats
from pagedkv.engine.text.tokenizer import Tokenizer

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_TEMPLATE = (
    "{{- bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def starting_with(library: Library, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=[(bos, library.token_to_id(bos))])


def trained(library: Library, **options) -> None:
    rng = random.Random(1)
    trainer = trainers.BpeTrainer(show_progress=False, **options)
    library.train_from_iterator(["The quick brown fox, it's 12345 " + random_text(rng, 300) for _ in range(20)], trainer)


def byte_level(*special: str, bos: str, ignore_merges: bool) -> Library:
    """Of Llama 3, and of Mistral since Nemo."""
    library = Library(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    trained(library, vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    library.add_special_tokens([bos, *special])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), starting_with(library, bos)])
    return library


def pieces(*special: str, is_first: bool) -> Library:
    """Of Mistral before, whose SentencePiece model was converted: a space begins the text as the normaliser's, or since
    version 0.3 as the pre-tokenizer's, and unknown characters are bytes."""
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(library, vocab_size=420, special_tokens=names, limit_alphabet=20)
    entries = json.loads(library.to_str())
    library = Library.from_str(json.dumps(entries | {"added_tokens": [], "pre_tokenizer": None}))  # bytes are no added tokens
    if is_first:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>", *special])
    library.post_processor = starting_with(library, "<s>")
    return library


MAKE = {
    "Llama 3": lambda: byte_level(
        "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", *(f"<|reserved_special_token_{i}|>" for i in range(9)),
        bos="<|begin_of_text|>", ignore_merges=True,
    ),
    "Mistral Nemo": lambda: byte_level("<unk>", "</s>", "[INST]", "[/INST]", bos="<s>", ignore_merges=False),
    "Mistral 0.1": lambda: pieces(is_first=False),
    "Mistral 0.3": lambda: pieces("[INST]", "[/INST]", is_first=True),
}  # fmt: skip
SETTINGS = {
    "Llama 3": {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True, "chat_template": LLAMA3_TEMPLATE,
    },
    "Mistral Nemo": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "Mistral 0.1": {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_prefix_space": None},
    "Mistral 0.3": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": True},
}  # fmt: skip
OF_MISTRAL = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False,
    "chat_template": MISTRAL_TEMPLATE,
}  # fmt: skip


@cache
def made(name: str) -> Library:
    return MAKE[name]()


def write(folder: Path, name: str, **settings) -> Path:
    """A folder of the kind, whose model has an embedding of every token."""
    library = made(name)
    family = "llama" if name == "Llama 3" else "mistral"
    write_model(folder, family, vocab_size=library.get_vocab_size(), max_position_embeddings=512)
    library.save(str(folder / "tokenizer.json"))
    listed = {each.pop("id"): each for each in json.loads(library.to_str())["added_tokens"]}
    given = (OF_MISTRAL if family == "mistral" else {}) | SETTINGS[name] | {"added_tokens_decoder": listed} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


@pytest.mark.parametrize("name", MAKE)
def test_prompts_and_answers_are_those_of_transformers(tmp_path, name):
    check_parity(write(tmp_path, name))


def random_ids(name: str, rng: random.Random) -> list[int]:
    """Of text; for byte-level kinds any tokens at all, too. Texts have characters that no tokenizer was trained with."""
    library, text = made(name), random_text(rng, rng.choice([0, 1, 2, 9, 60]))
    text = "".join(rng.choice("\u0436\u6f23\U0001f98a") if rng.random() < 0.2 else char for char in text)
    if "▁" not in library.get_vocab() and rng.random() < 0.5:
        return [rng.randrange(library.get_vocab_size() + 2) for _ in range(len(text))]
    ids = library.encode(text, add_special_tokens=rng.random() < 0.5).ids
    special = [token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special]
    return [each for part in ids for each in ([part] if rng.random() < 0.95 or is_byte(library, part) else [part, rng.choice(special)])]


def is_byte(library: Library, token_id: int) -> bool:
    """Whether what follows may belong to the same character."""
    return library.id_to_token(token_id).startswith("<0x")


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_streamed_text_is_the_whole_text(tmp_path, name, skips, seed):
    rng, tokenizer, num_split = random.Random(seed), Tokenizer(write(tmp_path, name)), 0
    for _ in range(300):
        ids = random_ids(name, rng)
        whole, detokenizer, parts = tokenizer.decode(ids, skip_special_tokens=skips), tokenizer.detokenizer(skip_special_tokens=skips), []
        for token_id in ids:
            assert detokenizer.push(token_id) is None
            parts.append(detokenizer.text)
            detokenizer.mark_sent()
            assert whole.startswith("".join(parts))
        detokenizer.finish()
        assert "".join([*parts, detokenizer.text]) == whole
        num_split += sum(len(part.encode()) > 1 and not before for before, part in itertools.pairwise(parts))
    assert num_split > 100  # characters that came in several tokens


@pytest.mark.parametrize("name", MAKE)
def test_an_answer_goes_on_where_a_text_ends(tmp_path, name):
    """The text and its answer are the text of all tokens: a space of SentencePiece between the two is there, too. What
    answers a chat, or token ids, begins a text."""
    folder, library = write(tmp_path, name), made(name)
    ids_of_words = [i for i in library.encode("quick brown fox 12", add_special_tokens=False).ids if library.id_to_token(i)[0] in "▁Ġ"]
    params = SamplingParams(temperature=9.0, seed=3, max_tokens=5, allowed_token_ids=ids_of_words)
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        for prompt in ("The", "The ", "The\n", "12 é"):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            before, whole = (library.decode(ids) for ids in (output.prompt_token_ids, output.prompt_token_ids + output.token_ids))
            assert before + output.text == whole and output.text[0] == " "
            assert "".join(each.text for each in llm.stream(prompt, params)) == output.text
            (output,) = llm.generate([output.prompt_token_ids], params, use_tqdm=False)
            assert output.text == library.decode(output.token_ids) == "".join(each.text for each in llm.stream(output.prompt_token_ids, params))
        chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "The"}]
        options = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "continue_final_message": True}
        (output,) = llm.chat(chat, params, use_tqdm=False, **options)
        before, whole = (library.decode(ids) for ids in (output.prompt_token_ids, output.prompt_token_ids + output.token_ids))
        assert output.prompt == "foxThe" and before + output.text == whole and output.text[0] == " "
        assert "".join(each.text for each in llm.stream(chat, params, **options)) == output.text


CHATS = [
    [{"role": "user", "content": "Hi there"}],
    [{"role": "user", "content": " 12 é"}, {"role": "assistant", "content": "fox"}, {"role": "user", "content": "quick\n\nbrown 漢"}],
]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("writes_bos", [True, False])
def test_one_bos(tmp_path, name, writes_bos):
    """A prompt gets that of tokenizer.json, a chat that of its template: never both, and none where there is none."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' tokenizer")
    template = LLAMA3_TEMPLATE if name == "Llama 3" else MISTRAL_TEMPLATE
    folder = write(tmp_path, name, chat_template=template if writes_bos else template.replace("bos_token", "''"))
    oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    encoded = encode_chats(folder, tokenizer, CHATS, {})
    for chat, ids in zip(CHATS, encoded, strict=True):
        assert ids == oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids.count(oracle.bos_token_id) == writes_bos and (ids[0] == oracle.bos_token_id) == writes_bos
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        params = SamplingParams(max_tokens=2)
        (output,) = llm.generate(["it's 12 é"], params, use_tqdm=False)
        assert output.prompt_token_ids == oracle("it's 12 é").input_ids
        assert output.prompt_token_ids[0] == oracle.bos_token_id
        assert output.prompt_token_ids.count(oracle.bos_token_id) == 1
        (output,) = llm.chat([CHATS[1]], params, use_tqdm=False)
        assert output.prompt_token_ids == encoded[1]
