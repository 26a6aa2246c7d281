"""What a request forbids and prefers, through the engine: biases, allowed tokens, bad words, min_tokens, masks.

Every token is held against the recorded logits of its step, as in test_sampling_options.py.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from checkpoints import ALPHABET, VOCAB_SIZE
from test_sampling_options import check, draw_params, engine

from pagedkv import SamplingParams, ops

WORDS = -(-VOCAB_SIZE // 32)


def packed(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros(32 * WORDS, bool)
    bits[:VOCAB_SIZE] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def draw_mask(rng):
    """Depends on all that was sampled so far: a hash of it chooses a third of the tokens."""
    salt = int(rng.integers(1, 1000))

    def mask(request, tokens):
        chosen = np.random.default_rng([salt, *tokens]).random(VOCAB_SIZE) < 0.3
        chosen[salt % VOCAB_SIZE] = True
        return chosen

    return mask


def with_edits(rng, one: SamplingParams) -> SamplingParams:
    """Any of them together, or none."""
    options = {name: getattr(one, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
               "presence_penalty", "frequency_penalty", "logprobs", "max_tokens", "seed", "ignore_eos")}  # fmt: skip

    def tokens(count):
        return rng.choice(VOCAB_SIZE, count, replace=False).tolist()

    if rng.random() < 0.4:
        options["logit_bias"] = dict(zip(tokens(5), rng.choice([-100, -1.5, 2.0, 30, -np.inf], 5).tolist(), strict=True))
    if rng.random() < 0.3:
        options["allowed_token_ids"] = tokens(60)
    if rng.random() < 0.3:
        options["bad_words"] = ["".join(rng.choice(list(ALPHABET[:36]), rng.integers(1, 4))) for _ in range(20)]
    if rng.random() < 0.4:
        options |= {"stop_token_ids": tokens(15), "min_tokens": int(rng.integers(0, one.max_tokens))}
    if rng.random() < 0.3:
        options["mask"] = draw_mask(rng)
        options.pop("allowed_token_ids", None)  # the two together may leave nothing
    return SamplingParams(**options)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 20}, {"num_blocks": 20, "swap_space": 1 << 20},
                                     {"max_num_batched_tokens": 9}, {"max_num_seqs": 3}], ids=str)  # fmt: skip
def test_any_mix_of_edits(folder, rng, device, options, behind):
    prompts = [rng.integers(VOCAB_SIZE, size=rng.integers(1, 30)).tolist() for _ in range(12)]
    params = [with_edits(rng, draw_params(rng, int(rng.integers(8, 25)))) for _ in prompts]
    with engine(folder, device, behind=behind, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check(llm, prompts, outputs, params)


def test_a_mask_may_be_words_or_bools_or_nothing(folder, device):
    allowed = np.zeros(VOCAB_SIZE, bool)
    allowed[[3, 50, 96]] = True
    asked = []

    def mask(give):
        def ask(request, tokens):
            asked.append((request, list(tokens)))
            return give

        return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, mask=ask)

    with engine(folder, device) as llm:
        plain = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        outputs = llm.generate([[1, 2]] * 3, [mask(allowed), mask(packed(allowed)), mask(None)], use_tqdm=False)
    assert outputs[0].token_ids == outputs[1].token_ids and set(outputs[0].token_ids) <= {3, 50, 96}
    assert outputs[2].token_ids == plain.token_ids
    by_request = {}
    for request, tokens in asked:
        by_request.setdefault(request, []).append(tokens)
    assert sorted(request.id for request in by_request) == [output.request_id for output in outputs]
    for request, calls in by_request.items():
        output = next(output for output in outputs if output.request_id == request.id)
        assert calls == [output.token_ids[:n] for n in range(4)] and request.prompt_token_ids == [1, 2]


BAD_MASKS = {
    "raises": (lambda request, tokens: 1 / 0, ZeroDivisionError, "division by zero"),
    "raises later": (lambda request, tokens: None if len(tokens) < 3 else tokens[99], IndexError, "out of range"),
    "short": (lambda request, tokens: np.zeros(5, bool), ValueError, "mask gave bool [5] but must give int32 [4] or bool [97]"),
    "wide": (lambda request, tokens: np.zeros(WORDS + 1, np.int32), ValueError, "mask gave int32 [5] but must give"),
    "floats": (lambda request, tokens: np.zeros(VOCAB_SIZE), ValueError, "mask gave float64 [97] but must"),
    "a word": (lambda request, tokens: "all", ValueError, "mask gave"),
    "forbids all": (lambda request, tokens: np.zeros(VOCAB_SIZE, bool), ValueError, "mask leaves no token to sample"),
    "forbids all but bits without a token": (lambda request, tokens: np.array([0, 0, 0, -2], np.int32), ValueError, "mask leaves no"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
@pytest.mark.parametrize("behind", [0, 1])
def test_a_bad_mask_ends_its_request_alone(folder, device, name, behind, request):
    mask, kind, message = BAD_MASKS[name]
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, mask=mask)
    with engine(folder, device, behind=behind) as llm:
        expected = [output.token_ids for output in llm.generate([[1], [2], [3]], good, use_tqdm=False)]
        outputs = llm.generate([[1], [2], [3]], [good, bad, good], use_tqdm=False)
        assert isinstance(outputs[1].error, kind) and message in str(outputs[1].error)
        assert outputs[1].finish_reason == "error" and outputs[1].token_ids == expected[1][: 3 * (name == "raises later")]
        assert [outputs[0].token_ids, outputs[2].token_ids] == expected[::2]
        assert llm.manager.stats()["used"] == 0
    if device != "cpu":
        ops.check_errors()  # none: the host knows


def allowed_next(params: SamplingParams, sampled: list[int], ends: set[int], options: dict) -> tuple[set[int], set[str]]:
    """The oracle: which tokens may come next, and which options forbid any. Sets of tokens, from the definitions."""
    left, names = set(range(VOCAB_SIZE)), set()

    def forbid(name: str, tokens: set[int]) -> None:
        nonlocal left
        left = left - tokens
        if tokens:
            names.add(name)

    if "mask" in options:
        forbid("mask", set(range(VOCAB_SIZE)) - options["mask"][len(sampled)])
    if "allowed_token_ids" in options:
        forbid("allowed_token_ids", set(range(VOCAB_SIZE)) - set(options["allowed_token_ids"]))
    for word in options.get("bad_words", ()):
        for ids in ([ALPHABET.index(c) for c in word], [ALPHABET.index(c) for c in " " + word]):
            if sampled[len(sampled) - len(ids) + 1 :] == ids[:-1] and len(sampled) >= len(ids) - 1:
                forbid("bad_words", {ids[-1]})
    forbid("logit_bias", {token for token, bias in options.get("logit_bias", {}).items() if bias == -np.inf})
    is_complete = "mask" in options and options["mask"][len(sampled)] and options["mask"][len(sampled)] <= ends
    if len(sampled) < params.min_tokens and not is_complete:
        forbid("min_tokens", ends)
    return left, names


@pytest.mark.parametrize("behind", [0, 1])
def test_options_that_leave_no_token(folder, device, behind, rng):
    """Of every combination: an answer goes on as long as a token is left, and then fails with the names of the options, or
    ends where a mask allows nothing but the end. Others go on."""
    few, length = [2, 3, 4, 5, 6], 6

    def some(at_least: int) -> list[int]:
        return rng.choice(few, rng.integers(at_least, len(few) + 1), replace=False).tolist()

    given, params = [], []
    for bits in [*range(32)] * 4:
        options = {}
        if bits & 1:
            options["mask"] = [set(some(1)) for _ in range(length)]
        if bits & 2 or not bits & 1:
            options["allowed_token_ids"] = some(1 if bits & 2 else 5)
        if bits & 4:
            options["bad_words"] = [ALPHABET[token] for token in some(2)] + ["".join(ALPHABET[token] for token in some(2))]
        if bits & 8:
            options |= {"min_tokens": int(rng.integers(1, length)), "stop_token_ids": some(1)}
        if bits & 16:
            options["logit_bias"] = dict.fromkeys(some(2), -np.inf) | {7: 2.0}
        masks = options.get("mask")

        def mask(request, tokens, masks=masks):
            allowed = np.zeros(VOCAB_SIZE, bool)
            allowed[list(masks[len(tokens)])] = True
            return allowed if len(tokens) % 2 else packed(allowed)

        given.append(options)
        params.append(SamplingParams(**options | ({"mask": mask} if masks else {}), max_tokens=length, ignore_eos=True, seed=1))
    with engine(folder, device, behind=behind) as llm:
        outputs = llm.generate([[1, 2]] * len(params), params, use_tqdm=False)
        assert llm.manager.stats()["used"] == 0
    reasons = set()
    for options, one, output in zip(given, params, outputs, strict=True):
        ends = set(options.get("stop_token_ids", ()))
        for n, token in enumerate(output.token_ids):
            assert token in allowed_next(one, output.token_ids[:n], ends, options)[0]
        reasons.add(output.finish_reason)
        if output.finish_reason == "error":
            left, names = allowed_next(one, output.token_ids, ends, options)
            message = str(output.error)
            assert not left and message.endswith("no token to sample") and isinstance(output.error, ValueError)
            assert set(message.replace(" leaves", " leave").split(" leave ")[0].split(" and ")) == names
        elif output.finish_reason == "stop":
            assert output.token_ids[-1] in ends
        else:
            assert len(output.token_ids) == length
    assert reasons == {"error", "stop", "length"}


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("includes", [False, True])
def test_what_is_complete_may_end_below_min_tokens(folder, device, behind, includes):
    """A mask that allows two tokens and then the end, as a grammar's does."""

    def mask(request, tokens):
        allowed = np.zeros(VOCAB_SIZE, bool)
        allowed[[3, 4, 9][len(tokens)]] = True
        return allowed

    params = SamplingParams(mask=mask, min_tokens=6, max_tokens=12, stop_token_ids=[9], seed=1, include_stop_str_in_output=includes)
    with engine(folder, device, behind=behind) as llm:
        for output in llm.generate([[1], [2]], params, use_tqdm=False):
            assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([3, 4, 9], "stop", 9)
            assert output.text == "349"[: 3 if includes else 2]
        assert "".join(output.text for output in llm.stream([1], params)) == "349"[: 3 if includes else 2]


def test_a_mask_may_use_the_engine_it_is_called_from(folder, device):
    """It runs within a step: it may add requests and abort its own, but not wait for one."""
    seen = []

    def mask(request, tokens):
        if len(tokens) == 2:
            seen.append(llm.add_request([7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
            llm.abort(request.id)
        return

    with engine(folder, device) as llm:
        output = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=9, mask=mask, ignore_eos=True), use_tqdm=False)[0]
        assert output.finish_reason == "abort" and 2 <= len(output.token_ids) <= 4
        others = []
        while llm.has_unfinished_requests():
            others += llm.step()
    assert [each.request_id for each in others if each.finished] == seen and len(others[-1].token_ids) == 2


def test_masks_are_called_while_the_device_works(folder):
    """The step whose tokens a mask sees has been taken, and the one that it is for has been launched as far as its logits."""
    order = []

    def mask(request, tokens):
        order.append(("mask", len(tokens), threading.current_thread().name))
        return

    with engine(folder, "cpu") as llm:
        compute = llm._runner._compute

        def computed(inputs):
            order.append("compute")
            return compute(inputs)

        llm._runner._compute = computed
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, mask=mask, ignore_eos=True), use_tqdm=False)
    masks = [each for each in order if each != "compute"]
    assert masks == [("mask", n, "pagedkv") for n in range(4)]
    for n in range(4):
        assert order.index(("mask", n, "pagedkv")) > [i for i, each in enumerate(order) if each == "compute"][n], order
