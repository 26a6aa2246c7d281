"""The fast path: a batch that goes on gives the same steps and tokens as one that is planned anew."""

from __future__ import annotations

import random

from pagedkv import BlockManager, SamplingParams
from pagedkv.engine.scheduling.scheduler import Scheduler
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step


def make_scheduler(num_blocks: int) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4), max_num_seqs=6, max_num_batched_tokens=40, max_model_len=400)


def plan_of(step: Step) -> tuple:
    return (
        step.ids, step.starts, step.ends, step.lengths, step.sampled, step.num_decodes, step.sources.tolist(), step.known,
        [seq.id for seq in step.receivers], step.num_tokens, step.only_decodes,
    )  # fmt: skip


def serve(seed: int, num_blocks: int, behind: int, *, is_slow: bool) -> tuple[list, dict, list[bool]]:
    """All plans, the tokens of each sequence, and which steps were of the same batch."""
    rng, scheduler = random.Random(seed), make_scheduler(num_blocks)
    plans, in_flight, tokens, same = [], [], {}, []
    arrivals = {turn: number for number, turn in enumerate(rng.sample(range(150), 14))}
    for turn in range(600):
        if turn in arrivals:
            number = arrivals[turn]
            own = random.Random(number)
            eos = frozenset(own.sample(range(50), own.choice([0, 2])))
            prompt = [own.randrange(50) for _ in range(own.randint(1, 60))]
            params = SamplingParams(max_tokens=own.randint(1, 60), stop_token_ids=own.sample(range(50), own.choice([0, 1])))
            scheduler.queues.add(Sequence(number, prompt, params, 0, eos, 0.0))
        if is_slow:
            scheduler._last_step = Step()  # what the step before was is forgotten: nothing goes on by itself
        step = scheduler.schedule()
        if step.sequences:
            plans.append(plan_of(step))
            same.append(step.is_same_batch)
            scheduler.commit(step)
            in_flight.append(step)
        while len(in_flight) > (behind if step.sequences else 0):
            done = in_flight.pop(0)
            drawn = [random.Random(seq.id * 1000 + seq.num_known).randrange(50) for seq in done.receivers]
            for seq in scheduler.update(done, drawn, float(turn)):
                tokens[seq.id] = (seq.new_tokens, seq.finish_reason)
        if not scheduler.has_work and not in_flight and turn > 150:
            break
    assert len(tokens) == 14 and not len(scheduler.manager)
    scheduler.manager.check()
    return plans, tokens, same


def test_the_same_plans_and_tokens(seed):
    num_same = 0
    for number in range(40):
        for num_blocks in (30, 200):
            for behind in (0, 1):
                fast = serve(seed + number, num_blocks, behind, is_slow=False)
                slow = serve(seed + number, num_blocks, behind, is_slow=True)
                assert fast[:2] == slow[:2] and not any(slow[2])
                num_same += sum(fast[2])
    assert num_same > 1000, "the fast path was not taken"


def test_a_batch_whose_ends_are_no_tokens_is_looked_at():
    """Texts and masks end an answer, too: such a batch has no end_ids."""
    scheduler = make_scheduler(50)
    seq = Sequence(0, [1, 2], SamplingParams(max_tokens=9, mask=lambda request, tokens: None), 0, frozenset(), 0.0)
    scheduler.queues.add(seq)
    for turn in range(6):
        step = scheduler.schedule()
        assert step.end_ids is None
        scheduler.commit(step)
        if turn == 4:
            seq.error = ValueError("its mask failed")
        finished = scheduler.update(step, [7], 0.0)
        if finished:
            break
    assert finished == [seq] and seq.finish_reason == "error" and len(seq.new_tokens) == 4
