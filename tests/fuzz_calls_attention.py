"""Attention and its plan, for the fuzzer of calls; see fuzz_calls_ops.py."""

import numpy as np
import oracle
from fuzz_calls_memory import View, place
from fuzz_calls_ops import F8, Draw, Operation, Outcome, draw_caches, draw_scales, near, numbers, out_and_lse, scale_of
from pools import listed, make_pool, make_tables


def head_sizes(d: Draw) -> tuple[int, int, int]:
    """Query heads, KV heads, head_dim."""
    kv_heads = d.one_of(1, 1, 2, 3)
    return kv_heads * d.one_of(1, 1, 2, 3), kv_heads, d.one_of(8, 8, 8, 16, 24, 32, 64, 256 if d.is_large else 40)


def draw_batch(d: Draw, cache_dtype: str, heads, has_key_starts=False) -> dict:
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
    drawn = d.some(
        0.3,
        window_size=lambda: d.one_of(tuple, list)((side(), side() if has_window_right else d.one_of(-1, 0))),
        num_splits=lambda: d.one_of(0, 1, 2, 5, 256),
        batch_invariant=d.flag,
    )
    return drawn | ({"batch_invariant": False} if drawn.get("num_splits") and "batch_invariant" in drawn else {})


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
    b = draw_batch(d, cache_dtype, heads, has_key_starts=d.maybe(0.3))
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
            0.3, softmax_scale=lambda: d.one_of(0.3, 1, -0.2, 0.0, np.float32(0.5)), causal=d.flag,
            softcap=lambda: d.one_of(0.0, 3.0, 30), alibi_slopes=lambda: d.tensor(slopes, "float32", 0.3),
            sinks=lambda: d.tensor((q_heads,), "float32"), past_is_constant=d.flag,
            out=lambda: d.output(shape, dtype), return_lse=d.flag,
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
        numbers(a.q), numbers(a.k_cache), numbers(a.v_cache), numbers(a.block_tables), numbers(a.context_lens),
        cu_seqlens_q=numbers(a.cu_seqlens_q), key_starts=numbers(a.key_starts), table_starts=numbers(a.table_starts),
        softmax_scale=softmax_scale, causal=bool(a.causal), window_size=window_of(a), softcap=float(a.softcap),
        alibi_slopes=numbers(a.alibi_slopes), sinks=numbers(a.sinks), k_scale=scale_of(a.k_scale),
        v_scale=scale_of(a.v_scale),
    )
    outcomes = {"out": attended(a, out, a.q.dtype, 4)}
    return outcomes | ({"out_lse": near(lse, "float32", 10, owned_rows(a, len(out))[None])} if a.return_lse else {})


def draw_plan(d: Draw) -> dict:
    wanted = (
        "q", "k_cache", "v_cache", "block_tables", "context_lens", "cu_seqlens_q", "max_seqlen_q", "key_starts",
        "table_starts", "causal", "window_size", "num_splits", "batch_invariant", "stream",
    )
    a = {name: value for name, value in draw_attention(d).items() if name in wanted}
    return a | d.some(out=lambda: draw_plan_rows(d))


def expect_plan(a) -> dict:
    """The CPU's plan has no rows; those of a given one stay."""
    return {"out": Outcome(np.zeros((0, 12)) if a.out is None else numbers(a.out), mask=False)}


ATTENTION_OPERATIONS = {
    "paged_attention_fwd": Operation(draw_attention, expect_attention, out_and_lse),
    "plan_attention": Operation(draw_plan, expect_plan),
}
