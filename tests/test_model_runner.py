"""ModelRunner: launching a step before the tokens of the one before are known."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE

from pagedkv import LLM, SamplingParams, ops
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step

NUM_NEW = 12


def steps_one_behind(llm: LLM, sequences: list[Sequence]) -> list[list[int]]:
    """Prefill, then decodes whose sequences learn a token only after the next step was launched."""
    manager, runner = llm.manager, llm._runner
    tokens: list[list[int]] = [[] for _ in sequences]
    for seq in sequences:
        manager.allocate(seq.id, seq.tokens)
    pending = None
    for n in range(NUM_NEW):
        step = Step()
        order = range(len(sequences)) if n % 2 else reversed(range(len(sequences)))  # rows differ from step to step
        for i in order:
            seq = sequences[i]
            start = seq.num_prompt_tokens + n - 1 if n else 0
            length = 1 if n else seq.num_prompt_tokens
            manager.reserve(seq.id, start + length)
            step.sampled.append(len(step.sequences))
            step.sequences.append(seq)
            step.receivers.append(seq)
            step.ids.append(seq.id)
            step.starts.append(start)
            step.lengths.append(length)
        if n:
            step.num_decodes = len(sequences)
            step.sources = np.array([pending.sequences.index(seq) for seq in step.sequences])
        runner.launch(step)
        if pending:
            take(pending, sequences, tokens)
        pending = step
    take(pending, sequences, tokens)
    return tokens


def take(step: Step, sequences: list[Sequence], tokens: list[list[int]]) -> None:
    for seq, token in zip(step.sequences, step.tokens(), strict=True):
        seq.new_tokens.append(token)
        tokens[sequences.index(seq)].append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_reads_the_tokens_of_the_one_before(folder, rng, temperature):
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 5, 17)]
    params = [SamplingParams(temperature=temperature, max_tokens=NUM_NEW, seed=i, ignore_eos=True) for i in range(3)]
    with LLM(folder, device="cpu", block_size=4, num_blocks=64, max_num_seqs=4) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.manager.reset_prefix_cache()
        sequences = [Sequence(100 + i, prompts[i], params[i], i, frozenset(), 0.0) for i in range(3)]
        assert steps_one_behind(llm, sequences) == expected


def test_the_model_samples_of_its_logits(folder, rng):
    with LLM(folder, device="cpu", num_blocks=10) as llm:
        model, config, rows = llm._runner.model, llm.config, 50
    hidden = rng.standard_normal((rows, config.hidden_size), np.float32)
    numbers = rng.uniform(0, 2, rows).astype(np.float32), np.arange(rows), np.arange(rows, dtype=np.int32)
    room, out = np.empty((rows, config.vocab_size), np.float32), np.empty(rows, np.int32)
    model.sample(hidden, *numbers, logits=room, out=out)
    np.testing.assert_array_equal(out, ops.sample(model.logits(hidden, out=room), *numbers))
