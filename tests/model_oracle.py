"""A model in its engine beside transformers' own: logits at every position, and greedy tokens."""

from __future__ import annotations

import numpy as np

import pagedkv
from pagedkv import LLM, ops


def poison(llm: LLM) -> None:
    """What no sequence has written must not matter."""
    for pair in llm._runner.caches.layers:
        for whole in pair:
            cache = whole[: llm.manager.num_blocks]  # there is no memory behind them
            cache.copy_(pagedkv.asarray(np.full(cache.shape, np.nan, np.float32), cache.dtype, cache.device))


def record_logits(llm: LLM) -> dict[int, list[tuple[int, np.ndarray]]]:
    """Makes every step leave its logits at all positions: {sequence id: [(start, [length, vocab_size])]}."""
    runner, recorded, plan = llm._runner, {}, []
    fill, compute = runner.fill, runner._compute

    def recording_fill(step):
        plan[:] = [step]
        return fill(step)

    def recording_compute(inputs):
        ops.take_sampled(inputs.token_ids, runner.sampler.sampled)
        hidden = runner.forward(inputs)
        out = pagedkv.empty((len(hidden), runner.spec.vocab_size), device=hidden.device)
        logits = pagedkv.asarray(runner.model.logits(hidden, out=out), device="cpu").numpy()
        if inputs.last_tokens is not None:  # the last layer of these alone
            last = pagedkv.asarray(inputs.last_tokens, device="cpu").numpy()
            expected = pagedkv.asarray(hidden, "float32", "cpu").numpy()[last]
            few = pagedkv.asarray(runner.forward(inputs, inputs.last_tokens), "float32", "cpu").numpy()
            assert few.shape == expected.shape
            if few.size:
                assert_close(few, expected, 1e-4 if hidden.dtype == "float32" else 5e-2)
        row = 0
        for seq, start, length in zip(plan[0].sequences, plan[0].starts, plan[0].lengths, strict=True):
            recorded.setdefault(seq.id, []).append((start, logits[row : row + length]))
            row += length
        compute(inputs)  # computes the same KV again, into the same slots

    runner.fill, runner._compute = recording_fill, recording_compute
    return recorded


def oracle_logits(model, token_ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float().numpy()


def oracle_tokens(model, prompt: list[int], count: int) -> list[int]:
    """Greedy, with transformers' own KV cache."""
    import torch

    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # else it takes prompt tokens that equal its padding for padding
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, **greedy)
    return out[0, len(prompt) :].tolist()


def assert_close(logits: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.abs(logits - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    assert error.max() <= tolerance, f"position {error.argmax()}: relative error {error.max():.2e}"
