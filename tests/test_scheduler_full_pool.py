"""The scheduler in a pool that is too small: what is refused, who gives way to whom, and what is kept free to grow."""

from __future__ import annotations

import pytest
from scheduled_engine import Engine, next_token

from pagedkv import BlockManager, OutOfBlocks


def test_what_never_fits_is_refused():
    engine = Engine(4, 4)
    with pytest.raises(OutOfBlocks, match="need 5 pages of 4 tokens but the pool has 4"):
        engine.submit([1] * 10, 8)
    engine.submit([1] * 10, 7)  # 17 tokens, but the last one is never computed
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.submit([], 5)
    engine.scheduler.max_model_len = 12
    with pytest.raises(ValueError, match="10 prompt tokens and 3 new ones exceed max_model_len=12"):
        engine.submit([1] * 10, 3)
    engine.finish()


def test_a_pool_that_somebody_else_fills():
    """No endless loop: an error, because nothing would ever free the pages."""
    engine = Engine(4, 4)
    engine.manager.allocate(1000, list(range(8)))
    engine.submit([1] * 12, 2)
    with pytest.raises(OutOfBlocks):
        engine.step()
    engine.scheduler.restart(engine.sequences)
    engine.scheduler.queues.add_answers(engine.sequences)
    engine.abort(engine.sequences)
    engine.submit([1] * 7, 5)
    with pytest.raises(OutOfBlocks):
        engine.finish()


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_thrash(caching):
    """In a pool for a third of the work, little is computed twice and the oldest always goes on."""
    engine = Engine(30, 4, caching=caching, num_seqs=16, budget=64)
    sequences = [engine.submit([100 * i + j for j in range(8)], 40) for i in range(12)]
    engine.finish()
    needed = sum(seq.max_num_tokens - 1 for seq in sequences)
    assert engine.scheduler.queues.num_preemptions > 0
    assert engine.num_computed < 2 * needed, f"{engine.num_computed} tokens computed for {needed}"
    assert max(seq.num_preemptions for seq in sequences) <= 4
    ends = [seq.finish_time for seq in sequences]
    assert ends == sorted(ends), "first come, first served"


@pytest.mark.parametrize("caching", [True, False])
def test_the_watermark_keeps_room_to_grow(caching):
    """Prompts that fill their pages wholly: without a watermark 15 of 60 are computed twice."""
    engine = Engine(64, 4, caching=caching, num_seqs=16, budget=64)
    for i in range(60):
        engine.submit([100 * i + j for j in range(60)], 6)
    engine.finish()
    assert engine.scheduler.queues.num_preemptions == 0


def test_watermark_blocks():
    manager = BlockManager(10, 1)
    manager.watermark_blocks = 8
    manager.allocate(1, range(4))  # alone: the watermark is kept for those who run, and nobody does
    manager.watermark_blocks = 3
    with pytest.raises(OutOfBlocks, match="4 more pages are needed but 3 of 10 can be given"):
        manager.allocate(2, range(10, 14))
    manager.watermark_blocks = 2
    manager.allocate(2, range(10, 14))
    manager.append(1, [50, 51])  # to grow it may be used
    with pytest.raises(ValueError, match="watermark_blocks is -1"):
        manager.watermark_blocks = -1
    with pytest.raises(TypeError):
        manager.watermark_blocks = 0.5
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del manager.watermark_blocks
    assert manager.watermark_blocks == 2


def test_preemption_takes_the_latest():
    engine = Engine(6, 2, num_seqs=3, caching=False)
    first, second = engine.submit([1, 2], 9), engine.submit([3, 4], 9)
    engine.finish()
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_token_that_arrives_after_its_sequence_was_preempted(num_host_blocks):
    """It goes on from that token, or ends with it, and is then neither admitted nor kept."""
    for eos in (frozenset(), frozenset([next_token([3, 4])])):
        engine = Engine(3, 2, num_seqs=2, caching=False, behind=1, num_host_blocks=num_host_blocks)
        engine.submit([1, 2], 5)
        second = engine.submit([3, 4], 4, eos)
        engine.step()
        engine.step()
        assert second.num_preemptions == 1 and second.is_swapped == bool(num_host_blocks)
        assert len(second.tokens) == 3 and (second in engine.scheduler.queues.waiting()) != bool(eos)
        engine.finish()


def test_swapping_computes_nothing_twice():
    for num_host_blocks, is_equal in ((0, False), (100, True)):
        engine = Engine(12, 4, num_seqs=4, caching=False, behind=1, num_host_blocks=num_host_blocks)
        sequences = [engine.submit([10 * i + j for j in range(9)], 12) for i in range(4)]
        engine.finish()
        assert engine.scheduler.queues.num_preemptions > 0
        assert (engine.num_computed == sum(len(seq.tokens) - 1 for seq in sequences)) == is_equal
