"""pagedkv.compat.nanovllm: its block manager in a scheduler like nano-vllm's, its store, and nano-vllm's own files.

PAGEDKV_NANO_VLLM=FOLDER, a checkout of nano-vllm (bb823b3), adds tests that import its files as they are.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagedkv
from pagedkv.compat.nanovllm import BlockManager, store_kvcache

EXAMPLES = Path(__file__).parents[1] / "examples"


class Seq:
    """A sequence with the attributes that nano-vllm's has."""

    def __init__(self, seq_id: int, token_ids: list[int]):
        self.seq_id, self.token_ids, self.block_table = seq_id, list(token_ids), []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class Pool:
    """What lies in every slot: the tokens up to and including the one whose KV was written there."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size, self.slots = block_size, {}
        self.prefixes = set()  # of full computed pages, all that ever were

    def write(self, seq: Seq) -> None:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        for i in range(seq.num_cached_tokens, end):
            self.slots[self.slot(seq, i)] = tuple(seq.token_ids[: i + 1])
        self.prefixes.update(tuple(seq.token_ids[:i]) for i in range(self.block_size, end + 1, self.block_size))

    def check(self, seq: Seq, num_tokens: int) -> None:
        assert len(seq.block_table) == -(-len(seq) // self.block_size)
        for i in range(num_tokens):
            assert self.slots[self.slot(seq, i)] == tuple(seq.token_ids[: i + 1]), f"token {i} of {seq.seq_id}"

    def slot(self, seq: Seq, i: int) -> int:
        return seq.block_table[i // self.block_size] * self.block_size + i % self.block_size

    def cached_blocks(self, seq: Seq) -> int:
        """If nothing was ever evicted."""
        count = 0
        while (count + 1) * self.block_size < len(seq) and (
            tuple(seq.token_ids[: (count + 1) * self.block_size]) in self.prefixes
        ):
            count += 1
        return count


class Scheduler:
    """Requests served as nano-vllm's scheduler serves them: prefill first, in chunks, preemption of the last."""

    def __init__(self, num_blocks: int, block_size: int, chunk: int):
        self.manager, self.pool = BlockManager(num_blocks, block_size), Pool(num_blocks, block_size)
        self.num_blocks, self.block_size, self.chunk = num_blocks, block_size, chunk
        self.waiting, self.running, self.num_preempted, self.num_hits = [], [], 0, 0

    def compute(self, seq: Seq, num_tokens: int) -> None:
        seq.num_scheduled_tokens = num_tokens
        self.pool.check(seq, seq.num_cached_tokens)
        self.pool.write(seq)
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens += num_tokens

    def admit(self) -> bool:
        seq = self.waiting[0]
        if not seq.block_table:
            found = self.manager.can_allocate(seq)
            if found < 0:
                return False
            most = self.pool.cached_blocks(seq)
            assert found == most if self.num_preempted == 0 and self.is_never_full else found <= most
            self.manager.allocate(seq, found)
            assert seq.num_cached_tokens == found * self.block_size < len(seq)
            self.num_hits += found
        self.compute(seq, min(self.chunk, len(seq) - seq.num_cached_tokens))
        if seq.num_cached_tokens == len(seq):
            self.running.append(self.waiting.pop(0))
        return True

    def decode(self, rng: random.Random) -> None:
        for seq in list(self.running):
            if seq not in self.running:
                continue
            seq.token_ids.append(rng.randrange(2))  # what the step before has sampled
            while not self.manager.can_append(seq):
                victim = self.running.pop()
                self.manager.deallocate(victim)
                assert not victim.block_table and victim.num_cached_tokens == 0
                self.waiting.insert(1 if self.waiting and self.waiting[0].block_table else 0, victim)
                self.num_preempted += 1
                if victim is seq:
                    break
            else:
                self.manager.may_append(seq)
                self.compute(seq, 1)
                if rng.random() < 0.05 or len(seq) == self.num_blocks * self.block_size:
                    self.manager.deallocate(seq)
                    self.running.remove(seq)

    def run(self, prompts: list[list[int]], rng: random.Random) -> None:
        used = sum(-(-(len(prompt) + 100) // self.block_size) for prompt in prompts)
        self.is_never_full = used < self.num_blocks
        for i, prompt in enumerate(prompts):
            self.waiting.append(Seq(i, prompt))
        for _ in range(100_000):
            if not self.waiting and not self.running:
                break
            if not (self.waiting and rng.random() < 0.7 and self.admit()):
                self.decode(rng)
        assert not self.waiting and not self.running, "not all were served"
        assert self.manager.manager.num_free_blocks == self.num_blocks
        self.manager.manager.check()


@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("pages", ["few", "many"])
def test_every_page_holds_what_its_sequences_wrote(seed, block_size, pages):
    """Prompts of two tokens, with shared beginnings and equal ones: what a hit or a page gives must be the sequence's."""
    rng = random.Random(seed)
    hits = preempted = 0
    for _ in range(20):
        beginnings = [[rng.randrange(2) for _ in range(rng.randrange(6 * block_size))] for _ in range(3)]
        prompts = [
            rng.choice(beginnings) + [rng.randrange(2) for _ in range(rng.randint(1, 2 * block_size))] for _ in range(12)
        ]
        scheduler = Scheduler(10 if pages == "few" else 12 * (8 + 200 // block_size), block_size, rng.choice([5, 1000]))
        scheduler.run(prompts, rng)
        hits, preempted = hits + scheduler.num_hits, preempted + scheduler.num_preempted
    assert hits > 0
    assert (preempted > 0) == (pages == "few")


def test_a_prompt_of_full_cached_pages_keeps_its_last_page_to_compute():
    manager, first, second = BlockManager(6, 4), Seq(1, range(8)), Seq(2, range(8))
    assert manager.can_allocate(first) == 0
    manager.allocate(first, 0)
    first.num_scheduled_tokens = 8
    manager.hash_blocks(first)
    assert manager.can_allocate(second) == 1  # theirs, too, never takes the last page
    manager.allocate(second, 1)
    assert second.num_cached_tokens == 4
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    assert manager.can_allocate(Seq(3, range(100, 116))) == -1  # four pages, of six less three
    assert manager.can_allocate(Seq(3, range(100, 112))) == 0


def test_bad_calls():
    with pytest.raises(ValueError, match="block_size is 1 but must be at least 2"):
        BlockManager(4, 1)
    manager, seq = BlockManager(2, 4), Seq(7, range(5))
    with pytest.raises(ValueError, match="num_cached_blocks is 1 but 0 are in the cache"):
        manager.allocate(seq, 1)
    manager.allocate(seq, 0)
    with pytest.raises(ValueError, match="sequence 7 has pages already"):
        manager.allocate(seq, 0)
    with pytest.raises(pagedkv.OutOfBlocks):
        manager.allocate(Seq(8, range(5)), 0)
    with pytest.raises(KeyError):
        manager.deallocate(Seq(9, range(5)))


def test_store_takes_views_of_a_fused_projection(rng, device):
    torch = pytest.importorskip("torch", reason="the tensors are PyTorch's")
    qkv = torch.from_numpy(rng.standard_normal((7, 8, 64), np.float32)).to(device)
    k_cache, v_cache = torch.zeros(2, 3, 16, 2, 64, device=device)[:, :]
    slots = torch.tensor([3, -1, 47, 16, -1, 0, 31], dtype=torch.int32, device=device)
    store_kvcache(qkv[:, 4:6], qkv[:, 6:], k_cache, v_cache, slots)
    expected = torch.zeros(2, 48, 2, 64, device=device)
    kept = slots >= 0
    expected[0, slots[kept].long()], expected[1, slots[kept].long()] = qkv[kept, 4:6], qkv[kept, 6:]
    assert torch.equal(torch.stack([k_cache, v_cache]).flatten(1, 2), expected)


# --- nano-vllm's own files, in an interpreter of their own

HEADER = """
import random, sys, types
from importlib.util import find_spec
import torch
if find_spec("triton") is None:  # a machine without a GPU: only decorators are used, of what is not called
    torch.compile = lambda function: function
    sys.modules["triton"] = types.ModuleType("triton")
    sys.modules["triton.language"] = types.ModuleType("triton.language")
    sys.modules["triton"].jit, sys.modules["triton"].language = lambda function: function, sys.modules["triton.language"]
    sys.modules["triton.language"].constexpr = int
checkout, examples, seed, device = sys.argv[1:]
sys.path.insert(0, examples)
import nano_vllm
rng, _ = random.Random(int(seed)), torch.manual_seed(int(seed))
"""

SCHEDULERS = """
import importlib, types
import pagedkv.compat.flash_attn
import pagedkv.compat.nanovllm as ours
sys.path.insert(0, checkout)
sys.modules["flash_attn"] = pagedkv.compat.flash_attn
theirs = importlib.import_module("nanovllm.engine.sequence")  # loads all of the checkout, with its own block manager
from nanovllm.engine import block_manager, scheduler
from nanovllm.sampling_params import SamplingParams
theirs.Sequence.block_size = 8

def serve(manager, num_blocks):
    draw = random.Random(int(seed))
    scheduler.BlockManager = manager
    config = types.SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=40, eos=0, kvcache_block_size=8,
                                   num_kvcache_blocks=num_blocks)
    running = scheduler.Scheduler(config)
    beginnings = [[draw.randrange(2) for _ in range(draw.randrange(1, 40))] for _ in range(3)]
    for i in range(30):
        prompt = draw.choice(beginnings) + [draw.randrange(2) for _ in range(draw.randint(0, 20))]
        running.add(theirs.Sequence(prompt, SamplingParams(max_tokens=draw.randint(1, 30), ignore_eos=True)))
    first, steps = running.waiting[0].seq_id, []
    while not running.is_finished():
        seqs, is_prefill = running.schedule()
        steps.append((is_prefill, [(s.seq_id - first, s.num_scheduled_tokens, s.num_cached_tokens) for s in seqs]))
        assert all(len(s.block_table) == s.num_blocks for s in seqs)
        running.postprocess(seqs, [1] * len(seqs), is_prefill)
    return steps

assert block_manager.BlockManager is not ours.BlockManager
original, mine = serve(block_manager.BlockManager, 400), serve(ours.BlockManager, 400)
assert mine == original, "the schedules differ"
assert sum(cached for is_prefill, seqs in mine if is_prefill for _, _, cached in seqs) > 0
few = serve(ours.BlockManager, 14)
assert len(few) > len(mine), "nothing was preempted"
print("the same", len(mine), "steps")
"""

ATTENTION = """
import numpy as np
nano_vllm.put_in_place(checkout)
from nanovllm.engine import scheduler
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import set_context
import pagedkv
assert scheduler.BlockManager is pagedkv.compat.nanovllm.BlockManager
HEADS, KV_HEADS, DIM, SIZE = 6, 2, 64, 16
DTYPE = torch.float16 if device != "cpu" else torch.float32
ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
layer = Attention(HEADS, DIM, DIM**-0.5, KV_HEADS)
keys = {}  # of sequence 0, 1, 2: what was computed so far

def attend(queries, sees):
    "Plain attention of each sequence's queries, the last of its tokens."
    outs = []
    for (k, v), q in zip(sees, queries):
        k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
        mask = torch.ones(len(q), len(k), device=device).tril(len(k) - len(q)) == 0
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, -torch.inf).softmax(-1), v))
    return torch.cat(outs)

def step(lens, tables, is_prefill):
    "New tokens of all sequences through the layer, as nano-vllm's model runner calls it."
    qkv = torch.randn(sum(lens), HEADS + 2 * KV_HEADS, DIM, device=device, dtype=DTYPE)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    starts = np.cumsum([0] + lens)
    past = [len(keys[i][0]) if i in keys else 0 for i in range(len(lens))]
    for i, (begin, end) in enumerate(zip(starts, starts[1:])):
        old = keys.get(i, (k[:0], v[:0]))
        keys[i] = torch.cat([old[0], k[begin:end]]), torch.cat([old[1], v[begin:end]])
    slots = [tables[i][j // SIZE] * SIZE + j % SIZE for i, n in enumerate(lens) for j in range(past[i], past[i] + n)]
    expected = attend(q.split(lens), [keys[i] for i in range(len(lens))])
    context = [p + n for p, n in zip(past, lens)]
    padded = ints([table + [-1] * (4 - len(table)) for table in tables])
    if is_prefill:
        set_context(True, ints(starts.tolist()), ints(np.cumsum([0] + context).tolist()), max(lens), max(context),
                    ints(slots), None, padded if any(past) else None)
        out = layer(q, k, v)
    else:  # two rows of padding, as in a CUDA graph for a larger batch
        set_context(False, slot_mapping=ints(slots + [-1, -1]), context_lens=ints(context + [0, 0]),
                    block_tables=torch.cat([padded, padded[:2]]))
        q, k, v = (torch.cat([x, x[:2]]) for x in (q, k, v))
        out = layer(q, k, v)[: len(lens), 0]
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)

step([9, 1, 40], [[0], [1], [2, 3, 4]], True)  # the warm-up, which has no cache yet
keys.clear()
cache = torch.full((2, 12, SIZE, KV_HEADS, DIM), torch.nan, device=device, dtype=DTYPE)
layer.k_cache, layer.v_cache = cache
tables = [[5, 11, 3], [7, 0], [1, 10, 8, 2]]
step([17, 1, 47], tables, True)
step([5, 20, 1], tables, True)  # behind what the cache has
for _ in range(6):
    step([1, 1, 1], tables, False)
print("attention agrees")
"""


@pytest.fixture
def checkout() -> str:
    pytest.importorskip("torch", reason="nano-vllm is written in PyTorch")
    pytest.importorskip("transformers", reason="nano-vllm imports it")
    pytest.importorskip("pagedkv.compat.flash_attn", reason="nano-vllm imports flash_attn")
    if "PAGEDKV_NANO_VLLM" not in os.environ:
        pytest.skip("PAGEDKV_NANO_VLLM names no checkout of nano-vllm")
    return os.environ["PAGEDKV_NANO_VLLM"]


def run(program: str, checkout: str, seed: int, device: str) -> str:
    command = [sys.executable, "-c", HEADER + program, checkout, str(EXAMPLES), str(seed), device]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_their_scheduler_decides_the_same_with_either_block_manager(checkout, seed):
    pytest.importorskip("xxhash", reason="their own block manager imports it")
    assert run(SCHEDULERS, checkout, seed, "cpu").startswith("the same")


def test_their_attention_layer(checkout, seed, device):
    assert run(ATTENTION, checkout, seed, device) == "attention agrees\n"
