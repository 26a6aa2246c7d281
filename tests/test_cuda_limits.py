"""What only a GPU can get wrong: ids in device arrays that are out of range, CUDA graphs whose inputs change between
replays, pools beyond 2^31 elements, several devices, memory that runs out."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import oracle
import pytest
from cases import AttentionCase
from pools import UNUSED_PAGE, forget, get, make_batch

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu
MIXED = AttentionCase("mixed", (1, 150, 0, 65, 1, 2), (313, 200, 9, 64, 0, 71), head_dim=128, dtype="bfloat16")
DECODE = AttentionCase("decode", (1,) * 5, (1, 300, 64, 0, 1000), num_q_heads=16, num_kv_heads=4, dtype="float16")
KINDS = [MIXED, replace(MIXED, name="mixed, fp8", cache_dtype="float8_e4m3fn"), replace(MIXED, name="mixed, float32", dtype="float32"),
         DECODE, replace(DECODE, name="decode, fp8", cache_dtype="float8_e4m3fn")]  # fmt: skip
of_every_kind = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


class Inputs:
    """Tensors of a batch on the GPU that other batches of as many tokens and sequences can be copied into."""

    NUM_BLOCKS, TABLE_WIDTH = 160, 80

    def __init__(self, torch, case, device="cuda:0"):
        def empty(*shape, dtype):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

        self.torch, self.longest_query = torch, case.num_tokens
        seqs, pool = len(case.query_lens), (self.NUM_BLOCKS, case.block_size, case.num_kv_heads, case.head_dim)
        self.q = empty(case.num_tokens, case.num_q_heads, case.head_dim, dtype=case.dtype)
        self.k_cache, self.v_cache = (empty(*pool, dtype=case.cache_dtype or case.dtype) for _ in "kv")
        self.block_tables = empty(seqs, self.TABLE_WIDTH, dtype="int32")
        self.context_lens, self.cu_seqlens_q = empty(seqs, dtype="int32"), empty(seqs + 1, dtype="int32")
        self.out = self.q.clone()

    def set(self, batch):
        """Copies a batch in; what is larger here is poison. Returns self."""
        with np.errstate(invalid="ignore"):
            for to, values, filler in (
                (self.q, batch.q, np.nan), (self.k_cache, batch.k_cache, np.nan), (self.v_cache, batch.v_cache, np.nan),
                (self.block_tables, batch.block_tables, UNUSED_PAGE), (self.context_lens, batch.context_lens, 0),
                (self.cu_seqlens_q, batch.cu_seqlens_q, batch.cu_seqlens_q[-1])):  # fmt: skip
                whole = np.full(tuple(to.shape), filler, np.float32 if values.dtype.kind == "f" else np.int32)
                whole[tuple(slice(n) for n in values.shape)] = values
                to.copy_(self.torch.from_numpy(whole))
        return self

    def call(self, stream=None):
        pagedkv.paged_attention_fwd(
            self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens, cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.longest_query, out=self.out, stream=stream)  # fmt: skip

    def run(self):
        self.out.fill_(7.0)
        self.call()

    def check(self, batch):
        expected, _ = batch.expected()
        count, tolerance = len(batch.q), oracle.tolerance(batch.case.dtype)
        out = get(self.out.cpu())
        np.testing.assert_allclose(out[:count], expected, rtol=tolerance, atol=tolerance)
        assert (out[count:] == 7.0).all(), "rows that no sequence owns were written"

    def capture(self, graphs):
        """What run() does, as a graph's replay: torch's or ours."""
        self.run()
        if graphs == "torch":
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                self.call()
            replay_graph = graph.replay
        else:
            stream = pagedkv.Stream()
            with pagedkv.Graph().capture(stream) as graph:
                self.call(stream)
            replay_graph = partial(graph.replay, self.torch.cuda.current_stream())

        def replay():
            self.out.fill_(7.0)
            replay_graph()

        return replay


def other_lengths(case, rng):
    """The same numbers of sequences and at most as many tokens, shared out at random; some sequences get none or one."""
    seqs, tokens = len(case.query_lens), case.num_tokens - int(rng.integers(0, 3))
    cuts = np.sort(rng.choice([0, tokens, *rng.integers(0, tokens + 1, seqs)], seqs - 1))
    query_lens = np.diff(np.concatenate([[0], cuts, [tokens]]))
    context_lens = [int(n + rng.integers(0, 200)) if rng.random() < 0.8 else int(rng.integers(0, n + 1)) for n in query_lens]
    return replace(case, query_lens=tuple(map(int, query_lens)), context_lens=tuple(context_lens))


@of_every_kind
@pytest.mark.parametrize("graphs", ["torch", "pagedkv"])
def test_a_graph_follows_lengths_and_tables(torch, case, graphs, rng):
    inputs = Inputs(torch, case)
    batch = make_batch(case, rng)
    replay = inputs.set(batch).capture(graphs)
    for _ in range(5):
        replay()
        inputs.check(batch)
        batch = make_batch(other_lengths(case, rng), rng)
        inputs.set(batch)


# --- ids that are out of range: masked, recorded, named


def spoil_a_page(inputs, batch, rng):
    """Returns what check_errors() must say; `batch` becomes what is left of it."""
    seq = int(rng.choice([s for s, n in enumerate(batch.case.query_lens) if n and batch.case.context_lens[s]]))
    entry = int(rng.integers(0, -(-batch.case.context_lens[seq] // batch.case.block_size)))
    page = int(rng.choice([inputs.NUM_BLOCKS, inputs.NUM_BLOCKS + 1, 2**31 - 1]))
    inputs.block_tables[seq, entry], batch.block_tables[seq, entry] = page, -1
    return f"block_tables: sequence {seq} has block {page} but it must be below {inputs.NUM_BLOCKS} .*cuda:0"


def spoil_a_context(inputs, batch, rng):
    seq, capacity = int(rng.integers(len(batch.context_lens))), inputs.TABLE_WIDTH * batch.case.block_size
    context = int(rng.choice([-1, -(2**31), capacity + 1, 2**31 - 1]))
    inputs.context_lens[seq], batch.context_lens[seq] = context, 0 if context < 0 else capacity
    batch.block_tables = np.pad(batch.block_tables, ((0, 0), (0, inputs.TABLE_WIDTH - batch.block_tables.shape[1])))
    batch.block_tables[seq] = -1  # nothing is to be seen of that sequence
    inputs.block_tables[seq] = -1
    return f"context_lens: sequence {seq} has {context} keys but it must be at least 0 and below {capacity + 1} "


@of_every_kind
@pytest.mark.parametrize("spoil", [spoil_a_page, spoil_a_context])
@pytest.mark.parametrize("graphs", [None, "torch", "pagedkv"])
def test_bad_ids_are_masked_and_named(torch, case, spoil, graphs, rng):
    inputs, batch = Inputs(torch, case), make_batch(case, rng)
    inputs.set(batch)
    run = inputs.capture(graphs) if graphs else inputs.run
    for _ in range(3):
        batch = make_batch(case, rng)
        inputs.set(batch)
        message = spoil(inputs, batch, rng)
        run()
        inputs.check(batch)
        with pytest.raises(ValueError, match=message):
            ops.check_errors()
        ops.check_errors()  # told once
    batch = make_batch(case, rng)
    inputs.set(batch)
    run()
    inputs.check(batch)


@of_every_kind
@pytest.mark.parametrize("end", [-5, 10**6, 2**31 - 1])
def test_bad_query_ranges_are_named(torch, case, end, rng):
    """The two sequences beside it are left out, the others are answered."""
    inputs, batch = Inputs(torch, case), make_batch(case, rng)
    inputs.set(batch)
    seq = len(case.query_lens) - 2
    first = batch.cu_seqlens_q[seq]
    inputs.cu_seqlens_q[seq + 1] = end
    inputs.run()
    with pytest.raises(ValueError, match=f"cu_seqlens_q: sequence {seq} ends at {end}|cu_seqlens_q: sequence {seq + 1} "):
        ops.check_errors()
    expected, tolerance = batch.expected()[0][:first], oracle.tolerance(case.dtype)
    out = get(inputs.out.cpu())
    np.testing.assert_allclose(out[:first], expected, rtol=tolerance, atol=tolerance)
    assert (out[first:] == 7.0).all()


def test_bad_slots_are_skipped_and_named_after_a_replay(torch, rng):
    key, value = (torch.from_numpy(rng.standard_normal((5, 2, 8)).astype(np.float32)).cuda() for _ in "kv")
    caches = torch.zeros(2, 3, 4, 2, 8, device="cuda")
    slots = torch.tensor([3, 0, -1, 11, 5], device="cuda", dtype=torch.int32)
    pagedkv.store_kvcache(key, value, *caches, slots)
    expected = caches.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pagedkv.store_kvcache(key, value, *caches, slots)
    for bad in (12, 2**31 - 1):
        caches.zero_()
        slots[3] = bad
        graph.replay()
        with pytest.raises(ValueError, match=f"slot_mapping: token 3 has slot {bad} but it must be below 12"):
            ops.check_errors()
        expected[:, 2, 3] = 0
        assert torch.equal(caches, expected)


def test_a_graph_of_a_layer_follows_its_inputs(torch):
    """Tokens, positions and slots change, and fewer are left: what is behind them has slot -1. The bits of calls."""
    kinds = dict(device="cuda", dtype=torch.bfloat16)
    table, norms = torch.randn(50, 64, **kinds), torch.randn(3, 64, **kinds)
    weights, cos_sin = torch.randn(8 * 64, 64, **kinds), torch.randn(300, 64, device="cuda")
    caches = torch.zeros(2, 6, 16, 2, 64, **kinds)
    tokens, positions, slots, rows = (torch.zeros(9, device="cuda", dtype=torch.int32) for _ in range(4))

    def layer(stream=None):
        hidden = ops.embedding(tokens, table, stream=stream)
        normed = ops.rms_norm(hidden, norms[0], stream=stream)
        qkv = ops.linear(normed, weights, stream=stream)
        q = ops.qk_norm_rope_store(qkv, norms[1], norms[2], cos_sin, positions, *caches, slots, stream=stream)
        return q, ops.silu_and_mul(qkv, stream=stream), ops.gather_rows(hidden, rows, stream=stream)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for count in (9, 4, 0, 1, 9):
        tokens.random_(0, 50), positions.random_(0, 300), rows.random_(0, 9)
        slots.copy_(torch.randperm(6 * 16)[:9])
        slots[count:] = -1
        caches.fill_(7.0)
        expected, expected_caches = layer(), caches.clone()
        caches.fill_(7.0)
        graph.replay()
        assert torch.equal(caches, expected_caches) and (caches != 7.0).any(-1).sum() == count * 2 * 2
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


# --- large, elsewhere, too much


@pytest.mark.parametrize("context", [2**31 - 2**16 - 1, 2**31 - 1])
def test_contexts_of_nearly_2_31_keys(torch, context):
    """Of one page that the table repeats: the most that there may be, and more, which is cut to that and recorded."""
    page, most, queries = 1 << 16, 2**31 - 2**16 - 1, 800  # too many for the decode kernel
    k_cache, v_cache = torch.randn(2, 1, page, 1, 64, device="cuda", dtype=torch.bfloat16)
    v_cache += 1  # a mean of many is not nearly 0
    tables = torch.zeros(1, 1 << 15, device="cuda", dtype=torch.int32)
    few = min(context, most) % page + page  # the same keys at the same place in their page, and one page before
    lens, small = (torch.tensor([n], device="cuda", dtype=torch.int32) for n in (context, few))
    for window in ((1000, 0), (1000, -1), (1000, 2**31 - 2), (1000, 2**40), (-1, -1)):
        count = 1 if window == (-1, -1) else queries  # all keys are only for the decode kernel
        q = torch.randn(count, 8, 64, device="cuda", dtype=torch.bfloat16)
        arguments = dict(causal=window[1] == 0, window_size=window)
        # without a window every page weighs as much, but for a key that the last one has not
        last = small if count > 1 else torch.tensor([page], device="cuda", dtype=torch.int32)
        expected = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, last, **arguments)
        out = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, lens, **arguments)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        if context > most:
            with pytest.raises(ValueError, match=f"sequence 0 has {context} keys but .* below {most + 1}"):
                ops.check_errors()
        ops.check_errors()


def test_a_pool_of_more_than_2_31_elements(torch, rng):
    """Pages at the far end give the bits that they give in a small pool."""
    blocks, shape = 2**31 // (16 * 8 * 128) + 40, (16, 8, 128)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of GPU memory")
    k_cache, v_cache = torch.full((2, blocks, *shape), float("nan"), device="cuda", dtype=torch.bfloat16)
    small = torch.full((2, 40, *shape), float("nan"), device="cuda", dtype=torch.bfloat16)
    far = blocks - 40
    assert k_cache.numel() > 2**31 and far * k_cache.stride(0) >= 2**31
    lens = torch.tensor([300, 17, 16], device="cuda", dtype=torch.int32)
    order, pages = rng.permutation(39).astype(np.int32), np.zeros((3, 19), np.int32)
    pages[0], pages[1, :2], pages[2, 0] = order[:19], order[19:21], order[21]
    tables = torch.from_numpy(pages).cuda()
    for slots_dtype in (torch.int32, torch.int64):
        key, value = torch.randn(2, 39 * 16, 8, 128, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(39 * 16, device="cuda").to(slots_dtype)
        pagedkv.store_kvcache(key, value, *small, slots)
        pagedkv.store_kvcache(key, value, k_cache, v_cache, slots + far * 16)
        for big, little in ((k_cache, small[0]), (v_cache, small[1])):
            assert torch.equal(big[far : far + 39], little[:39]) and big[far - 1].isnan().all() and big[0].isnan().all()
    forget(small, tables, lens)
    for big, little in ((k_cache, small[0]), (v_cache, small[1])):
        big[far : far + 39] = little[:39]
    for query_lens in ((1, 1, 1), (250, 16, 3)):
        cu_seqlens_q = torch.tensor(np.cumsum((0, *query_lens)), device="cuda", dtype=torch.int32)
        q = torch.randn(sum(query_lens), 16, 128, device="cuda", dtype=torch.bfloat16)
        arguments = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max(query_lens))
        expected = pagedkv.paged_attention_fwd(q, *small, tables, lens, **arguments)
        out = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables + far, lens, **arguments)
        assert torch.equal(out, expected) and not out.isnan().any()
    pairs = np.array([[blocks - 5, 2], [far, blocks - 1]], np.int64)
    pagedkv.copy_blocks([k_cache, v_cache], pairs)
    for big, little in ((k_cache, small[0]), (v_cache, small[1])):
        for copy, page in ((big[2], little[35]), (big[-1], little[0])):
            assert torch.equal(copy.view(torch.int16), page.view(torch.int16))  # where both are NaN, too


def test_a_second_device(torch, rng):
    """Tensors say where a call runs, whatever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    batch = make_batch(MIXED, rng)
    there, here = Inputs(torch, MIXED, "cuda:1").set(batch), Inputs(torch, MIXED).set(batch)
    assert torch.cuda.current_device() == 0
    there.run()
    assert torch.cuda.current_device() == 0
    there.check(batch)
    there.block_tables[0, 0] = 10**6
    there.run()
    ops.check_errors("cuda:0")
    with pytest.raises(ValueError, match="block_tables: sequence 0 .*cuda:1"):
        ops.check_errors("cuda:1")
    here.k_cache = there.k_cache
    with pytest.raises(BufferError, match="k_cache: is on cuda:1 but q is on cuda:0"):
        here.run()


@pytest.mark.parametrize("name", ["k_cache", "block_tables", "context_lens", "out"])
def test_mixed_devices_are_refused(torch, name, rng):
    inputs = Inputs(torch, DECODE)
    setattr(inputs, name, getattr(inputs, name).cpu())
    with pytest.raises(BufferError, match=f"{name}: is on cpu but q is on cuda:0"):
        inputs.run()


@pytest.mark.alone
def test_out_of_memory_is_a_memory_error_and_all_goes_on(torch, rng):
    batch = make_batch(MIXED, rng)
    inputs = Inputs(torch, MIXED).set(batch)
    with pytest.raises(MemoryError, match=r"cuda:0 cannot give 1125899906842624 bytes \(\d+ of \d+ are free\)"):
        pagedkv.empty((1 << 48,), "float32", "cuda:0")
    inputs.run()
    inputs.check(batch)

    stream = torch.cuda.Stream()  # torch's first one takes memory; our first call on it needs scratch memory
    torch.cuda.empty_cache()
    taken, size = [], torch.cuda.mem_get_info()[0]
    while size >= 1 << 20:
        try:
            taken.append(pagedkv.empty((size,), "uint8", "cuda:0"))
        except MemoryError:
            size //= 2
    with torch.cuda.stream(stream), pytest.raises(MemoryError, match="cudaMalloc: cudaErrorMemoryAllocation"):
        inputs.run()
    inputs.run()  # has what it needs
    inputs.check(batch)
    taken.clear()
    with torch.cuda.stream(stream):
        inputs.run()
    stream.synchronize()
    inputs.check(batch)


def test_a_forked_child_is_told(cuda):
    """The driver does not work there; the CPU does."""
    code = """
import os, sys
import numpy as np
import pagedkv
kept = pagedkv.asarray(np.ones((2, 8), np.float32), device="cuda")
child = os.fork()
if child == 0:
    try:
        pagedkv.ops.silu_and_mul(kept)
        os._exit(1)
    except BufferError as error:
        print(error, flush=True)
    assert pagedkv.ops.silu_and_mul(np.ones((2, 8), np.float32)).shape == (2, 4)
    del kept  # the parent's memory
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(pagedkv.ops.silu_and_mul(kept).tolist()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "was forked from one that used CUDA" in result.stdout and result.stdout.splitlines()[-1] == "2"
