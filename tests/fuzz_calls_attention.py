"""Attention and what stands before it, for the fuzzer of calls; see fuzz_calls_ops.py."""

import numpy as np
import oracle
from fuzz_calls_memory import View, place
from fuzz_calls_ops import (
    F8,
    Draw,
    Operation,
    Outcome,
    draw_caches,
    draw_scales,
    draw_store,
    near,
    numbers,
    out_and_lse,
    scale_of,
    stored,
)
from pools import listed, make_pool, make_tables


def head_sizes(d: Draw) -> tuple[int, int, int]:
    """Query heads, KV heads, head_dim."""
    kv_heads = d.one_of(1, 1, 2, 3)
    return kv_heads * d.one_of(1, 1, 2, 3), kv_heads, d.one_of(8, 8, 8, 16, 24, 32, 64, 256 if d.is_large else 40)


def draw_batch(d: Draw, dtype: str, cache_dtype: str, heads, has_key_starts=False) -> dict:
    """Tables and pools of sequences whose queries are `lens`; what no query may see is NaN, or a page that is none."""
    _, num_kv_heads, head_dim = heads
    seqs = d.size(4)
    is_uniform = d.rng.random() < 0.3 and not d.everything
    lens = np.full(seqs, d.size(3)) if is_uniform else np.array([d.size(4) for _ in range(seqs)], int)
    contexts = np.array([max(0, n + int(d.rng.integers(-1, 60 if d.is_large else 12))) for n in lens], int)
    block_size = int(d.rng.integers(1, 41 if d.is_large else 9))
    key_starts = d.rng.integers(0, 2 * block_size, seqs) if has_key_starts else np.zeros(seqs, int)
    tables, blocks = make_tables(d.rng, contexts + key_starts, block_size)
    shape = tables, contexts, blocks, block_size, num_kv_heads, head_dim, cache_dtype, key_starts
    pools = [make_pool(d.rng, *shape) for _ in range(2)]
    if d.rng.random() < 0.1 and contexts.any():
        seq = d.rng.choice(np.flatnonzero(contexts))
        tables[seq, d.rng.integers(-(-contexts[seq] // block_size))] = d.one_of(-1, -(2**31))
    ahead, behind = (0, 0) if is_uniform or d.rng.random() < 0.7 else (d.size(2), d.size(2))
    starts = np.cumsum([ahead, *lens])
    batch = {} if is_uniform else {"cu_seqlens_q": d.array(starts)}
    if d.maybe():
        batch["max_seqlen_q"] = int(lens.max(initial=0)) + d.one_of(0, 1, 2**62)
    if has_key_starts:
        batch["key_starts"] = d.array(key_starts)
    if has_key_starts and d.maybe():
        tables, table_starts = listed(tables, contexts + key_starts, block_size, d.rng)
        batch["table_starts"] = d.array(table_starts)
    return dict(
        pools=pools,
        tables=tables,
        contexts=contexts,
        starts=starts,
        lens=lens,
        num_tokens=int(starts[-1]) + behind,
        batch=batch,
    )


def options(d: Draw, *, has_window_right: bool) -> dict:
    side = lambda: d.one_of(-1, -1, 0, 1, 3, 2**31, 2**63 - 1)
    return d.some(
        0.3,
        window_size=lambda: d.one_of(tuple, list)((side(), side() if has_window_right else d.one_of(-1, 0))),
        num_splits=lambda: d.one_of(0, 1, 2, 5, 256),
    )


def draw_plan_rows(d: Draw) -> View:
    """What plan_attention returns on the CPU, or more: no row of it is read."""
    return place(
        d.rng,
        d.rng.integers(-99, 99, (0 if d.rng.random() < 0.7 else d.size(3), 12)),
        "int32",
        is_plain=True,
        alignment=16,
    )


def draw_attention(d: Draw) -> dict:
    dtype, heads = d.dtype(), head_sizes(d)
    cache_dtype = F8 if d.maybe(0.3) else dtype
    b = draw_batch(d, dtype, cache_dtype, heads, has_key_starts=d.maybe(0.3))
    seqs, q_heads, shape = len(b["lens"]), heads[0], (b["num_tokens"], heads[0], heads[2])
    slopes = (seqs, q_heads) if d.rng.random() < 0.5 else (q_heads,)
    a = {
        "q": d.tensor(shape, dtype),
        **draw_caches(d, *b["pools"], cache_dtype),
        "block_tables": d.array(b["tables"]),
        "context_lens": d.array(b["contexts"]),
        **b["batch"],
        **options(d, has_window_right=True),
        **draw_scales(d, cache_dtype, heads[1], seqs),
        **d.some(
            0.3,
            softmax_scale=lambda: d.one_of(0.3, 1, -0.2, 0.0, np.float32(0.5)),
            causal=d.flag,
            softcap=lambda: d.one_of(0.0, 3.0, 30),
            alibi_slopes=lambda: d.tensor(slopes, "float32", 0.3),
            sinks=lambda: d.tensor((q_heads,), "float32"),
            past_is_constant=d.flag,
            out=lambda: d.output(shape, dtype),
            return_lse=d.flag,
        ),
        **d.some(0.2, plan=lambda: draw_plan_rows(d)),
        **d.stream(),
    }
    return a | ({"alibi_slopes": d.tensor((q_heads,), "float32")} if seqs == 0 and "alibi_slopes" in a else {})


def window_of(a):
    return tuple(int(side) for side in a.window_size)


def owned_rows(a, num_tokens: int) -> np.ndarray:
    mask = np.zeros(num_tokens, bool)
    if a.cu_seqlens_q is None:
        return ~mask
    starts = numbers(a.cu_seqlens_q)
    mask[starts[0] : starts[-1]] = True
    return mask


def most(scale) -> float:
    """The largest of these by absolute value, and at least 1; NaN does not count."""
    return float(np.fmax.reduce(np.abs(np.append(1.0, np.asarray(1.0 if scale is None else scale, np.float64)))))


def attended(a, out, dtype: str, factor: float) -> Outcome:
    """A score's error is multiplied by its scales; the output is a sum of values times v_scale, which may cancel."""
    factor *= most(a.softmax_scale) * most(scale_of(a.k_scale))
    wanted = near(out, dtype, factor, owned_rows(a, len(out))[:, None, None])
    wanted.atol *= most(scale_of(a.v_scale))
    return wanted


def expect_attention(a) -> dict:
    softmax_scale = None if a.softmax_scale is None else float(a.softmax_scale)
    out, lse = oracle.paged_attention_fwd(
        numbers(a.q),
        numbers(a.k_cache),
        numbers(a.v_cache),
        numbers(a.block_tables),
        numbers(a.context_lens),
        cu_seqlens_q=numbers(a.cu_seqlens_q),
        key_starts=numbers(a.key_starts),
        table_starts=numbers(a.table_starts),
        softmax_scale=softmax_scale,
        causal=bool(a.causal),
        window_size=window_of(a),
        softcap=float(a.softcap),
        alibi_slopes=numbers(a.alibi_slopes),
        sinks=numbers(a.sinks),
        k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
    )
    outcomes = {"out": attended(a, out, a.q.dtype, 4)}
    return outcomes | ({"out_lse": near(lse, "float32", 10, owned_rows(a, len(out))[None])} if a.return_lse else {})


def draw_plan(d: Draw) -> dict:
    wanted = (
        "q",
        "k_cache",
        "v_cache",
        "block_tables",
        "context_lens",
        "cu_seqlens_q",
        "max_seqlen_q",
        "key_starts",
        "table_starts",
        "causal",
        "window_size",
        "num_splits",
        "stream",
    )
    a = {name: value for name, value in draw_attention(d).items() if name in wanted}
    return a | d.some(out=lambda: draw_plan_rows(d))


def expect_plan(a) -> dict:
    """The CPU's plan has no rows; those of a given one stay."""
    return {"out": Outcome(np.zeros((0, 12)) if a.out is None else numbers(a.out), mask=False)}


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
        numbers(a.key),
        numbers(a.value),
        numbers(a.k_cache),
        numbers(a.v_cache),
        numbers(a.block_tables),
        numbers(a.cache_lens),
        cache_dtype=a.k_cache.dtype,
        cu_seqlens=numbers(a.cu_seqlens),
        key_starts=numbers(a.key_starts),
        k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
        **with_q,
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
            rms_of=lambda: place(d.rng, 1 + np.abs(d.floats((tokens, d.one_of(1, 7, 40)), dtype)) // 1, dtype),
            eps=lambda: d.one_of(1e-6, 1e-3, 1),
        ),
        **d.stream(),
    }


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
        numbers(a.qkv),
        numbers(a.q_weight),
        numbers(a.k_weight),
        numbers(a.cos_sin),
        numbers(a.positions),
        numbers(a.k_cache),
        numbers(a.v_cache),
        numbers(a.slot_mapping),
        float(a.eps),
        a.qkv.dtype,
        rms_of=numbers(a.rms_of),
        cache_dtype=a.k_cache.dtype,
        k_scale=scale_of(a.k_scale),
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
    b = draw_batch(d, dtype, cache_dtype, heads)
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
        q,
        k,
        v,
        numbers(a.block_tables),
        numbers(a.context_lens),
        cu_seqlens_q=numbers(a.cu_seqlens_q),
        softmax_scale=softmax_scale,
        window_size=window_of(a),
        k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
    )
    factor = 0.3 / oracle.tolerance(a.qkv.dtype) if a.k_cache.dtype == F8 else 10
    return {
        "out": attended(a, out, a.qkv.dtype, factor),
        **rope_stored(a, k, v),
    }


ATTENTION_OPERATIONS = {
    "append_kvcache": Operation(draw_append, expect_append, lambda a: []),
    "rope_append_kvcache": Operation(draw_rope_append, expect_append),
    "paged_attention_fwd": Operation(draw_attention, expect_attention, out_and_lse),
    "plan_attention": Operation(draw_plan, expect_plan),
    "qk_norm_rope_store": Operation(draw_rope, expect_rope, lambda a: ["q_out"]),
    "qkv_attention_fwd": Operation(draw_qkv, expect_qkv),
}
