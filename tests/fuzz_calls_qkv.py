"""New queries, keys and values: appended, turned, and attended at once, for the fuzzer of calls; see fuzz_calls_ops.py."""

import numpy as np
import oracle
from fuzz_calls_attention import attended, draw_batch, draw_plan_rows, head_sizes, options, owned_rows, window_of
from fuzz_calls_memory import place
from fuzz_calls_ops import F8, Draw, Operation, draw_caches, draw_scales, draw_store, near, numbers, scale_of, stored
from pools import make_tables

# --- new keys behind others


def share_out(d: Draw, seqs: int):
    """Tokens of each sequence, where each one's start, rows that nobody owns included, and the argument or nothing."""
    if d.rng.random() < 0.3 and not d.everything:
        lens = np.full(seqs, d.size(3))
        return lens, int(lens.sum()), None
    lens = np.array([d.size(4) for _ in range(seqs)], int)
    ahead, behind = (0, 0) if d.rng.random() < 0.7 else (d.size(2), d.size(2))
    starts = np.cumsum([ahead, *lens])
    return lens, int(starts[-1]) + behind, d.array(starts)


def draw_append(d: Draw) -> dict:
    dtype, (_, kv_heads, head_dim) = d.dtype(), head_sizes(d)
    cache_dtype = F8 if d.maybe(0.3) else dtype
    seqs, block_size = d.size(4), int(d.rng.integers(1, 9))
    lens, tokens, starts = share_out(d, seqs)
    cache_lens, key_starts = d.rng.integers(0, 9, seqs), d.rng.integers(0, 2 * block_size, seqs)
    has_key_starts = d.maybe(0.3)
    slots = cache_lens + lens + (key_starts if has_key_starts else 0)
    tables, blocks = make_tables(d.rng, slots, block_size)
    if d.rng.random() < 0.1 and slots.any():
        seq = d.rng.choice(np.flatnonzero(slots))
        tables[seq, d.rng.integers(-(-slots[seq] // block_size))] = d.one_of(-1, -(2**31))
    shape = (blocks, block_size, kv_heads, head_dim)
    return {
        "key": d.tensor((tokens, kv_heads, head_dim), dtype, 2),
        "value": d.tensor((tokens, kv_heads, head_dim), dtype, 2),
        **draw_caches(d, d.floats(shape, cache_dtype), d.floats(shape, cache_dtype), cache_dtype),
        "block_tables": d.array(tables),
        "cache_lens": d.array(cache_lens),
        **({} if starts is None else {"cu_seqlens": starts}),
        **({"key_starts": d.array(key_starts)} if has_key_starts else {}),
        **draw_scales(d, cache_dtype, kv_heads),
        **d.stream(),
    }


def draw_rope_append(d: Draw) -> dict:
    a = draw_append(d)
    dtype, (_, kv_heads, head_dim), seqs = a["key"].dtype, a["key"].shape, a["cache_lens"].shape[0]
    _, tokens, starts = share_out(d, seqs)
    shape, pairs = (tokens, kv_heads * d.one_of(1, 2, 3), head_dim), d.size(head_dim // 2) % (head_dim // 2 + 1)
    angles, angle_dtype = d.rng.uniform(0, 7, (80, pairs)), d.one_of(dtype, "float32")
    table = lambda x: place(d.rng, oracle.rounded(x, angle_dtype), angle_dtype, is_plain=True, may_be_readonly=True)
    return (
        {"q": d.tensor(shape, dtype), "cos": table(np.cos(angles)), "sin": table(np.sin(angles))}
        | a
        | ({} if starts is None else {"cu_seqlens_q": starts})
        | d.some(
            0.4,
            rotary_starts=lambda: d.array(d.rng.integers(0, 20, seqs)),
            interleaved=d.flag,
            q_at_start=d.flag,
            out=lambda: d.output(shape, dtype),
        )
    )


def expect_append(a) -> dict:
    with_q = {}
    if "q" in vars(a):
        names = ("q", "cos", "sin", "cu_seqlens_q", "rotary_starts")
        with_q = {name: numbers(getattr(a, name)) for name in names} | {"dtype": a.key.dtype}
        with_q |= {"interleaved": bool(a.interleaved), "q_at_start": bool(a.q_at_start)}
    k, v, out, slots = oracle.append_kvcache(
        numbers(a.key), numbers(a.value), numbers(a.k_cache), numbers(a.v_cache), numbers(a.block_tables),
        numbers(a.cache_lens), cache_dtype=a.k_cache.dtype, cu_seqlens=numbers(a.cu_seqlens),
        key_starts=numbers(a.key_starts), k_scale=scale_of(a.k_scale), v_scale=scale_of(a.v_scale), **with_q,
    )
    tolerance = 4 * oracle.tolerance(a.key.dtype)
    how = {"atol": tolerance, "rtol": 0.13 if a.k_cache.dtype == F8 else tolerance} if with_q else {}
    outcomes = stored(a.k_cache, slots, k, v, **how)
    return outcomes | ({"out": near(out, a.q.dtype, 4, owned_rows(a, len(out))[:, None, None])} if with_q else {})


# --- what stands before attention


def draw_heads(d: Draw, dtype, cache_dtype, heads, tokens: int) -> dict:
    q_heads, kv_heads, head_dim = heads
    most = int(d.rng.integers(1, 20))
    angles = d.rng.uniform(0, 7, (most, head_dim // 2))
    weights = [d.tensor((head_dim,), dtype, 0.5) if d.maybe(0.7) else None] * 2
    if weights[0] is not None:
        weights[1] = d.tensor((head_dim,), dtype, 0.5)
    return {
        "qkv": d.tensor((tokens, (q_heads + 2 * kv_heads) * head_dim), dtype),
        "q_weight": weights[0],
        "k_weight": weights[1],
        "cos_sin": place(
            d.rng, np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32), "float32", is_plain=True
        ),
        "positions": d.array(d.rng.integers(0, most, tokens)),
        **draw_scales(d, cache_dtype, kv_heads),
        **d.some(
            0.3,
            eps=lambda: d.one_of(1e-6, 1e-3, 1),
        ),
        **draw_rms(d, tokens, dtype),
        **d.stream(),
    }


def draw_rms(d: Draw, tokens: int, dtype: str) -> dict:
    """What rows are divided by, and perhaps the squares of it, as linear leaves them."""
    x = 1 + np.abs(d.floats((tokens, 40 if d.everything else d.one_of(1, 7, 40)), dtype)) // 1
    a = d.some(0.3, rms_of=lambda: place(d.rng, x, dtype))
    if not a:
        return a
    count = d.one_of(*(n for n in (1, 5, 7, 20, 40) if x.shape[1] % n == 0))
    squares = (x.astype(np.float64) ** 2).reshape(tokens, count, x.shape[1] // count).sum(2)
    return a | d.some(rms_squares=lambda: place(d.rng, squares.astype(np.float32), "float32", is_plain=True))


def draw_rope(d: Draw) -> dict:
    dtype, (q_heads, kv_heads, head_dim) = d.dtype(), head_sizes(d)
    if d.rng.random() < 0.2:
        q_heads, kv_heads, head_dim = d.size(3), d.size(3), d.one_of(2, 4, 6, 10)
    cache_dtype = F8 if d.maybe(0.3) else dtype
    store = draw_store(Draw(d.rng))
    tokens, blocks = store["key"].shape[0], store["k_cache"].shape[:2]
    shape = (*blocks, kv_heads, head_dim)
    a = draw_heads(d, dtype, cache_dtype, (q_heads, kv_heads, head_dim), tokens)
    return (
        a
        | draw_caches(d, d.floats(shape, cache_dtype), d.floats(shape, cache_dtype), cache_dtype)
        | {"slot_mapping": store["slot_mapping"]}
        | d.some(q_out=lambda: d.output((tokens, q_heads, head_dim), dtype, is_plain=True))
    )


def rope_oracle(a):
    return oracle.qk_norm_rope_store(
        numbers(a.qkv), numbers(a.q_weight), numbers(a.k_weight), numbers(a.cos_sin), numbers(a.positions),
        numbers(a.k_cache), numbers(a.v_cache), numbers(a.slot_mapping), float(a.eps), a.qkv.dtype,
        rms_of=numbers(a.rms_of), cache_dtype=a.k_cache.dtype, k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
    )


def rope_stored(a, k, v) -> dict:
    """A number may fall on the other side of a rounding, which is an eighth in fp8, where the least step is 2^-9."""
    tolerance = 4 * oracle.tolerance(a.qkv.dtype)
    return stored(a.k_cache, numbers(a.slot_mapping), k, v, atol=tolerance, rtol=0.13 if a.k_cache.dtype == F8 else tolerance)


def expect_rope(a) -> dict:
    q, k, v = rope_oracle(a)
    return {"q_out": near(q, a.qkv.dtype, 4), **rope_stored(a, k, v)}


def draw_qkv(d: Draw) -> dict:
    dtype, heads = d.dtype(), head_sizes(d)
    cache_dtype = F8 if d.maybe(0.3) else dtype
    b = draw_batch(d, cache_dtype, heads)
    tokens, block_size = b["num_tokens"], b["pools"][0].shape[1]
    slots = np.full(tokens, -1)
    for s, (context, n) in enumerate(zip(b["contexts"], b["lens"], strict=True)):
        for i in range(n):
            key = context - n + i
            page = b["tables"][s, key // block_size] if key >= 0 else -1
            if page >= 0 and d.rng.random() < 0.9:  # of another the cache has the key already
                slots[b["starts"][s] + i] = page * block_size + key % block_size
    a = draw_heads(d, dtype, cache_dtype, heads, tokens) | draw_caches(d, *b["pools"], cache_dtype)
    return a | {
        "slot_mapping": d.array(slots, d.one_of("int32", "int64")),
        "block_tables": d.array(b["tables"]),
        "context_lens": d.array(b["contexts"]),
        **b["batch"],
        **options(d, has_window_right=False),
        **d.some(
            0.3,
            softmax_scale=lambda: d.one_of(0.3, 1, -0.2),
            past_is_constant=d.flag,
            out=lambda: d.output((tokens, heads[0], heads[2]), dtype),
        ),
        **d.some(0.2, plan=lambda: draw_plan_rows(d)),
    }


def expect_qkv(a) -> dict:
    q, k, v = rope_oracle(a)
    softmax_scale = None if a.softmax_scale is None else float(a.softmax_scale)
    out, _ = oracle.paged_attention_fwd(
        q, k, v, numbers(a.block_tables), numbers(a.context_lens), cu_seqlens_q=numbers(a.cu_seqlens_q),
        softmax_scale=softmax_scale, window_size=window_of(a), k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
    )
    factor = 0.3 / oracle.tolerance(a.qkv.dtype) if a.k_cache.dtype == F8 else 10
    return {
        "out": attended(a, out, a.qkv.dtype, factor),
        **rope_stored(a, k, v),
    }


APPEND_OPERATIONS = {
    "append_kvcache": Operation(draw_append, expect_append, lambda a: []),
    "rope_append_kvcache": Operation(draw_rope_append, expect_append),
}
QKV_OPERATIONS = {
    "qk_norm_rope_store": Operation(draw_rope, expect_rope, lambda a: ["q_out"]),
    "qkv_attention_fwd": Operation(draw_qkv, expect_qkv),
}
