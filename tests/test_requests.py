"""What a request may ask for, and what it gets: where it ends, several answers, figures of prompts, vectors, salts.

The model is a small random one; a token is a character. The oracles are other requests without the option, the whole
text, and NumPy.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from checkpoints import ALPHABET, EOS, VOCAB_SIZE, write_model
from tiny_engine import by_hand, engine, generate, settle

from pagedkv import LLM, SamplingParams
from pagedkv.engine import RequestOutputKind

CHARS = list(range(len(ALPHABET)))  # tokens that are text
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), generation={"eos_token_id": EOS})


def drawn(seed: int, **options) -> SamplingParams:
    """Random text."""
    given = {"temperature": 1.5, "seed": seed, "max_tokens": 30, "allowed_token_ids": CHARS, "ignore_eos": True}
    return SamplingParams(**given | options)


# --- where an answer ends


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings(llm, includes, seed):
    """The same tokens until the first stop string is complete; in the text it is missing, or the last of it."""
    rng = random.Random(seed)
    seeds = [rng.randrange(2**40) for _ in range(20)]
    texts = [output.text for output in generate(llm, ["abc"] * 20, [drawn(seed) for seed in seeds])]
    params, expected = [], []
    for text, one in zip(texts, seeds, strict=True):
        begin = rng.randrange(len(text))
        stops = [text[begin : begin + rng.randint(1, 4)], "never there"]
        params.append(drawn(one, stop=stops, include_stop_str_in_output=includes))
        at = text.find(stops[0])
        expected.append((text[: at + len(stops[0]) * includes], at + len(stops[0]), stops[0]))
    for output, (text, num_tokens, stop) in zip(generate(llm, ["abc"] * 20, params), expected, strict=True):
        assert (output.text, len(output.token_ids)) == (text, num_tokens)
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert llm.manager.stats()["used"] == 0


def test_a_stop_string_before_min_tokens_is_text(llm):
    text = generate(llm, ["abc"], drawn(1))[0].text
    output = generate(llm, ["abc"], drawn(1, stop=text[2], min_tokens=30))[0]
    assert (output.text, output.finish_reason) == (text, "length")


def test_stop_tokens(llm):
    tokens = generate(llm, ["abc"], drawn(2))[0].token_ids
    stop = tokens[9]
    n = tokens.index(stop) + 1
    output = generate(llm, ["abc"], drawn(2, stop_token_ids=[stop]))[0]
    assert output.token_ids == tokens[:n] and output.outputs[0].stop_reason == stop and output.finish_reason == "stop"
    assert output.text == "".join(ALPHABET[token] for token in tokens[: n - 1])
    shown = generate(llm, ["abc"], drawn(2, stop_token_ids=[stop], include_stop_str_in_output=True))[0]
    assert shown.text == "".join(ALPHABET[token] for token in tokens[:n])


def test_the_end_of_a_sequence_and_special_tokens(llm):
    """The model's own end ends an answer, unless it is ignored; then it is text where special tokens are."""
    to_eos = {"logit_bias": {EOS: 1000.0}, "temperature": 0, "max_tokens": 3}
    ended, late, ignored, shown = generate(llm, ["abc"] * 4, [
        SamplingParams(**to_eos), SamplingParams(**to_eos, min_tokens=2), SamplingParams(**to_eos, ignore_eos=True),
        SamplingParams(**to_eos, ignore_eos=True, skip_special_tokens=False)])  # fmt: skip
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.outputs[0].stop_reason) == ([EOS], "", "stop", None)
    assert len(late.token_ids) == 3 and late.token_ids[2] == EOS and EOS not in late.token_ids[:2]
    assert (ignored.token_ids, ignored.text, ignored.finish_reason) == ([EOS] * 3, "", "length")
    assert shown.text == "<end>" * 3


# --- several answers


def test_n_answers_share_the_prompt(folder, place):
    """Each is the answer that a request of its own seed gets; the prompt is computed once."""
    prompt = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(41)]
    with engine(folder, place, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [prompt], drawn(100 + i))[0] for i in range(5)]
        before = llm.counters.prefill_tokens
        output = generate(llm, [prompt], drawn(100, n=5, logprobs=0))[0]
        assert llm.counters.prefill_tokens - before == len(prompt)
        assert llm.counters.peak_shared_blocks >= 10
    assert [one.index for one in output.outputs] == [0, 1, 2, 3, 4] and len(output.outputs) == 5
    assert [one.token_ids for one in output.outputs] == [each.token_ids for each in alone]
    assert [one.text for one in output.outputs] == [each.text for each in alone]
    for one in output.outputs:
        logprobs = [each[token] for each, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(logprobs))


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"num_blocks": 16}, {"num_blocks": 16, "swap_space": 1 << 20},
                                     {"max_num_batched_tokens": 8}], ids=str)  # fmt: skip
def test_n_answers_where_places_or_pages_are_few(folder, place, options):
    prompts = [[random.Random(i).randrange(VOCAB_SIZE) for _ in range(9 + i)] for i in range(4)]
    with engine(folder, place) as llm:
        expected = [[generate(llm, [prompt], drawn(i + j))[0].token_ids for j in range(6)] for i, prompt in enumerate(prompts)]
    with engine(folder, place, **options) as llm:
        outputs = generate(llm, prompts, [drawn(i, n=6) for i in range(4)])
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        assert llm.manager.stats()["used"] == 0


class Counted(list):
    count = 0

    def __iter__(self):
        Counted.count += 1
        return super().__iter__()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_updates_of_many_answers_look_at_each_of_them_a_few_times(llm, kind):
    """Not each answer at all others: 8,000 kept the thread of the engine for 12 s."""
    core = by_hand(llm)._core
    llm.add_request("ab", drawn(1, n=100, max_tokens=2, output_kind=kind), "a")
    core.take_messages()
    (request,) = core.book.requests
    Counted.count, request.sequences, num_steps = 0, Counted(request.sequences), 0
    while llm.has_unfinished_requests():
        llm.step()
        num_steps += 1
    assert 0 < Counted.count < 5 * num_steps


def test_the_best_of_several(llm):
    everyone = generate(llm, ["abc"], drawn(5, n=8, logprobs=0))[0].outputs
    best = generate(llm, ["abc"], drawn(5, n=3, best_of=8))[0].outputs
    ranked = sorted(everyone, key=lambda one: -one.cumulative_logprob)[:3]
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked]
    assert [one.index for one in best] == [0, 1, 2] and best[0].logprobs is None


def test_one_of_several_answers_fails(llm):
    """The error is told, whoever ends last, and is no better than an answer."""
    def fails_second(request, tokens):
        if request.index == 1 and len(tokens) == 1:
            raise LookupError("the second")

    failing = {"mask": fails_second, "max_tokens": 4}
    output = generate(llm, ["abc"], drawn(5, n=3, **failing))[0]
    assert isinstance(output.error, LookupError)
    assert [one.finish_reason for one in output.outputs] == ["length", "error", "length"]
    best = generate(llm, ["abc"], drawn(5, n=1, best_of=3, **failing))[0].outputs[0]
    assert best.finish_reason == "length" and len(best.token_ids) == 4


def test_answers_without_a_seed_differ(llm):
    tokens = {tuple(one.token_ids) for one in generate(llm, ["abc"], SamplingParams(n=8, max_tokens=12))[0].outputs}
    assert len(tokens) == 8


def test_first_tokens_of_n_answers_follow_the_softmax(folder):
    """Chi-square over 4,000 answers to 500 requests; 99.99 % of right samplers stay below the bound."""
    with engine(folder, ("cpu", 1), max_num_seqs=64) as llm:
        scores = generate(llm, ["abc"], SamplingParams(temperature=1, max_tokens=1, logprobs=20, seed=0))[0].logprobs[0]
        top = sorted(scores, key=scores.get, reverse=True)[:6]
        params = SamplingParams(n=8, max_tokens=1, allowed_token_ids=top, logit_bias={top[5]: 1.0}, temperature=2.0)
        outputs = generate(llm, ["abc"] * 500, params)
    weights = np.exp((np.array([scores[token] for token in top]) + np.eye(6)[5]) / 2)
    expected = 4000 * weights / weights.sum()
    tokens = [one.token_ids[0] for output in outputs for one in output.outputs]
    seen = np.array([tokens.count(token) for token in top])
    assert seen.sum() == 4000
    assert ((seen - expected) ** 2 / expected).sum() < 5 + 3.72 * 10**0.5 + 6


# --- figures of the prompt


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}], ids=str)
def test_prompt_logprobs(folder, place, options, rng):
    """The log probability of each token of a prompt is that of the same token where it is forced to be sampled."""
    prompt = rng.integers(VOCAB_SIZE, size=23).tolist()
    with engine(folder, place, **options) as llm:
        generate(llm, [prompt], GREEDY)  # in the prefix cache, which has no logits
        output, plain = generate(llm, [prompt] * 2, [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=5), GREEDY])
        assert len(output.prompt_logprobs) == 23 and output.prompt_logprobs[0] is None and plain.prompt_logprobs is None
        assert output.token_ids == plain.token_ids[:2]
        for n in range(1, 23):
            forced = SamplingParams(temperature=0, max_tokens=1, logprobs=5, allowed_token_ids=[prompt[n]])
            expected = generate(llm, [prompt[:n]], forced)[0].logprobs[0]
            found = output.prompt_logprobs[n]
            assert list(found) == list(expected) and next(iter(found)) == prompt[n]
            np.testing.assert_allclose(list(found.values()), list(expected.values()), atol=1e-4)


def test_prompt_logprobs_after_a_preemption(folder, place, rng):
    """A prompt that loses its pages half computed is computed again in other chunks; its figures are those of before."""
    prompt = rng.integers(VOCAB_SIZE, size=30).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    others = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def figures(when: int) -> tuple[list, int]:
        """Beside an answer, whose tokens take a part of each step. Two more get both places after so many steps."""
        with engine(folder, place, max_num_seqs=2, max_num_batched_tokens=8, enable_prefix_caching=False) as llm:
            by_hand(llm).add_request([7, 8], others, priority=-1)
            llm.add_request(prompt, params, "prompt")
            outputs, num_steps = {}, 0
            while llm.has_unfinished_requests():
                outputs |= {output.request_id: output for output in llm.step()}
                num_steps += 1
                if num_steps == when:
                    for token in (3, 4):
                        llm.add_request([token], others, priority=-1)
            return outputs["prompt"].prompt_logprobs, outputs["prompt"].metrics.num_preemptions

    expected, _ = figures(0)
    preemptions = 0
    for when in range(1, 5):
        found, num = figures(when)
        preemptions += num
        assert [each and list(each) for each in found] == [each and list(each) for each in expected], when
        for one, other in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-4)
    assert preemptions > 1


def test_embeddings(folder, place, rng):
    """In any batch, chunked and cached, the vector is the same, and beside transformers' last hidden state (on a CPU)."""
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 2, 17, 40, 40)]
    with engine(folder, place) as llm:
        alone = [llm.embed([prompt], use_tqdm=False)[0].embedding for prompt in prompts]
        together = llm.embed(prompts, use_tqdm=False)
        text = llm.embed("abc", use_tqdm=False)[0]
        bad = llm.embed([[], [5]], use_tqdm=False)
        longest = llm.embed([[5] * llm.max_model_len, [5] * (llm.max_model_len + 1)], use_tqdm=False)
        mixed = generate(llm, prompts, GREEDY)
    with engine(folder, place, max_num_batched_tokens=8) as llm:
        chunked = llm.embed(prompts, use_tqdm=False)
        assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == [output.token_ids for output in mixed]
    for vector, a, b in zip(alone, together, chunked, strict=True):
        assert vector.dtype == np.float32 and vector.shape == (64,) and np.linalg.norm(vector) == pytest.approx(1)
        np.testing.assert_allclose(a.embedding, vector, atol=1e-5)
        np.testing.assert_allclose(b.embedding, vector, atol=1e-5)
    assert text.prompt == "abc" and text.error is None
    assert longest[0].error is None and "exceed max_model_len" in str(longest[1].error)
    assert isinstance(bad[0].error, ValueError) and bad[0].embedding.size == 0 and bad[1].error is None
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.float32)
    for prompt, output in zip(prompts, together, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(output.embedding, expected / np.linalg.norm(expected), atol=1e-4)


# --- salts and priorities


def test_a_salt_of_its_own(llm):
    prompt = list(range(40))

    def cached(salt):
        return llm.generate([prompt], GREEDY, salt=salt, use_tqdm=False)[0].num_cached_tokens

    assert [cached(b"a"), cached(b"a") > 30, cached(b"b"), cached(b""), cached(b"") > 30] == [0, True, 0, 0, True]


def test_a_lower_priority_goes_first(folder, place):
    """It takes the place of one that runs, which goes on later with the same tokens."""
    with engine(folder, place, max_num_seqs=2) as llm:
        expected = [output.token_ids for output in generate(llm, ["abc", "def", "xyz"], GREEDY)]
        by_hand(llm)
        kind = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        ids = [llm.add_request(prompt, SamplingParams(**kind), priority=5) for prompt in ("abc", "def")]
        for _ in range(4):
            assert llm.step() == []
        urgent = llm.add_request("xyz", SamplingParams(**kind), priority=-1)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert outputs[0].request_id in (urgent, ids[0]) and outputs[-1].request_id == ids[1]
        assert {output.request_id: output.token_ids for output in outputs} == dict(zip([*ids, urgent], expected, strict=True))
        assert outputs[-1].metrics.num_preemptions == 1


# --- outputs on the way


@pytest.mark.parametrize("n", [1, 3])
def test_kinds_of_outputs(llm, n):
    whole = generate(llm, ["abc"], drawn(7, n=n, stop=["zq"], logprobs=2))[0]
    for kind in RequestOutputKind:
        llm.add_request("abc", drawn(7, n=n, stop=["zq"], logprobs=2, output_kind=kind))
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for one in whole.outputs:
            parts = [each for output in outputs for each in output.outputs if each.index == one.index]
            if kind is RequestOutputKind.DELTA:
                assert "".join(each.text for each in parts) == one.text
                assert [token for each in parts for token in each.token_ids] == one.token_ids
                assert [each for part in parts for each in part.logprobs] == one.logprobs
                assert max(len(each.token_ids) for each in parts) <= 2
            else:
                last = parts[-1]
                assert (last.text, last.token_ids, last.logprobs) == (one.text, one.token_ids, one.logprobs)
            if kind is RequestOutputKind.CUMULATIVE:
                assert all(one.text.startswith(each.text) for each in parts) and len(parts) >= len(one.token_ids) - 1
            assert [each.finish_reason for each in parts] == [None] * (len(parts) - 1) + [one.finish_reason]
        assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY


def test_streaming_is_generating(llm, seed):
    rng = random.Random(seed)
    prompts = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 20))) for _ in range(5)]
    expected = generate(llm, prompts, GREEDY)
    for prompt, output in zip(prompts, expected, strict=True):
        parts = list(llm.stream(prompt, GREEDY))
        assert "".join(part.text for part in parts) == output.text
        assert [token for part in parts for token in part.token_ids] == output.token_ids and parts[-1].finished


def test_a_stream_that_is_left_ends_its_request(llm):
    stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream), next(stream)
    stream.close()
    settle(llm)
    assert not llm.has_unfinished_requests() and llm.manager.stats()["used"] == 0
    with pytest.raises(ValueError, match="the prompt is empty"):
        for output in llm.stream([], GREEDY):
            raise output.error


def test_without_text(folder):
    with LLM(folder, device="cpu", num_blocks=20) as llm:
        plain = generate(llm, ["abc"], GREEDY)[0]
        silent = generate(llm, ["abc"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False))[0]
    assert silent.text is None and silent.token_ids == plain.token_ids and plain.text


# --- bad input


BAD_PARAMS = [
    (dict(n=0), ValueError, "n is 0 but must be at least 1"),
    (dict(n=1.5), TypeError, "n is 1.5 but must be an integer"),
    (dict(n=3, best_of=2), ValueError, "best_of is 2 but must be at least n=3"),
    (dict(n=2, temperature=0), ValueError, "n is 2 .* but at temperature 0 all answers are the same"),
    (dict(stop=3), TypeError, "stop is 3 but must be a list of strings"),
    (dict(stop=["a", 3]), TypeError, r"stop\[1\] is 3 but must be a string"),
    (dict(stop=["a", ""]), ValueError, r"stop\[1\] is empty"),
    (dict(stop=b"a"), TypeError, "stop is b'a' but must be a list of strings"),
    (dict(stop="a", detokenize=False), ValueError, "stop is .* but detokenize=False"),
    (dict(stop_token_ids="12"), TypeError, "stop_token_ids is '12' but must be a list of token ids"),
    (dict(stop_token_ids=[1, -1]), ValueError, r"stop_token_ids\[1\] is -1"),
    (dict(bad_words=[1]), TypeError, r"bad_words\[0\] is 1"),
    (dict(min_tokens=9, max_tokens=8), ValueError, "min_tokens is 9 but must be at most max_tokens=8"),
    (dict(allowed_token_ids=[]), ValueError, "allowed_token_ids is empty"),
    (dict(allowed_token_ids=[2**31]), ValueError, r"allowed_token_ids\[0\] is 2147483648"),
    (dict(logit_bias=[1]), TypeError, "logit_bias is .* but must be a dict"),
    (dict(logit_bias={1: float("nan")}), ValueError, r"logit_bias\[1\] is nan"),
    (dict(logit_bias={1: float("inf")}), ValueError, r"logit_bias\[1\] is inf"),
    (dict(logit_bias={1: "x"}), TypeError, r"logit_bias\[1\] is 'x'"),
    (dict(mask=3), TypeError, "mask is 3 but must be callable"),
    (dict(temperature=float("nan")), ValueError, "temperature is nan"),
    (dict(prompt_logprobs=21), ValueError, "prompt_logprobs is 21 but must be at most 20"),
    (dict(prompt_logprobs=2, max_tokens=0), ValueError, "prompt_logprobs is 2 but max_tokens=0"),
    (dict(skip_special_tokens=1), TypeError, "skip_special_tokens is 1"),
    (dict(output_kind="delta"), TypeError, "output_kind is 'delta'"),
    (dict(top_pp=0.5), TypeError, "top_pp"),
]  # fmt: skip


@pytest.mark.parametrize("options, error, message", BAD_PARAMS, ids=[m for _, _, m in BAD_PARAMS])
def test_bad_params(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


def test_bad_requests_leave_others_alone(folder):
    """One by one beside a good request, which gets its tokens."""
    with engine(folder, ("cpu", 1)) as llm:
        expected = generate(llm, ["abc"], GREEDY)[0].token_ids
        good = by_hand(llm).add_request("abc", GREEDY, "good")
        llm.step()
        for call, error, message in [
            (lambda: llm.add_request("abc", GREEDY, "good"), ValueError, "request_id is 'good', which a request has"),
            (lambda: llm.add_request("abc", GREEDY, 7), TypeError, "request_id is 7 but must be a string"),
            (lambda: llm.add_request(3), TypeError, "a prompt is a string or a list of token ids, not 3"),
            (lambda: llm.add_request("abc", "greedy"), TypeError, "params is 'greedy' but must be SamplingParams"),
            (lambda: llm.add_request("abc", GREEDY, priority="high"), TypeError, "priority is 'high'"),
            (lambda: llm.add_request("abc", GREEDY, salt="s"), TypeError, "salt is 's' but must be bytes"),
            (lambda: llm.add_request("abc", max_tokens=3), TypeError, "max_tokens"),
            (lambda: llm.explain("nobody"), KeyError, "request_id is 'nobody'"),
        ]:  # fmt: skip
            with pytest.raises(error, match=message):
                call()
        failed = {
            llm.add_request([VOCAB_SIZE]): "token id 97 is not in 0..96",
            llm.add_request([]): "the prompt is empty",
            llm.add_request("abc\udcff"): "surrogates not allowed",
            llm.add_request("x" * 300): "exceed max_model_len=256",
            llm.add_request("abc", SamplingParams(allowed_token_ids=[5, 97])): "allowed_token_ids holds token id 97",
            llm.add_request("abc", SamplingParams(logit_bias={200: 1.0})): "logit_bias holds token id 200",
        }
        assert llm.abort("nobody") is False
        outputs = {}
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        for request_id, message in failed.items():
            assert message in str(outputs[request_id].error) and outputs[request_id].finish_reason == "error"
        assert outputs[good].token_ids == expected and llm.manager.stats()["used"] == 0
        assert llm.add_request("abc", GREEDY, "good") == "good", "an id is free again"
