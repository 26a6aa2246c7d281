"""paged_attention_fwd against the float64 oracle, over the shared case list."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import oracle
import pytest
from again import run_again
from cases import ATTENTION_CASES, AttentionCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import UNUSED_PAGE, get, make_batch, put, put_sliceable

import pagedkv
from pagedkv import ops

CASE = AttentionCase("small", (1, 3), (9, 20), block_size=4, head_dim=32)


def place_caches(case, batch, device):
    dtype = case.cache_dtype or case.dtype
    if case.layout == "NHD":
        return put(batch.k_cache, device, dtype), put(batch.v_cache, device, dtype)
    if case.layout == "backwards":
        return tuple(put(x[::-1], device, dtype)[::-1] for x in (batch.k_cache, batch.v_cache))
    if case.layout == "HND":
        heads_first = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (batch.k_cache, batch.v_cache))
        return tuple(put_sliceable(x, device, dtype).swapaxes(1, 2) for x in heads_first)
    both = put_sliceable(np.stack([batch.k_cache, batch.v_cache], axis=1), device, dtype)
    return both[:, 0], both[:, 1]


def place_queries(case, batch, device):
    """q and, for a strided case, an out that is a view too, with what lies around it."""
    if not case.strided_q:
        return put(batch.q, device, case.dtype), None, None
    wide = np.full((case.num_tokens, case.num_q_heads + 3, case.head_dim), np.nan)
    around = put_sliceable(np.full_like(wide, 77.0), device, case.dtype)
    wide[:, 1:-2] = batch.q
    return put_sliceable(wide, device, case.dtype)[:, 1:-2], around[:, 2:-1], around


SHARED_WITH_PLAN = ("cu_seqlens_q", "max_seqlen_q", "key_starts", "table_starts", "causal", "window_size", "num_splits")


def run(batch, device, has_plan=False, **changes):
    """paged_attention_fwd on a device, with the results as float64: out, lse."""
    case = batch.case
    q, out, around = place_queries(case, batch, device)
    k_cache, v_cache = place_caches(case, batch, device)
    arguments = {name: put(value, device) if isinstance(value, np.ndarray) else value
                 for name, value in batch.arguments.items()}
    arguments |= dict(num_splits=case.num_splits, out=out, return_lse=True)
    if not case.uniform:
        arguments |= dict(cu_seqlens_q=put(batch.cu_seqlens_q, device), max_seqlen_q=max(case.query_lens, default=0))
    arguments |= changes
    tensors = (q, k_cache, v_cache, put(batch.block_tables, device), put(batch.context_lens, device))
    if has_plan:
        known = {name: arguments[name] for name in SHARED_WITH_PLAN if name in arguments}
        arguments["plan"] = pagedkv.plan_attention(*tensors, **known)
    out, lse = pagedkv.paged_attention_fwd(*tensors, **arguments)
    if around is not None:
        assert (get(around)[:, [0, 1, -1]] == 77.0).all(), "wrote beside out"
    return get(out), get(lse)


def check(batch, results):
    (out, lse), (expected_out, expected_lse) = results, batch.expected()
    case, tolerance = batch.case, oracle.tolerance(batch.case.dtype)
    if case.softmax_scale is not None:  # what is wrong with a logit grows with it
        tolerance *= max(1, abs(case.softmax_scale) * case.head_dim**0.5 / 4)
    np.testing.assert_allclose(out, expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_case(case, device, rng):
    batch = make_batch(case, rng)
    results = run(batch, device)
    check(batch, results)
    assert all(np.array_equal(*pair) for pair in zip(results, run(batch, device, has_plan=True)))


def test_a_plan_of_the_cpu_has_no_rows():
    q, cache = np.ones((2, 4, 64), np.float32), np.ones((3, 16, 2, 64), np.float32)
    cache[0, 3:] = cache[2] = np.nan  # nobody's
    tables, lens = np.array([[0], [1]], np.int32), np.array([3, 16], np.int32)
    plan = pagedkv.plan_attention(q, cache, cache, tables, lens)
    assert (type(plan), plan.shape, plan.dtype) == (np.ndarray, (0, 12), np.int32)
    assert pagedkv.plan_attention(q, cache, cache, tables, lens, out=plan) is plan
    larger = np.full((5, 12), 7, np.int32)
    assert pagedkv.plan_attention(q, cache, cache, tables, lens, out=larger) is larger and (larger == 7).all()
    planned, alone = (pagedkv.paged_attention_fwd(q, cache, cache, tables, lens, plan=plan) for plan in (larger, None))
    assert np.array_equal(planned, alone)


# The list is float32, which the tensor cores of the CUDA kernels do not multiply. In 16 bits: test_attention_cuda.py.
FP8_CASES = [replace(case, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="seqs") for case in ATTENTION_CASES
             if case.dtype == "float32" and case.cache_dtype is None and case.layout == "NHD"]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_case_with_an_fp8_cache(case, cuda, rng):
    batch = make_batch(case, rng)
    check(batch, run(batch, cuda))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_queries", [1, 150])
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("greatest", [-(2.0**90), -(2.0**110), -(2.0**124)])
def test_rows_that_see_only_huge_negative_logits(rng, device, dtype, num_queries, num_splits, greatest):
    """The first 40 keys have the greatest logit, the others twice as low ones: the result is the mean of their values."""
    head_dim, num_keys = 64, 700
    q, k, v = np.zeros((num_queries, 1, head_dim)), np.zeros((num_keys, 1, head_dim)), rng.standard_normal((num_keys, 1, head_dim))
    q[..., 0], k[..., 0] = 2.0**60, 2 * greatest / 2**60
    k[:40, :, 0] /= 2
    q, k, v = (oracle.rounded(each, dtype) for each in (q, k, v))
    q, k_cache, v_cache = put(q, device, dtype), put(k[None], device, dtype), put(v[None], device, dtype)
    table, lens = put(np.zeros((1, 1), np.int32), device), put(np.array([num_keys], np.int32), device)
    out, lse = pagedkv.paged_attention_fwd(q, k_cache, v_cache, table, lens, softmax_scale=1.0, num_splits=num_splits,
                                           return_lse=True)  # fmt: skip
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), np.repeat(v[None, :40].mean(1), num_queries, 0), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(get(lse), np.full((1, num_queries), greatest), rtol=1e-6)


def test_every_instruction_set(lesser_isa):
    """The whole list once more in a process whose dispatch is capped: the test above is of the best one."""
    said = run_again(__file__, "test_case and cpu", PAGEDKV_CPU_ISA=lesser_isa)
    assert f" {len(ATTENTION_CASES)} passed" in said, said


def test_an_unknown_instruction_set_is_reported():
    command = [sys.executable, "-c", "import pagedkv; print(pagedkv.ops.build_info()['isa'])"]
    result = subprocess.run(command, env=os.environ | {"PAGEDKV_CPU_ISA": "mmx"}, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr.count("PAGEDKV_CPU_ISA is 'mmx' but must be generic, avx2 or avx512") == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(data, seed):
    draw = data.draw
    num_seqs = draw(st.integers(0, 4))
    query_lens = tuple(draw(st.integers(0, 20)) for _ in range(num_seqs))
    context_lens = tuple(draw(st.integers(0, 90)) for _ in range(num_seqs))
    kv_heads, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    has_fp8 = draw(st.booleans())
    case = AttentionCase(
        "any", query_lens, context_lens, num_q_heads=kv_heads * draw(st.integers(1, 5)), num_kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 8)), block_size=draw(st.integers(1, 40)), dtype=dtype,
        cache_dtype="float8_e4m3fn" if has_fp8 else None, causal=draw(st.booleans()),
        window_size=(draw(st.integers(-1, 40)), draw(st.integers(-1, 40))), softcap=draw(st.sampled_from([0.0, 5.0])),
        alibi=draw(st.sampled_from([None, "shared", "per_seq"])), sinks=draw(st.booleans()),
        scales=draw(st.sampled_from([None, "number", "one", "heads", "seqs"])) if has_fp8 else None,
        num_splits=draw(st.integers(0, 6)), masked_page=draw(st.booleans()),
    )
    batch = make_batch(case, np.random.default_rng(draw(st.integers(0, 2**31))))
    check(batch, run(batch, "cpu"))


# --- what a result may depend on


def test_a_sequence_gets_the_same_bits_in_any_batch_on_any_number_of_threads(rng):
    case = AttentionCase("batch", (1, 30, 1, 5, 1), (5000, 200, 63, 2100, 300))
    batch = make_batch(case, rng)
    threads = ops.get_num_threads()
    try:
        ops.set_num_threads(1)
        alone, _ = run(batch, "cpu")
        ops.set_num_threads(4)
        assert np.array_equal(run(batch, "cpu")[0], alone)
    finally:
        ops.set_num_threads(threads)
    for s, (first, end) in enumerate(zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:])):
        out = pagedkv.paged_attention_fwd(put(batch.q[first:end], "cpu", "float32"),
                                          put(batch.k_cache, "cpu", "float32"), put(batch.v_cache, "cpu", "float32"),
                                          batch.block_tables[s : s + 1], batch.context_lens[s : s + 1])
        assert np.array_equal(get(out), alone[first:end])


def test_given_out_is_returned_and_rows_of_nobody_stay(device, rng):
    batch = make_batch(CASE, rng)
    starts = np.array([1, 2, 4], np.int32)  # the first row belongs to no sequence
    out = put(np.full(batch.q.shape, 5.0), device, "float32")
    result = pagedkv.paged_attention_fwd(
        put(batch.q, device, "float32"), *place_caches(CASE, batch, device), put(batch.block_tables[:, :9], device),
        put(batch.context_lens, device), cu_seqlens_q=put(starts, device), out=out)
    assert result is out
    assert (get(out)[0] == 5.0).all() and (get(out)[1:] != 5.0).all()


def test_pages_that_no_query_sees_are_not_looked_at(device, rng):
    """A window has moved on and the pages behind it are somebody else's, or out of range."""
    batch = make_batch(AttentionCase("window", (1,), (100,), window_size=(20, 0)), rng)
    expected = run(batch, device)
    batch.block_tables[0, : (100 - 1 - 20) // 16] = UNUSED_PAGE
    assert np.array_equal(run(batch, device)[0], expected[0])


def test_nan_in_own_keys_is_not_hidden(device, rng):
    batch = make_batch(CASE, rng)
    batch.k_cache[batch.block_tables[0, 1], 0, :, 3] = np.nan
    out, _ = run(batch, device)
    assert np.isnan(out[0]).all() and not np.isnan(out[1:]).any()


@pytest.mark.parametrize("lengths", [((1, 1), (30, 5)), ((20, 3), (30, 5))], ids=["decode", "prefill"])
def test_pages_that_lie_backwards(lengths, rng):
    """NumPy views of negative steps: an offset below the start of a cache is no masked page."""
    batch = make_batch(AttentionCase("backwards", *lengths, head_dim=16, block_size=4), rng)
    k_cache, v_cache = (np.ascontiguousarray(x[::-1], np.float32)[::-1] for x in (batch.k_cache, batch.v_cache))
    assert k_cache.strides[0] < 0
    out = pagedkv.paged_attention_fwd(batch.q.astype(np.float32), k_cache, v_cache, batch.block_tables, batch.context_lens,
                                      cu_seqlens_q=batch.cu_seqlens_q)  # fmt: skip
    np.testing.assert_allclose(out, batch.expected()[0], atol=oracle.tolerance("float32"))


@pytest.mark.parametrize("softcap", [5e-324, 1e-300, 1e-45, 1e-40, 1e-20])
def test_a_tiny_softcap_makes_all_logits_zero(softcap, device, rng):
    """Not one that is 0, or whose inverse is infinite, in float32: the first of them changed nothing."""
    case = replace(next(case for case in ATTENTION_CASES if case.name == "softcap"), softcap=softcap)
    batch = make_batch(case, rng)
    with np.errstate(over="ignore"):  # the oracle's logits over the cap
        check(batch, run(batch, device))


@pytest.mark.parametrize("softcap", [1e3, 1e6, 1e12])
def test_a_large_softcap_changes_nothing(softcap, rng):
    """What tanh is wrong by near 0 is multiplied by the cap."""
    batch = make_batch(AttentionCase("large cap", (1, 9), (40, 9), head_dim=16), rng)
    arguments = [x.astype(np.float32) for x in (batch.q, batch.k_cache, batch.v_cache)] + [batch.block_tables, batch.context_lens]
    out = pagedkv.paged_attention_fwd(*arguments, cu_seqlens_q=batch.cu_seqlens_q, softcap=softcap)
    batch.arguments["softcap"] = softcap
    np.testing.assert_allclose(out, batch.expected()[0], atol=oracle.tolerance("float32"))


def test_large_logits_neither_overflow_nor_vanish(device, rng):
    batch = make_batch(CASE, rng)
    batch.arguments["softmax_scale"] = 300.0
    out, lse = run(batch, device)
    expected_out, expected_lse = batch.expected()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(out, expected_out, atol=2e-3)  # fp32 logits of 1e3 are good to 1e-4


# --- bad calls: (what to change, the error, what the message says)


def _with(**arrays):
    def change(batch, arguments):
        for name, (index, value) in arrays.items():
            array = getattr(batch, name, None)
            (arguments[name] if array is None else array)[index] = value

    return change


def _argument(**values):
    return lambda batch, arguments: arguments.update(values)


def _array(name, make):
    return lambda batch, arguments: arguments.update({name: make(batch)})


BAD_CONTENT = [
    (_with(block_tables=((1, 2), 99)), r"block_tables\[1, 2\] is 99 but k_cache has 11 blocks"),
    (_with(context_lens=(0, 29)), r"context_lens\[0\] is 29 but block_tables has room for 0 to 28 keys"),
    (_with(context_lens=(1, -1)), r"context_lens\[1\] is -1 "),
    (_argument(key_starts=np.array([0, -1], np.int32)), r"key_starts\[1\] is -1 but must be 0 to 28"),
    (_argument(key_starts=np.array([29, 0], np.int32)), r"key_starts\[0\] is 29 but must be 0 to 28"),
    (_argument(key_starts=np.array([20, 8], np.int32)), r"context_lens\[0\] is 9 but block_tables has room for 0 to 8 keys"),
    (_argument(table_starts=np.array([0, -1], np.int32)), r"table_starts\[1\] is -1 but must be 0 to 7"),
    (_argument(table_starts=np.array([8, 0], np.int32)), r"table_starts\[0\] is 8 but must be 0 to 7"),
    (_argument(table_starts=np.array([5, 0], np.int32)), r"context_lens\[0\] is 9 but block_tables has room for 0 to 8 keys"),
    (_with(cu_seqlens_q=(0, -1)), r"cu_seqlens_q\[0\] is -1 "),
    (_with(cu_seqlens_q=(1, 5)), r"cu_seqlens_q\[2\] is 4 but cu_seqlens_q\[1\] is 5"),
    (_with(cu_seqlens_q=(2, 5)), r"cu_seqlens_q\[2\] is 5 but q has 4 tokens"),
    (_argument(max_seqlen_q=2), r"cu_seqlens_q\[2\] ends 3 queries but max_seqlen_q is 2"),
]


@pytest.mark.parametrize("change, message", BAD_CONTENT, ids=[m for _, m in BAD_CONTENT])
def test_bad_content_is_refused_before_anything_is_written(change, message, rng):
    batch, arguments = make_batch(CASE, rng), {}
    change(batch, arguments)
    out = put(np.full(batch.q.shape, 5.0), "cpu", "float32")
    with pytest.raises(ValueError, match=message):
        run(batch, "cpu", out=out, **arguments)
    assert (get(out) == 5.0).all()


BAD_ARGUMENTS = [
    (dict(num_splits=-1), ValueError, "num_splits is -1 but must be 0 to 256"),
    (dict(num_splits=257), ValueError, "num_splits is 257"),
    (dict(softcap=-1.0), ValueError, "softcap is -1"),
    (dict(softcap=float("nan")), ValueError, "softcap is nan"),
    (dict(softmax_scale=float("inf")), ValueError, "softmax_scale is inf"),
    (dict(window_size=(-2, 0)), ValueError, r"window_size\[0\] is -2"),
    (dict(window_size=(0, -2)), ValueError, r"window_size\[1\] is -2"),
    (dict(max_seqlen_q=-5), ValueError, "max_seqlen_q is -5"),
    (dict(k_scale=2.0), ValueError, "k_scale: is given but the caches are float32"),
    (dict(v_scale=np.ones(2, np.float32)), ValueError, "v_scale: is given but the caches are float32"),
    (dict(alibi_slopes=np.ones(3, np.float32)), ValueError, "alibi_slopes: dim 0 is 3 but q has H=4"),
    (dict(alibi_slopes=np.ones((3, 4), np.float32)), ValueError, "alibi_slopes: dim 0 is 3 but block_tables has S=2"),
    (dict(sinks=np.ones(4, np.float64)), TypeError, "sinks"),
    (dict(sinks=np.ones(5, np.float32)), ValueError, "sinks: dim 0 is 5 but q has H=4"),
    (dict(cu_seqlens_q=np.zeros(2, np.int32)), ValueError, r"cu_seqlens_q: dim 0 is 2 but must be S \+ 1"),
    (dict(cu_seqlens_q=np.zeros(3, np.int64)), TypeError, "cu_seqlens_q: dtype is int64"),
    (dict(out=np.zeros((4, 4, 16), np.float32)), ValueError, "out: dim 2 is 16 but q has D=32"),
    (dict(out=np.zeros((4, 4, 32), np.float16)), TypeError, "out: dtype is float16"),
    (dict(cu_seqlens_q=None, q=np.zeros((5, 4, 32), np.float32)), ValueError, "5 tokens, which 2 sequences"),
    (dict(q=np.zeros((4, 3, 32), np.float32)), ValueError, "3 heads, which is no multiple of k_cache's 2"),
    (dict(q=np.zeros((4, 4, 32), np.float16)), TypeError, "k_cache: dtype is float32 but q has float16"),
    (dict(q=np.zeros((4, 4, 40), np.float32)), ValueError, "k_cache: dim 3 is 32 but q has D=40"),
    (dict(block_tables=np.zeros((2, 7), np.int64)), TypeError, "block_tables: dtype is int64"),
    (dict(key_starts=np.zeros(3, np.int32)), ValueError, "key_starts: dim 0 is 3 but block_tables has S=2"),
    (dict(key_starts=np.zeros(2, np.int64)), TypeError, "key_starts: dtype is int64"),
    (dict(table_starts=np.zeros(3, np.int32)), ValueError, "table_starts: dim 0 is 3 but block_tables has S=2"),
    (dict(table_starts=np.zeros(2, np.int64)), TypeError, "table_starts: dtype is int64"),
    (dict(context_lens=np.zeros(3, np.int32)), ValueError, "context_lens: dim 0 is 3 but block_tables has S=2"),
]


@pytest.mark.parametrize("changes, error, message", BAD_ARGUMENTS, ids=[m for _, _, m in BAD_ARGUMENTS])
def test_bad_arguments(changes, error, message, rng):
    batch = make_batch(CASE, rng)
    arguments = dict(q=batch.q.astype(np.float32), k_cache=batch.k_cache.astype(np.float32),
                     v_cache=batch.v_cache.astype(np.float32), block_tables=batch.block_tables,
                     context_lens=batch.context_lens, cu_seqlens_q=batch.cu_seqlens_q)
    with pytest.raises(error, match=message):
        pagedkv.paged_attention_fwd(**(arguments | changes))


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_head_dims_that_no_kernel_has(head_dim):
    q, cache = np.zeros((1, 1, head_dim), np.float32), np.zeros((1, 4, 1, head_dim), np.float32)
    with pytest.raises(ValueError, match=f"head_dim\\) is {head_dim} but must be a multiple of 8 up to 256"):
        pagedkv.paged_attention_fwd(q, cache, cache, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
