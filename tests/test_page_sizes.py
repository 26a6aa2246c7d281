"""Pages of 1 to 512 tokens: the allocator against its model, the KV of pages that are shared half full, the engine.

What the operations do with such pages is tested beside each of them (PAGE_SIZES in cases.py).
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from block_model import Model, OutOfPages
from cases import PAGE_SIZES
from checkpoints import VOCAB_SIZE, write_model
from model_oracle import poison
from pools import get, put

import pagedkv
from pagedkv import LLM, BlockManager, OutOfBlocks, SamplingParams, ops

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 6


class Both:
    """A BlockManager and its model, and a cache [blocks, block_size] of (salt, tokens) prefixes as in ..._state.py."""

    def __init__(self, rng, block_size: int) -> None:
        self.rng, self.size = rng, block_size
        self.manager = BlockManager(NUM_BLOCKS, block_size, num_host_blocks=NUM_HOST_BLOCKS)
        self.model = Model(NUM_BLOCKS, block_size, NUM_HOST_BLOCKS)

    def call(self, method: str, *args, ours) -> bool:
        """Whether both did it; else both refused."""
        trial = copy.deepcopy(self.model)
        try:
            expected = getattr(trial, method)(*args)
        except OutOfPages:
            with pytest.raises(OutOfBlocks):
                ours()
            return False
        result, self.model = ours(), trial
        assert method != "allocate" or [result] == expected
        return True

    def length(self) -> int:
        """Around whole pages, mostly."""
        return max(int(self.rng.integers(0, 4)) * self.size + int(self.rng.integers(-1, 2)), 0)

    def turn(self) -> None:
        rng, manager, seqs = self.rng, self.manager, self.model.seqs
        here = [seq_id for seq_id, seq in seqs.items() if not seq.is_swapped]
        choice = rng.integers(7)
        seq_id = int(rng.choice(here)) if here else None
        if choice == 0 or seq_id is None:
            new = next(i for i in range(1000) if i not in seqs)
            tokens = [int(i == rng.integers(2 * self.size)) for i in range(self.length())]
            self.call("allocate", {new: tokens}, b"", ours=lambda: manager.allocate(new, tokens))
        elif choice == 1:
            tokens = [0] * min(self.length(), 2 * self.size)
            self.call("append", {seq_id: tokens}, ours=lambda: manager.append(seq_id, tokens))
        elif choice == 2:
            end = int(rng.integers(seqs[seq_id].computed, seqs[seq_id].reserved + 1))
            self.call("commit", seq_id, end, ours=lambda: manager.commit(seq_id, end))
        elif choice == 3 and len(seqs) < 6:
            new = next(i for i in range(1000) if i not in seqs)
            self.call("fork", seq_id, new, ours=lambda: manager.fork(seq_id, new))
        elif choice == 4:
            end = int(rng.integers(len(seqs[seq_id].tokens) + 1))
            self.call("truncate", seq_id, end, ours=lambda: manager.truncate(seq_id, end))
        elif choice == 5:
            self.call("free", seq_id, ours=lambda: manager.free(seq_id))
        else:
            seq_id = int(rng.choice(list(seqs)))
            method = "swap_in" if seqs[seq_id].is_swapped else "swap_out"
            self.call(method, seq_id, ours=lambda: getattr(manager, method)(seq_id))

    def check(self) -> None:
        self.manager.check()
        stats = self.manager.stats()
        model = self.model
        expected = {
            "num_seqs": len(model.seqs), "used": model.used(), "cached": len(model.cached), "free": model.free_pages,
            "host_free": model.host_free, "hit_tokens": model.hit_tokens, "evictions": model.evictions,
            "copies": model.copies, "waste_tokens": model.waste(),
        }  # fmt: skip
        assert {name: stats[name] for name in expected} == expected
        for seq_id, seq in model.seqs.items():
            assert self.manager.num_tokens(seq_id) == len(seq.tokens)
            if seq.is_swapped or not seq.tokens:
                continue
            table, end = self.manager.block_table(seq_id), len(seq.tokens)
            step = self.manager.prepare([seq_id], [end - 1], [1])
            page, offset = table[(end - 1) // self.size], (end - 1) % self.size
            is_computed = end <= seq.computed or seq.pages[(end - 1) // self.size].is_computed
            assert step.slot_mapping.tolist() == [-1 if is_computed else page * self.size + offset]
            assert step.positions.tolist() == [end - 1] and step.context_lens.tolist() == [end]


@pytest.mark.parametrize("block_size", PAGE_SIZES)
def test_the_allocator_against_its_model(rng, block_size):
    both = Both(rng, block_size)
    for _ in range(250):
        both.turn()
        both.check()
    stats = both.manager.stats()
    assert stats["copies"] + stats["evictions"] + stats["hit_tokens"] > 0


# --- pages that are shared half full


class Pages:
    """Sequences whose tokens have random KV, in real caches on a device and on the host."""

    def __init__(self, rng, device: str, block_size: int) -> None:
        self.rng, self.device, self.size = rng, device, block_size
        self.manager = BlockManager(12, block_size, num_host_blocks=12)
        empty = np.full((12, block_size, 1, 8), np.nan)
        self.here = [put(empty, device, "float32") for _ in "kv"]
        self.host = [put(empty, "cpu", "float32") for _ in "kv"]
        self.kv: dict[int, list[np.ndarray]] = {}  # a row [2, 8] for each token

    def compute(self, seq_id: int, *, commit: bool = True) -> None:
        """All tokens that have no KV yet."""
        rows, end = self.kv[seq_id], self.manager.num_tokens(seq_id)
        start = len(rows)
        if start == end:
            return
        step = self.manager.prepare([seq_id], [start], [end - start])
        rows += list(self.rng.standard_normal((end - start, 2, 1, 8)).astype(np.float32))
        new = np.array(rows[start:])
        slots = put(step.slot_mapping.copy(), self.device)
        pagedkv.store_kvcache(*(put(np.ascontiguousarray(new[:, i]), self.device) for i in (0, 1)), *self.here, slots)
        if commit:
            self.manager.commit(seq_id, end)

    def append(self, seq_id: int, tokens: list[int], **options) -> int:
        """How many pages were copied."""
        copies = self.manager.append(seq_id, tokens)
        pagedkv.copy_blocks(self.here, copies)
        self.compute(seq_id, **options)
        return len(copies)

    def swap(self, seq_id: int) -> None:
        pagedkv.swap_blocks(self.here, self.host, self.manager.swap_out(seq_id))
        ops.synchronize(self.device)
        table = [self.manager.allocate(-1, [int(x) for x in self.rng.integers(9, 99, 3 * self.size)])]
        assert table == [0]
        self.kv[-1] = []
        self.compute(-1, commit=False)  # somebody else's, in what pages there are
        self.manager.free(-1)
        del self.kv[-1]
        pagedkv.swap_blocks(self.host, self.here, self.manager.swap_in(seq_id))
        ops.synchronize(self.device)

    def check(self) -> None:
        self.manager.check()
        caches = [get(cache) for cache in self.here]
        for seq_id, rows in self.kv.items():
            table = self.manager.block_table(seq_id)
            for i, row in enumerate(rows):
                place = table[i // self.size], i % self.size
                for cache, expected in zip(caches, row, strict=True):
                    assert np.array_equal(cache[place], expected), f"sequence {seq_id}, token {i}"


def fills(block_size: int) -> list[int]:
    """How full a page may be when it is shared."""
    return list(range(1, block_size + 1)) if block_size <= 16 else [1, 2, block_size // 2, block_size - 1, block_size]


@pytest.mark.parametrize("between", ["nothing", "commit", "swap the parent", "swap the child"])
@pytest.mark.parametrize(("block_size", "fill"), [(size, fill) for size in PAGE_SIZES for fill in fills(size)])
def test_two_write_behind_a_page_that_they_share(rng, device, block_size, fill, between):
    """A fork at every fill of the last page; then both append, in either order, to the end of the page and beyond."""
    pages, length = Pages(rng, device, block_size), block_size + fill
    pages.manager.allocate(1, list(range(length)))
    pages.kv[1] = []
    pages.compute(1, commit=between == "commit")
    pages.manager.fork(1, 2)
    pages.kv[2] = list(pages.kv[1])
    if between == "commit":
        assert pages.manager.num_computed(2) == length
        pages.manager.allocate(3, list(range(length)))  # shares the full pages, computes what is left of the last one
        pages.kv[3] = list(pages.kv[1])[: pages.manager.num_computed(3)]
        pages.compute(3)
    else:
        pages.manager.commit_batch([1, 2], [length, length])
    if between.startswith("swap"):
        pages.swap(1 if between.endswith("parent") else 2)
    pages.check()
    # Who is swapped comes back to pages of its own, full and cached ones apart: then nobody copies.
    is_shared = fill < block_size and not between.startswith("swap")
    copies = 0
    for seq_id in rng.permutation([1, 2]).tolist() + [1, 2]:
        copies += pages.append(seq_id, [100 + seq_id])
        pages.check()
    assert copies == is_shared
    for seq_id in rng.permutation([1, 2]).tolist():
        pages.append(seq_id, [int(x) for x in rng.integers(9, 99, block_size + 1)])
        pages.check()
    first, second = (pages.manager.block_table(seq_id)[1:] for seq_id in (1, 2))
    assert fill == block_size or not set(first) & set(second)


# --- the engine


def test_the_engine_gives_the_same_tokens(tmp_path, device):
    rng = np.random.default_rng(8)  # fixed: two logits may be as good as equal
    folder, common = write_model(tmp_path), rng.integers(VOCAB_SIZE, size=110).tolist()
    prompts = [
        common[: rng.integers(1, 110)] + rng.integers(VOCAB_SIZE, size=rng.integers(1, 9)).tolist() for _ in range(9)
    ]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = {}
    for block_size in PAGE_SIZES:
        pages = {"block_size": block_size, "num_blocks": max(600 // block_size, 3), "max_num_seqs": 8}
        with LLM(folder, device=device, **pages, swap_space=1 << 20, max_num_batched_tokens=64) as llm:
            poison(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outputs += llm.generate(prompts, params, use_tqdm=False)  # from the cache, where pages are small enough
            assert llm.manager.num_free_blocks == llm.manager.num_blocks
        assert all(output.error is None for output in outputs)
        tokens[block_size] = [output.token_ids for output in outputs]
    assert all(each == tokens[16] for each in tokens.values()) and tokens[16][:9] == tokens[16][9:]
