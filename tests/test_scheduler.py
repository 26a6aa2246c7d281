"""What the scheduler puts into each step, with what it computed checked slot by slot (scheduled_engine.py)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduled_engine import Engine, next_token

from pagedkv import OutOfBlocks
from pagedkv.models.adapter import Adapter


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("case", range(30))
def test_random_traffic(seed, case, caching, behind):
    """Arrivals, shared prefixes, chunks, several answers, calls and priorities, adapters, aborts, ends early, late and in error,
    both kinds of preemption, in all mixes."""
    rng = random.Random(f"{seed} {case}")
    block_size, num_blocks = rng.choice([1, 2, 4, 16]), rng.choice([12, 20, 60])
    num_seqs = rng.choice([1, 3, 8])
    budget = num_seqs + rng.choice([0, 1, 5, 100])
    num_host_blocks = rng.choice([0, 8, 100])
    max_loras = rng.choice([0, 1, 2, 5])
    adapters = [None] + [Adapter(bytes([i]), {}) for i in range(4 if max_loras else 0)]
    print(f"{num_blocks}+{num_host_blocks} x {block_size}, {num_seqs} sequences, budget {budget}")
    engine = Engine(
        num_blocks, block_size, caching=caching, num_seqs=num_seqs, budget=budget, behind=behind,
        num_host_blocks=num_host_blocks, max_loras=max_loras,
    )
    engine.bad_tokens = frozenset(rng.sample(range(1000), rng.choice([0, 20])))
    common = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    calls = [(-1 - i, rng.choice([0, 0, 1])) for i in range(3)]
    for _ in range(25):
        prompt = rng.choice(common)[: rng.randint(0, 40)] + [rng.randrange(50) for _ in range(rng.randint(1, 8))]
        eos = frozenset(rng.sample(range(1000), rng.choice([0, 30, 300])))
        try:
            call, priority = rng.choice([*calls, (None, rng.choice([0, 0, -1, 1]))])
            num_siblings = rng.choice([0, 0, 0, 1, 4])
            adapter = rng.choice(adapters)
            engine.submit(prompt, rng.randint(1, 30), eos, num_siblings, call=call, priority=priority, adapter=adapter)
        except OutOfBlocks:
            continue
        if rng.random() < 0.1:
            prompt = rng.choice(engine.sequences).prompt
            engine.abort([seq for seq in engine.sequences if seq.prompt is prompt and seq.finish_reason is None])
        if rng.random() < 0.5 and engine.scheduler.has_work:
            engine.step()
    engine.finish()
    assert not engine.scheduler.queues.adapters._num_running


def test_decodes_come_first_and_prompts_are_chunked():
    engine = Engine(100, 4, num_seqs=4, budget=10)
    short, long = engine.submit([1, 2, 3], 20), engine.submit(list(range(100, 135)), 3)
    step = engine.step()
    assert [(seq.id, start, n) for seq, start, n in zip(step.sequences, step.starts, step.lengths, strict=True)] == [
        (short.id, 0, 3),
        (long.id, 0, 7),
    ]
    assert step.sampled == [0]
    for start in (7, 16, 25, 34):
        step = engine.step()
        assert (step.num_decodes, step.sequences, step.starts[1]) == (1, [short, long], start)
    assert step.sampled == [0, 1]  # only the last chunk of a prompt samples
    engine.finish()


def test_a_fully_cached_prompt_computes_its_last_token_only():
    engine = Engine(20, 4)
    engine.submit(list(range(8)), 1)
    engine.finish()
    again = engine.submit(list(range(8)), 1)
    step = engine.step()
    assert (step.starts, step.lengths, again.num_cached) == ([7], [1], 8)
    engine.finish()


def test_max_num_seqs_bounds_the_running_set():
    """Not only the sequences of one step, or the tail starves with its pages. A prompt in chunks has a seat, too."""
    engine = Engine(200, 4, num_seqs=2, budget=4)
    for i in range(6):
        engine.submit([100 * i + j for j in range(30)], 5)
    while engine.scheduler.has_work:
        engine.step()
        assert engine.manager.stats()["num_seqs"] <= 2
    engine.finish()


def test_equal_prompts_of_one_step_are_computed_once():
    """The others wait for the first one and then hit; a prompt is not prefilled twice."""
    engine = Engine(200, 4, num_seqs=8, budget=16)
    sequences = [engine.submit(list(range(40)), 4) for _ in range(5)]
    engine.finish()
    # Chunks of 16, 16 and 8 tokens; then the last token of each of the four, and every sampled token but the last.
    assert engine.num_computed == 40 + 4 * 1 + 5 * 3
    assert [seq.num_cached for seq in sequences] == [0, 40, 40, 40, 40]


def test_waiting_for_a_prefix_lets_others_pass():
    engine = Engine(200, 4, num_seqs=8, budget=64)
    first, second = engine.submit(list(range(40)), 4), engine.submit(list(range(40)), 4)
    other = engine.submit([7] * 10, 4)
    assert engine.step().sequences == [first, other]
    assert second in engine.step().sequences
    engine.finish()


def test_who_waits_for_a_prefix_is_not_forgotten():
    """The one who computes it may be done with it, and gone, sooner than its length says."""
    for num_computed in range(1, 65):
        engine = Engine(20, 64, num_seqs=2, budget=8)
        engine.submit(list(range(64)), 1)
        while engine.sequences[0].num_computed < num_computed and engine.scheduler.has_work:
            engine.step()
        second = engine.submit(list(range(64)) + [5], 1)
        engine.finish()
        assert second.num_cached == 64


def test_a_prompt_is_not_hashed_again_at_every_attempt(monkeypatch):
    """Neither while it waits for a prefix in many chunks nor while the pool is full."""
    engine = Engine(64, 4, num_seqs=4, budget=4)
    attempts = {"match": 0, "allocate": 0}

    class Counting:
        def __init__(self, manager):
            self.__dict__["manager"] = manager

        def __getattr__(self, name):
            if name in attempts:
                attempts[name] += 1
            return getattr(self.manager, name)

        def __setattr__(self, name, value):
            setattr(self.manager, name, value)

    scheduler = engine.scheduler
    scheduler.manager = scheduler.queues.manager = Counting(engine.manager)
    engine.submit(list(range(120)), 40)
    engine.submit(list(range(120)), 40)  # waits for 30 chunks
    engine.submit([9] * 200, 3)  # does not fit until the others are gone
    engine.finish()
    assert engine.scheduler.step_number > 100
    assert 3 <= attempts["allocate"] <= 10 and 1 <= attempts["match"] <= 10, attempts


def test_one_step_behind_costs_nothing_where_lengths_say_the_end():
    """The same steps as with every token known at once: no step is one too many, and pages come back as early."""
    plans = []
    for behind in (0, 1):
        engine = Engine(10, 2, num_seqs=3, budget=8, behind=behind)
        rng = random.Random(3)
        for _ in range(12):
            engine.submit([rng.randrange(50) for _ in range(rng.randint(1, 6))], rng.randint(1, 9))
        plan = []
        while engine.scheduler.has_work or engine.in_flight:
            step = engine.step()
            if step.sequences:
                plan.append([(seq.id, n) for seq, n in zip(step.sequences, step.lengths, strict=True)])
        plans.append(plan)
        assert engine.scheduler.queues.num_preemptions > 0
        engine.finish()
    assert plans[0] == plans[1]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_sequence_that_arrives_beside_a_batch_that_goes_on(behind):
    engine = Engine(20, 2, behind=behind, caching=False)
    first = engine.submit([1, 2, 3], 9)
    for _ in range(4):
        engine.step()
    second = engine.submit([4, 5, 6, 7], 9)
    step = engine.step()
    assert (step.sequences, step.lengths, step.num_decodes) == ([first, second], [1, 4], 1)
    engine.finish()


def test_the_token_behind_an_early_end_is_dropped():
    engine = Engine(20, 2, behind=1, caching=False)
    first = next_token([1, 2, 3])
    ends = engine.submit([1, 2, 3], 9, frozenset([first]))
    goes_on = engine.submit([4, 5, 6, 7], 9)
    engine.step()
    step = engine.step()  # its tokens are not known yet, so both decode
    assert step.sequences == [ends, goes_on] and step.sources.tolist() == [0, 1]
    assert (list(ends.tokens[3:]), ends.finish_reason) == ([first], "stop")
    assert engine.manager.stats()["num_seqs"] == 1  # its pages are free while the step that needs none of them runs
    step = engine.step()
    assert (step.sequences, step.sources.tolist(), step.known) == ([goes_on], [1], [])
    engine.finish()
    assert list(ends.tokens[3:]) == [first]


def test_the_first_token_under_load_waits_for_its_chunks_only():
    """Prompts are computed beside the decodes, in as many steps as the token budget takes."""
    engine = Engine(400, 4, num_seqs=8, budget=16, behind=1, caching=False)
    for i in range(6):
        engine.submit([i], 200)
    for _ in range(5):
        engine.step()
    seq = engine.submit(list(range(95)), 5)
    for _ in range(10):  # 6 decodes leave room for 10 prompt tokens
        step = engine.step()
        assert step.num_decodes == 6 and step.num_tokens <= 16
    assert not seq.tokens[95:]
    engine.step()  # the host is one step behind
    assert len(seq.tokens) == 96
    engine.finish()


@pytest.mark.parametrize("behind", [0, 1])
def test_abort_gives_all_pages_back(behind):
    engine = Engine(50, 4, behind=behind)
    for i in range(12):
        engine.submit([i] * 10, 10)
    engine.step()
    engine.abort(engine.sequences)
    assert not engine.scheduler.has_work
    assert engine.manager.num_free_blocks == 50 and engine.manager.stats()["num_seqs"] == 0
    engine.manager.check()


def test_step_arrays_of_an_odd_mix():
    """The plan, and what prepare() makes of it, spelled out once."""
    engine = Engine(50, 4, num_seqs=3, budget=5)
    engine.submit([1, 2, 3], 5)
    engine.step()
    engine.submit([4, 5, 6, 7, 8, 9], 5)
    step = engine.scheduler.schedule()
    arrays = engine.manager.prepare([seq.id for seq in step.sequences], step.starts, step.lengths)
    np.testing.assert_array_equal(arrays.positions, [3, 0, 1, 2, 3])
    np.testing.assert_array_equal(arrays.context_lens, [4, 4])
    np.testing.assert_array_equal(arrays.cu_seqlens_q, [0, 1, 5])
    np.testing.assert_array_equal(arrays.slot_mapping // 4, np.repeat(arrays.block_tables[:, 0], [1, 4]))
    assert step.sampled == [0]
