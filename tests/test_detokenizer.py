"""Text as it grows: the same as the whole text of all tokens, never half a character, ended by stop strings.

The oracles are the tokenizers library's decode() of everything, and str.find over the whole text.
"""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pagedkv.engine.text.detokenizer import detokenizers


def random_text(rng: random.Random, length: int) -> str:
    """Latin, combining accents, CJK, emoji, control characters."""
    alphabets = ["abc de fgh\n\t\0", "\u0300\u0301é", "漢字かな", "\U0001f600\U0001f9d1\u200d\U0001f680", "\x80ÿ¡"]
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(length))


def byte_level() -> Tokenizer:
    rng, tokenizer = random.Random(1), Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([random_text(rng, 300) for _ in range(20)], trainer)
    tokenizer.add_tokens(["<think>", "漢漢"])
    return tokenizer


def sentence_piece(*, byte_fallback: bool) -> Tokenizer:
    words = ["▁", "▁a", "b", "c", "▁de", "é", "漢", "<s>"]
    names = words + [f"<0x{i:02X}>" for i in range(256)] * byte_fallback
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=byte_fallback))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts) if byte_fallback else decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "metaspace": sentence_piece(byte_fallback=False),
    "byte fallback": sentence_piece(byte_fallback=True),
}


def detokenizer_of(tokenizer: Tokenizer, *stop, skips: bool = True):
    return detokenizers(tokenizer, skip_special_tokens=skips)(*stop)


def random_ids(name: str, rng: random.Random) -> list[int]:
    """Of text, and of the kinds whose pieces are bytes alone any tokens at all; ids that nothing stands for, too."""
    tokenizer, length = TOKENIZERS[name], rng.choice([0, 1, 2, 7, 60])
    if name == "byte fallback":  # what is no UTF-8 has another number of U+FFFD there: see WindowDetokenizer
        parts = [[tokenizer.token_to_id(rng.choice(["▁", "▁a", "b", "é", "漢", "<s>"]))] for _ in range(length)]
        parts += [[tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in random_text(rng, 1).encode()] for _ in range(length)]
        rng.shuffle(parts)
        return [token_id for part in parts for token_id in part]
    if name == "byte level" and rng.random() < 0.5:
        return tokenizer.encode(random_text(rng, length)).ids
    return [rng.randrange(tokenizer.get_vocab_size() + 2) for _ in range(length)]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_parts_are_the_whole(name, skips, seed):
    rng, tokenizer = random.Random(seed), TOKENIZERS[name]
    for _ in range(300):
        ids = random_ids(name, rng)
        detokenizer = detokenizer_of(tokenizer, skips=skips)
        whole, parts = tokenizer.decode(ids, skip_special_tokens=skips), []
        for token_id in ids:
            assert detokenizer.push(token_id) is None
            if rng.random() < 0.7:  # else the reader gets more at once
                parts.append(detokenizer.text)
                detokenizer.mark_sent()
                assert detokenizer.text == "" and (whole.startswith("".join(parts)) or "\ufffd" in whole)
        detokenizer.finish()
        assert "".join([*parts, detokenizer.text]) == whole and detokenizer.num_tokens == len(ids)


def test_a_character_of_several_tokens_comes_whole():
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = detokenizer_of(tokenizer)
    ids = [tokenizer.token_to_id(char) for char in ("ð", "Ł", "ĺ", "Ģ")]  # the bytes F0 9F 98 80
    texts = []
    for token_id in [*ids, ids[0]]:
        detokenizer.push(token_id)
        texts.append(detokenizer.text)
    detokenizer.finish()
    assert texts == ["", "", "", "\U0001f600", "\U0001f600"] and detokenizer.text == "\U0001f600\ufffd"


def test_a_run_without_text_is_not_decoded_again_and_again():
    """Bytes that never become a character: the window stays short."""
    tokenizer = TOKENIZERS["byte fallback"]
    detokenizer = detokenizer_of(tokenizer)
    for _ in range(1000):
        detokenizer.push(tokenizer.token_to_id("<0x80>"))
    detokenizer.finish()
    text = detokenizer.text
    assert len(detokenizer._window) <= 2 * detokenizer.MAX_HELD and set(text) == {"\ufffd"} and len(text) >= 990


def test_nothing_follows_the_end():
    """A token that completes a stop string may begin a character, too; and an end may be told twice."""
    vocab = {"a": 0, "b": 1, "bð": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = detokenizer_of(tokenizer, ("b",))
    assert detokenizer.push(0) is None and detokenizer.push(2) == "b"
    detokenizer.finish()
    assert detokenizer.text == "a"
    for kind in ("byte level", "metaspace", "byte fallback"):
        cut = detokenizer_of(TOKENIZERS[kind], ("zz",))
        ids = TOKENIZERS[kind].encode("b").ids or [2]
        for token_id in ids:
            cut.push(token_id)
        cut.finish()
        before = cut.text
        cut.finish()
        assert cut.text == before != ""


def expected_stop(whole: list[str], stops: tuple[str, ...], first_checked: int) -> tuple[int, str, int] | None:
    """After which token the text ends, by which stop string, and where it begins: token by token over all text."""
    for n in range(first_checked, len(whole)):
        text, before = whole[n], len(whole[n - 1]) if n else 0
        ends = [(at, i) for i, stop in enumerate(stops) for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > before]  # fmt: skip
        if ends:
            at, i = min(ends)
            return n, stops[i], at
    return None


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings(includes, seed):
    """Beside str.find over the text of all tokens so far. Letters of a small alphabet overlap in every way."""
    rng, found = random.Random(seed), 0
    vocab = {text: i for i, text in enumerate(["a", "b", "ab", "ba", "aab", "c", "<s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.decoder = decoders.Fuse()
    for _ in range(500):
        ids = [rng.randrange(len(vocab)) for _ in range(rng.randint(0, 20))]
        stops = tuple("".join(rng.choice("abc") for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4)))
        first_checked = rng.choice([0, 0, 3])
        detokenizer = detokenizer_of(tokenizer, stops, includes)
        whole = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        expected = expected_stop(whole, stops, first_checked)
        for n, token_id in enumerate(ids):
            stop = detokenizer.push(token_id, check_stop=n >= first_checked)
            if expected is not None and n == expected[0]:
                _, text, at = expected
                assert stop == text and detokenizer.text == whole[n][: at + len(text) * includes]
                found += 1
                break
            assert stop is None and whole[n].startswith(detokenizer.text)
            held = whole[n][len(detokenizer.text) :]
            assert held == "" or any(text.startswith(held) for text in stops), "held back for nothing"
        else:
            assert expected is None
            detokenizer.finish()
            assert detokenizer.text == (whole[-1] if whole else "")
    assert 50 < found < 480
