"""qkv_attention_fwd against the float64 oracle, and on a GPU against the two operations that define it, to the bit."""

from functools import partial

import numpy as np
import oracle
import pytest
from cases import PAGE_SIZES
from pools import forget, get, make_pool, make_tables, put

import pagedkv
from pagedkv import ops

F8 = "float8_e4m3fn"


class Case:
    """One ragged batch whose new tokens are not in the cache yet (NaN), those of skipped sequences excepted."""

    def __init__(self, rng, dtype, context_lens, query_lens=None, *, heads=(6, 2), head_dim=64, block_size=4,
                 cache_dtype=None, with_norm=True, skipped=(), hidden=None):  # fmt: skip
        self.dtype, self.cache_dtype = dtype, cache_dtype or dtype
        self.heads = heads
        self.context_lens = np.array(context_lens, np.int32)
        counts = np.ones(len(context_lens), int) if query_lens is None else np.array(query_lens)
        self.is_uniform = query_lens is None
        self.starts = np.cumsum([0, *counts]).astype(np.int32)
        num_tokens, (num_q_heads, num_kv_heads) = int(self.starts[-1]), heads
        self.tables, num_blocks = make_tables(rng, context_lens, block_size)
        self.caches = [make_pool(rng, self.tables, context_lens, num_blocks, block_size, num_kv_heads, head_dim,
                                 self.cache_dtype) for _ in range(2)]  # fmt: skip
        self.slots = np.full(num_tokens, -1, np.int32)
        self.positions = rng.integers(0, 300, num_tokens).astype(np.int32)
        for s, (context, count) in enumerate(zip(context_lens, counts, strict=True)):
            for i in range(count):
                key = context - count + i
                if key < 0 or s in skipped:
                    continue
                page, offset = self.tables[s, key // block_size], key % block_size
                self.slots[self.starts[s] + i] = page * block_size + offset
                for cache in self.caches:
                    cache[page, offset] = np.nan

        def draw(*shape):
            return oracle.rounded(rng.standard_normal(shape), dtype)

        self.qkv = draw(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
        self.rms_of = {} if hidden is None else {"rms_of": 3 * draw(num_tokens, hidden)}
        self.weights = [oracle.rounded(rng.uniform(0.5, 1.5, head_dim), dtype) if with_norm else None for _ in range(2)]
        angles = rng.uniform(0, 7, (300, head_dim // 2))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def expected(self, **options):
        scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
        q, *caches = oracle.qk_norm_rope_store(
            self.qkv, *self.weights, self.cos_sin, self.positions, *self.caches, self.slots, 1e-6, self.dtype,
            cache_dtype=self.cache_dtype, **self.rms_of, **scales)  # fmt: skip
        out, _ = oracle.paged_attention_fwd(q, *caches, self.tables, self.context_lens, cu_seqlens_q=self.starts,
                                            **options)  # fmt: skip
        return out, *caches

    def place(self, device):
        """Everything on a device, anew: the caches are written."""
        caches = [put(cache, device, self.cache_dtype) for cache in self.caches]
        weights = [None if w is None else put(w, device, self.dtype) for w in self.weights]
        heads = (put(self.qkv, device, self.dtype), *weights, put(self.cos_sin, device), put(self.positions, device),
                 *caches, put(self.slots, device))  # fmt: skip
        batch = {} if self.is_uniform else {"cu_seqlens_q": put(self.starts, device),
                                            "max_seqlen_q": int(np.diff(self.starts).max())}  # fmt: skip
        return heads, (put(self.tables, device), put(self.context_lens, device)), batch

    def run(self, device, *, planned=False, **options):
        """out and the caches, as float64."""
        heads, keys, batch = self.place(device)
        options = {name: put(x, device) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        if planned:
            options["plan"] = self.plan(device, heads, keys, batch, options)
        rms_of = {name: put(x, device, self.dtype) for name, x in self.rms_of.items()}
        out = ops.qkv_attention_fwd(*heads, *keys, **rms_of, **batch, **options)
        return get(out), get(heads[5]), get(heads[6])

    def run_apart(self, device, **options):
        """The same by the operations that define it."""
        heads, keys, batch = self.place(device)
        scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
        q = ops.qk_norm_rope_store(*heads, **scales)
        return get(pagedkv.paged_attention_fwd(q, *heads[5:7], *keys, **batch, **options)), get(heads[5]), get(heads[6])

    def plan(self, device, heads, keys, batch, options):
        known = {name: options[name] for name in ("num_splits", "window_size") if name in options}
        shape = (len(self.qkv), self.heads[0], self.cos_sin.shape[1])
        q = pagedkv.empty(shape, self.dtype, device)
        return pagedkv.plan_attention(q, *heads[5:7], *keys, **batch, **known)


def assert_same(results, expected):
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, other)


SMALL = dict(context_lens=(9, 1, 0, 4, 31, 16), skipped=(4,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [
    SMALL, dict(context_lens=(9, 0, 5, 40), query_lens=(3, 0, 5, 17)), dict(SMALL, with_norm=False, head_dim=24),
    dict(SMALL, heads=(3, 1), head_dim=256, block_size=16), dict(context_lens=()), dict(SMALL, hidden=1024),
    dict(context_lens=(9, 0, 5, 40), query_lens=(3, 0, 5, 17), hidden=40), dict(SMALL, with_norm=False, hidden=4099),
], ids=["decode", "ragged", "no norm", "wide", "none", "rms", "ragged rms", "no norm, rms"])  # fmt: skip
def test_against_the_oracle(rng, device, dtype, shape):
    case = Case(rng, dtype, **shape)
    for options in ({}, {"window_size": (7, 0)}, {"softmax_scale": 0.3}):
        is_planned = bool(options)
        out, *caches = case.run(device, planned=is_planned, past_is_constant=is_planned, **options)
        expected, *expected_caches = case.expected(**options)
        np.testing.assert_allclose(out, expected, atol=4 * oracle.tolerance(dtype))
        for cache, other in zip(caches, expected_caches, strict=True):
            np.testing.assert_allclose(cache, other, atol=4 * oracle.tolerance(dtype))  # NaN where nothing is stored


@pytest.mark.parametrize("block_size", PAGE_SIZES)
def test_page_sizes(rng, device, block_size):
    lens = (block_size, block_size + 1, 2 * block_size, 0, 1, 40)
    case = Case(rng, "bfloat16", lens, block_size=block_size)
    for is_planned in (False, True):
        out, *caches = case.run(device, planned=is_planned, past_is_constant=is_planned)
        expected, *expected_caches = case.expected()
        np.testing.assert_allclose(out, expected, atol=4 * oracle.tolerance("bfloat16"))
        for cache, other in zip(caches, expected_caches, strict=True):
            np.testing.assert_allclose(cache, other, atol=4 * oracle.tolerance("bfloat16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_into_fp8(rng, device, dtype):
    case = Case(rng, dtype, **SMALL, cache_dtype=F8)
    scales = {name: rng.uniform(0.3, 2, 2).astype(np.float32) for name in ("k_scale", "v_scale")}
    out, _, v_cache = case.run(device, **scales)
    expected, _, expected_v = case.expected(**scales)
    np.testing.assert_array_equal(v_cache, expected_v)
    np.testing.assert_allclose(out, expected, atol=0.1)  # a key may fall on the other side of a rounding to fp8
    assert_same(case.run(device, **scales), case.run_apart(device, **{k: put(v, device) for k, v in scales.items()}))


def test_bad_ids_on_the_cpu(rng):
    case = Case(rng, "float32", **SMALL)
    for array, message in ((case.slots, r"slot_mapping\[3\] is 2147480000"), (case.positions, r"positions\[3\] is")):
        good, array[3] = array[3], 2147480000
        with pytest.raises(ValueError, match=message):
            case.run("cpu")
        array[3] = good


# --- on a GPU: the bits of the two operations


LENGTHS = [1, 2, 15, 0, 16, 17, 33, 300, 1, 64, 5000]
SHAPES = [  # query and KV heads, head_dim, block_size; the last ones run as two kernels
    ((16, 8), 128, 16), ((8, 8), 64, 64), ((16, 4), 96, 16), ((12, 1), 128, 1), ((4, 2), 256, 16), ((2, 1), 80, 5),
    *(((16, 8), 128, page) for page in PAGE_SIZES if page != 16), ((32, 2), 64, 16), ((8, 1), 256, 32), ((40, 1), 64, 16),
    ((2, 1), 72, 16), ((9, 1), 256, 16),
]  # fmt: skip


def make_on_gpu(torch, rng, lengths, heads, head_dim, block_size, dtype, cache_dtype):
    """Arguments like those of Case.place, drawn on the GPU. The new keys of a few sequences are there and skipped."""
    kinds, num_seqs = dict(device="cuda", dtype=getattr(torch, dtype)), len(lengths)
    num_q_heads, num_kv_heads = heads
    tables, num_blocks = make_tables(rng, lengths, block_size)
    owned = [tables[s, j // block_size] * block_size + j % block_size for s, n in enumerate(lengths) for j in range(n)]
    last = np.cumsum(lengths)[np.array(lengths) > 0] - 1
    slots = np.full(num_seqs, -1, np.int32)
    slots[np.array(lengths) > 0] = np.array(owned)[last]
    slots[rng.random(num_seqs) < 0.2] = -1
    caches = torch.full((2, num_blocks * block_size, num_kv_heads, head_dim), float("nan"), **kinds)
    caches[:, owned] = torch.randn(2, len(owned), num_kv_heads, head_dim, **kinds)
    caches[:, slots[slots >= 0]] = float("nan")
    caches = caches.view(2, num_blocks, block_size, num_kv_heads, head_dim).to(getattr(torch, cache_dtype))
    rms_of = torch.randn(num_seqs, 1000, **kinds)
    qkv = torch.randn(num_seqs, (num_q_heads + 2 * num_kv_heads) * head_dim, **kinds)
    weights = torch.rand(2, head_dim, **kinds) + 0.5 if head_dim != 96 else (None, None)
    cos_sin, positions = torch.randn(300, head_dim, device="cuda"), rng.integers(0, 300, num_seqs).astype(np.int32)
    heads = (qkv, *weights, cos_sin, torch.from_numpy(positions).cuda(), caches, torch.from_numpy(slots).cuda())
    return heads, rms_of, (torch.from_numpy(tables).cuda(), torch.tensor(lengths, device="cuda", dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16", "float16", "bfloat16 in fp8", "float16 in fp8"])
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES, ids=str)
def test_bits(torch, rng, heads, head_dim, block_size, cache):
    dtype, is_fp8 = cache.split()[0], cache.endswith("fp8")
    scales = {"k_scale": 0.5, "v_scale": torch.rand(heads[1], device="cuda") + 0.5} if is_fp8 else {}
    for lengths in (LENGTHS, [9000], rng.integers(0, 40, 60).tolist()):
        drawn, rms_of, keys = make_on_gpu(torch, rng, lengths, heads, head_dim, block_size, dtype, F8 if is_fp8 else dtype)
        *before, positions, caches, slots = drawn

        def run(call, before=before, positions=positions, caches=caches, slots=slots):
            """`call` on caches of its own: out, and their bits."""
            bits = caches.view(torch.uint8).clone()
            own = [pagedkv.from_dlpack(x).view(tuple(caches.shape[1:]), F8 if is_fp8 else dtype) for x in bits]
            return call(*before, positions, *own, slots), bits

        def apart(*arguments, keys=keys, rms_of=None, rms_squares=None, **options):
            q = ops.qk_norm_rope_store(*arguments, rms_of=rms_of, rms_squares=rms_squares, **scales)
            return pagedkv.paged_attention_fwd(q, *arguments[5:7], *keys, **scales, **options)

        def planned(*arguments, keys=keys, rms_of=None, rms_squares=None, **options):
            qkv = arguments[0]
            q = torch.empty(len(qkv), heads[0], head_dim, dtype=qkv.dtype, device="cuda")
            plan = pagedkv.plan_attention(q, *arguments[5:7], *keys, **options)
            options |= {"plan": plan, "past_is_constant": True}
            rms = {"rms_of": rms_of, "rms_squares": rms_squares}
            return ops.qkv_attention_fwd(*arguments, *keys, **rms, **scales, **options)

        def unplanned(*arguments, keys=keys, **options):
            return ops.qkv_attention_fwd(*arguments, *keys, **scales, **options)

        squares = {"rms_of": rms_of, "rms_squares": (rms_of.float() ** 2).view(len(rms_of), -1, int(rng.choice([8, 250]))).sum(2)}
        for options in ({}, {"num_splits": 4}, {"window_size": (20, 0)}, {"rms_of": rms_of}, squares):
            expected, expected_bits = run(partial(apart, **options))
            assert not expected.isnan().any()
            for call in (planned, unplanned):
                out, bits = run(partial(call, **options))
                assert torch.equal(bits, expected_bits) and torch.equal(out, expected)


@pytest.mark.gpu
def test_unaligned_projections(torch, rng):
    case = Case(rng, "bfloat16", LENGTHS, heads=(4, 2))
    expected = case.run("cuda:0")
    for start in (1, 8):
        heads, keys, _ = case.place("cuda:0")
        wide = torch.full((len(LENGTHS), 8 * 64 + 9), float("nan"), dtype=torch.bfloat16, device="cuda")
        qkv = wide[:, start : start + 8 * 64]
        qkv.copy_(torch.from_dlpack(heads[0]))
        out = ops.qkv_attention_fwd(qkv, *heads[1:], *keys)
        assert_same((get(out), get(heads[5]), get(heads[6])), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "message"), [
    ("slots", "slot_mapping: token 3 has slot 2147480000"), ("positions", "positions: token 3 has position 2147480000"),
    ("tables", "block_tables: sequence 3 has block 2147480000")])  # fmt: skip
def test_bad_ids_are_masked_and_recorded(torch, rng, name, message):
    for masked in (2147480000, -1):
        case = Case(rng, "bfloat16", (40, 17, 1, 300, 20), heads=(4, 2), block_size=16)
        for cache in case.caches:
            cache[np.isnan(cache)] = 0.5  # what is not stored is read
        array = getattr(case, name)
        array[(3, 18) if name == "tables" else 3] = masked  # the page of the new key

        def checked(run, masked=masked):
            results = run("cuda:0")
            if masked > 0 or name == "positions":
                with pytest.raises(ValueError, match=message.replace("2147480000", str(masked))):
                    ops.check_errors()
            return results

        assert_same(checked(case.run), checked(case.run_apart))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "longest"), [(1, 3000), (3, 40), (8, 2000), (60, 900), (96, 700), (112, 500), (200, 1500)])
def test_layers_in_a_graph(torch, rng, batch, longest):
    """Keys are read while the projection still runs; replayed with other lengths, tables, slots and positions. The new
    keys are NaN before."""
    kinds = dict(device="cuda", dtype=torch.bfloat16)
    blocks = -(-longest // 16)
    weights, norms = torch.randn(3, 32 * 128, 256, **kinds) / 16, torch.rand(3, 2, 128, **kinds) + 0.5
    x, cos_sin = torch.randn(batch, 256, **kinds), torch.randn(longest, 128, device="cuda")
    caches = torch.randn(3, 2, batch * blocks, 16, 8, 128, **kinds)
    fresh = caches.clone()
    tables = torch.randperm(batch * blocks, device="cuda", dtype=torch.int32).view(batch, blocks)
    lens, slots, positions = (torch.zeros(batch, device="cuda", dtype=torch.int32) for _ in range(3))
    q = torch.empty(batch, 16, 128, **kinds)

    def step(is_one):
        plan, outs = pagedkv.plan_attention(q, *caches[0], tables, lens), []
        qkv = torch.empty(batch, 32 * 128, **kinds)
        for weight, norm, layer in zip(weights, norms, caches, strict=True):
            ops.linear(x, weight, weight_is_constant=True, out=qkv)
            heads = (qkv, *norm, cos_sin, positions, *layer, slots)
            if is_one:
                out = ops.qkv_attention_fwd(*heads, tables, lens, rms_of=x, plan=plan, past_is_constant=True)
            else:
                ops.qk_norm_rope_store(*heads, rms_of=x, q_out=q)
                out = pagedkv.paged_attention_fwd(q, *layer, tables, lens, plan=plan)
            outs.append(out)
        return outs

    step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(True)
    for _ in range(4):
        lens.copy_(torch.from_numpy(rng.integers(0, longest + 1, batch).astype(np.int32)))
        tables.copy_(tables[:, torch.randperm(blocks)].clone())
        positions.copy_((lens - 1).clip(0))
        last = positions.long()
        slots.copy_(tables.gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16)
        slots[lens == 0] = -1
        stored = slots[lens > 0].long()
        tokens = caches.copy_(fresh).view(6, -1, 8, 128)
        forget(caches.flatten(0, 1), tables, lens)
        tokens[:, stored] = float("nan")
        graph.replay()
        after = caches.clone()
        tokens[:, stored] = float("nan")
        for out, expected in zip(captured, step(False), strict=True):
            assert torch.equal(out, expected) and not out.isnan().any()
        assert torch.equal(after.view(torch.int16), caches.view(torch.int16))  # where both are NaN, too
        x.normal_()


@pytest.mark.parametrize(("name", "value"), [("tables", 2147480000), ("context_lens", 2147480000), ("starts", -1)])
def test_a_batch_that_is_refused_stores_nothing(rng, name, value):
    case = Case(rng, "float32", (9, 5), (4, 2))
    getattr(case, name).flat[0] = value
    heads, keys, batch = case.place("cpu")
    with pytest.raises(ValueError, match="is -?[0-9]+ but"):
        ops.qkv_attention_fwd(*heads, *keys, **batch)
    assert_same((get(heads[5]), get(heads[6])), case.caches)
