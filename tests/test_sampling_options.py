"""What a request asks of the sampler, through the engine: every token is held against the recorded logits of its step
and the definition in float64 (oracle.py), with the tokens that the request had by then."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import oracle
import pytest
from checkpoints import ALPHABET, VOCAB_SIZE

import pagedkv
from pagedkv import LLM, SamplingParams, ops
from pagedkv.models.decoder import Decoder

SAMPLE = Decoder.sample


def sample_and_leave_logits(self, hidden, *numbers, logits, out):
    """Decoder.sample need not leave them."""
    SAMPLE(self, hidden, *numbers, logits=logits, out=out)
    self.logits(hidden, out=logits)


@contextmanager
def engine(folder, device, *, behind=1, **options):
    """One whose `logits` are those of each token, by the request's number and the token's position."""
    options = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 8, "seed": 0} | options
    with patch.object(Decoder, "sample", sample_and_leave_logits), LLM(folder, device=device, **options) as llm:
        runner, llm.logits = llm._runner, {}
        runner.num_behind = behind
        launch, edit, unedited = runner.launch, runner.sampler.edit, []

        def recorded_edit(wait_for_tokens):
            unedited.append(host(runner.sampler.logits))
            edit(wait_for_tokens)

        def recorded(step, wait_for_tokens):
            unedited.clear()
            launch(step, wait_for_tokens)
            ops.synchronize(device)
            rows = np.asarray(unedited[0] if unedited else host(runner.sampler.logits))
            for row, (seq, index) in enumerate(zip(step.receivers, step.sampled, strict=True)):
                llm.logits[seq.id, step.starts[index] + step.lengths[index]] = rows[row].copy()

        runner.launch, runner.sampler.edit = recorded, recorded_edit
        yield llm


def host(tensor):
    return pagedkv.empty(tensor.shape, tensor.dtype).copy_(tensor).numpy()


def edited(logits, one, tokens):
    """What a request's options make of its logits, with the tokens that it has by then."""
    x = logits.copy()
    for token, bias in (one.logit_bias or {}).items():
        x[token] += bias
    forbidden = set() if len(tokens) >= one.min_tokens else set(one.stop_token_ids)
    for word in one.bad_words:  # a token is a character
        for ids in ([ALPHABET.index(c) for c in text] for text in (word, " " + word)):
            if tokens[len(tokens) - len(ids) + 1 :] == ids[:-1]:
                forbidden.add(ids[-1])
    x[list(forbidden)] = -np.inf
    for allowed in (one.allowed_token_ids, None if one.mask is None else np.flatnonzero(one.mask(None, tokens))):
        if allowed is not None:
            x[~np.isin(np.arange(VOCAB_SIZE), allowed)] = -np.inf
    return x


def check(llm, prompts, outputs, params):
    """Right tokens and log probabilities. Requests have the ids 0, 1, ... of the engine."""
    for i, (prompt, output, one) in enumerate(zip(prompts, outputs, params, strict=True)):
        assert output.error is None
        stops = [n for n, token in enumerate(output.token_ids, 1) if token in one.stop_token_ids and n >= one.min_tokens]
        assert len(output.token_ids) == (stops[0] if stops else one.max_tokens)
        assert output.finish_reason == ("stop" if stops else "length")
        for n, token in enumerate(output.token_ids):
            logits = llm.logits[i, len(prompt) + n].astype(np.float64)
            counts = oracle.token_counts(prompt, output.token_ids[:n], VOCAB_SIZE)
            x = oracle.penalized(edited(logits, one, output.token_ids[:n]), counts, one.repetition_penalty, one.presence_penalty, one.frequency_penalty)
            keys = oracle.sample_keys(x, one.temperature, one.seed, len(prompt) + n)
            sure = maybe = np.ones(VOCAB_SIZE, bool)  # kept: what rounding may change is told apart
            if one.temperature > 0:
                filters = one.temperature, one.top_k, one.top_p, one.min_p
                sure, maybe = (oracle.kept(x, *filters, slack=slack) for slack in (-1e-5, 1e-5))
            assert maybe[token] and keys[token] >= keys[sure].max() - 1e-4, (i, n, one)
            if one.logprobs is not None:
                ids, expected = oracle.token_logprobs(logits, token, one.logprobs)
                assert list(output.logprobs[n]) == list(dict.fromkeys(ids))
                expected = dict(zip(ids, expected, strict=True))
                np.testing.assert_allclose(list(output.logprobs[n].values()), list(expected.values()), atol=1e-4)
        assert (output.logprobs is None) == (one.logprobs is None)


def draw_params(rng, max_tokens):
    """Any options, or none."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    return SamplingParams(
        temperature=one_of(0, 0.5, 1.0), top_k=one_of(0, -1, 1, 5, 1000), top_p=one_of(1.0, 0.9, 0.3),
        min_p=one_of(0, 0, 0.1), repetition_penalty=one_of(1.0, 1.0, 1.3, 0.8), presence_penalty=one_of(0, 0, 1.5),
        frequency_penalty=one_of(0, 0, 0.7, -0.2), logprobs=one_of(None, 0, 1, 5, 20), max_tokens=max_tokens,
        seed=int(rng.integers(2**62)), ignore_eos=True,
    )  # fmt: skip


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 20}, {"num_blocks": 20, "swap_space": 1 << 20},
                                     {"max_num_batched_tokens": 9}, {"max_num_seqs": 3}], ids=str)  # fmt: skip
def test_any_mix_of_options(folder, rng, device, options, behind):
    """Also where requests are preempted, wait, and are computed in chunks."""
    shortest, fewest = (20, 20) if "num_blocks" in options else (1, 8)  # any two or three that start outgrow 20 pages
    prompts = [rng.integers(VOCAB_SIZE, size=rng.integers(shortest, 30)).tolist() for _ in range(12)]
    params = [draw_params(rng, int(rng.integers(fewest, 25))) for _ in prompts]
    with engine(folder, device, behind=behind, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check(llm, prompts, outputs, params)
        if "num_blocks" in options:
            assert llm.scheduler.queues.num_preemptions > 0


def test_requests_with_options_do_not_change_others(folder, rng, device):
    prompts = [rng.integers(VOCAB_SIZE, size=7).tolist() for _ in range(8)]
    plain = [SamplingParams(temperature=0.8, max_tokens=12, seed=i, ignore_eos=True) for i in range(8)]
    mixed = [one if i % 2 else draw_params(rng, 5) for i, one in enumerate(plain)]
    with engine(folder, device) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, plain, use_tqdm=False)]
        outputs = llm.generate(prompts, mixed, use_tqdm=False)
        assert [output.token_ids for output in outputs][1::2] == expected[1::2]
        assert [output.token_ids for output in llm.generate(prompts, plain, use_tqdm=False)] == expected


def test_graphs_and_eager_steps_take_the_same_tokens(folder, rng, device):
    prompts = [rng.integers(VOCAB_SIZE, size=9).tolist() for _ in range(6)]
    params = [draw_params(rng, 20) for _ in prompts]
    tokens = []
    for enforce_eager in (False, True):
        with engine(folder, device, enforce_eager=enforce_eager) as llm:
            tokens.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_first_tokens_follow_the_filtered_softmax(folder, device):
    """Chi-square over 4,000 requests for one token; 99.99 % of right samplers stay below the bound."""
    count, prompt, temperature = 4000, [3, 1, 4, 1, 5], 2.0
    options = {"temperature": temperature, "top_k": 6, "repetition_penalty": 1.5, "max_tokens": 1}
    params = [SamplingParams(**options, seed=seed) for seed in range(count)]
    with engine(folder, device, max_num_seqs=64) as llm:
        outputs = llm.generate([prompt] * count, params, use_tqdm=False)
        logits = llm.logits[0, len(prompt)].astype(np.float64)
    x = oracle.penalized(logits, np.isin(np.arange(VOCAB_SIZE), prompt), 1.5, 0, 0)
    weights = np.where(oracle.kept(x, temperature, top_k=6), np.exp((x - x.max()) / temperature), 0)
    expected = count * weights / weights.sum()
    seen = np.bincount([output.token_ids[0] for output in outputs], minlength=VOCAB_SIZE)
    kept = expected > 0
    assert not seen[~kept].any() and kept.sum() == 6
    assert ((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 5 + 3.72 * 10**0.5 + 6


def test_a_penalty_stops_repetition(folder, device):
    params = SamplingParams(temperature=0, presence_penalty=100.0, max_tokens=40, ignore_eos=True)
    with engine(folder, device) as llm:
        for output in llm.generate([[5], [6, 7]], params, use_tqdm=False):
            assert len(set(output.token_ids)) == 40
