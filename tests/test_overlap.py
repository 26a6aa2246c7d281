"""What an operation writes must be no memory of another argument, unless its docstring allows it. Every operation, every
pair of an output and another tensor; and views of one buffer, of which NumPy says whether they share memory."""

import inspect
from collections.abc import Callable
from functools import partial

import numpy as np
import oracle
import pytest
from numpy.lib.stride_tricks import as_strided

import pagedkv

F32, I32, I64, U8 = np.float32, np.int32, np.int64, np.uint8
T, H, K, D, N, B, V = 4, 4, 2, 16, 6, 4, 12  # tokens, q heads, KV heads, head_dim, blocks, block_size, vocabulary


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, F32)


def cache() -> np.ndarray:
    return ones(N, B, K, D)


def fp8_cache() -> np.ndarray:
    return np.full((N, B, K, D), 56, U8)  # see call(): bytes of four dimensions are float8_e4m3fn


def upto(count: int, dtype: type = I32) -> np.ndarray:
    return np.arange(count, dtype=dtype)


def heads() -> dict:
    return dict(qkv=ones(T, (H + 2 * K) * D), q_weight=ones(D), k_weight=ones(D), cos_sin=ones(9, D), positions=upto(T),
                k_cache=fp8_cache(), v_cache=fp8_cache(), slot_mapping=upto(T, I64), k_scale=ones(K), v_scale=ones(K),
                rms_of=ones(T, 8), q_out=ones(T, H, D))  # fmt: skip


def batch() -> dict:
    return dict(block_tables=np.array([[0, 1], [2, 3]], I32), context_lens=np.array([3, 6], I32),
                cu_seqlens_q=np.array([0, 2, 4], I32), out=ones(T, H, D))  # fmt: skip


def plan() -> np.ndarray:
    return np.zeros((4, 12), I32)


def rows() -> dict:
    return dict(temperatures=ones(T), seeds=upto(T, I64), positions=upto(T), out=upto(T))


def without(arguments: dict, *names: str) -> dict:
    return {name: value for name, value in arguments.items() if name not in names}


def copy(dst: np.ndarray, src: np.ndarray) -> None:
    pagedkv.from_dlpack(dst).copy_(src)


# operation; its tensors, optional ones too (of a list: two of them); what it writes; (output, what it may be) in place
TABLE: list[tuple[Callable, dict, set, set]] = [
    (pagedkv.store_kvcache, dict(key=ones(T, K, D), value=ones(T, K, D), k_cache=fp8_cache(), v_cache=fp8_cache(),
                                 slot_mapping=upto(T), k_scale=ones(K), v_scale=ones(K)), {"k_cache", "v_cache"}, set()),
    (pagedkv.paged_attention_fwd, dict(q=ones(T, H, D), k_cache=fp8_cache(), v_cache=fp8_cache(), **batch(), plan=plan(),
                                       alibi_slopes=ones(H), sinks=ones(H), k_scale=ones(K), v_scale=ones(2, K)),
     {"out"}, set()),
    (pagedkv.plan_attention, dict(q=ones(T, H, D), k_cache=cache(), v_cache=cache(), **batch()) | dict(out=plan()),
     {"out"}, set()),
    (pagedkv.qk_norm_rope_store, heads(), {"k_cache", "v_cache", "q_out"}, set()),
    (pagedkv.qkv_attention_fwd, heads() | batch(), {"k_cache", "v_cache", "q_out", "out"}, set()),
    (pagedkv.qkv_attention_fwd, without(heads(), "rms_of") | batch() | dict(plan=plan()),
     {"k_cache", "v_cache", "q_out", "out"}, set()),
    (pagedkv.copy_blocks, {"caches[0]": cache(), "caches[1]": cache(), "src_dst_pairs": np.array([[0, 1], [2, 3]])},
     {"caches[0]", "caches[1]"}, set()),
    (pagedkv.swap_blocks, {"src[0]": cache(), "src[1]": cache(), "dst[0]": cache(), "dst[1]": cache(),
                           "pairs": np.array([[0, 1], [2, 3]])},
     {"dst[0]", "dst[1]"}, {("dst[0]", "src[0]"), ("dst[1]", "src[1]")}),
    (pagedkv.merge_attention_states, dict(o=ones(3, T, H, D), lse=ones(3, H, T), out=ones(T, H, D)), {"out"}, set()),
    (pagedkv.embedding, dict(token_ids=upto(T), weight=ones(V, D), out=ones(T, D)), {"out"}, set()),
    (pagedkv.gather_rows, dict(x=ones(V, D), indices=upto(T, I64), out=ones(T, D)), {"out"}, set()),
    (pagedkv.rms_norm, dict(x=ones(T, D), weight=ones(D), residual=ones(T, D), out=ones(T, D)), {"residual", "out"},
     {("out", "x")}),
    (pagedkv.scale_columns, dict(x=ones(T, D), factors=ones(D), out=ones(T, D)), {"out"}, {("out", "x")}),
    (pagedkv.linear, dict(x=ones(T, D), weight=ones(8, D), bias=ones(8), gate_up=ones(T, 8), out=ones(T, 4)),
     {"gate_up", "out"}, set()),
    (partial(pagedkv.linear, add_to_out=True), dict(x=ones(T, D), weight=ones(8, D), bias=ones(8), out=ones(T, 8)),
     {"out"}, set()),
    (pagedkv.silu_and_mul, dict(x=ones(T, 2 * D), out=ones(T, D)), {"out"}, set()),
    (pagedkv.take_sampled, dict(token_ids=-upto(T), sampled=upto(T)), {"token_ids"}, set()),
    (pagedkv.sample, dict(logits=ones(T, V), **rows(), top_k=upto(T), top_p=ones(T), min_p=ones(T),
                          repetition_penalties=ones(T), presence_penalties=ones(T), frequency_penalties=ones(T),
                          counts=np.zeros((T, V), I32), slots=upto(T)), {"counts", "out"}, set()),
    (pagedkv.sample_linear, dict(x=ones(T, D), weight=ones(V, D), **rows(), logits=ones(T, V)), {"logits", "out"}, set()),
    (pagedkv.count_tokens, dict(prompt_ids=upto(4), output_ids=upto(5, I64), counts=np.zeros(V, I32)), {"counts"}, set()),
    (pagedkv.token_logprobs, dict(logits=ones(T, V), token_ids=upto(T), num_best=np.array(3), out_ids=np.zeros((T, 4), I32),
                                  out=ones(T, 4)), {"out_ids", "out"}, set()),
    (copy, dict(dst=ones(T, D), src=ones(T, D)), {"dst"}, {("dst", "src")}),
]  # fmt: skip
NOT_TENSORS = {
    "stream", "eps", "rms_eps", "add_to_out", "weight_is_constant", "max_seqlen_q", "softmax_scale", "causal",
    "window_size", "softcap", "num_splits", "past_is_constant", "return_lse", "num_best",
}  # fmt: skip
PAIRS = [(row, written, other) for row, (_, tensors, outputs, _) in enumerate(TABLE) for written in sorted(outputs)
         for other in tensors if other not in NOT_TENSORS | {written}]  # fmt: skip


def name_of(operation: Callable) -> str:
    return (operation.func if isinstance(operation, partial) else operation).__name__


def test_the_table_has_every_operation_and_every_tensor():
    given: dict[str, set] = {}
    for operation, tensors, _, _ in TABLE:
        given.setdefault(name_of(operation), set()).update(name.partition("[")[0] for name in tensors)
    del given["copy"]
    operations = {name: f for name, f in vars(pagedkv).items() if inspect.isbuiltin(f) and "stream=" in str(f.__text_signature__)}
    assert given.keys() == operations.keys()
    for name, operation in operations.items():
        assert given[name] - NOT_TENSORS == set(inspect.signature(operation).parameters) - NOT_TENSORS, name


def call(operation: Callable, tensors: dict) -> object:
    """Lists are put together, and numbers and fp8 tensors made of what stands for them."""
    arguments: dict = {}
    for name, value in tensors.items():
        if value.dtype == U8:
            value = pagedkv.from_dlpack(value.reshape(-1)).view(value.shape, "float8_e4m3fn")
        if name.endswith("]"):
            arguments.setdefault(name.partition("[")[0], []).append(value)
        else:
            arguments[name] = value if value.ndim else int(value)
    return operation(**arguments)


def in_one_buffer(a: np.ndarray, b: np.ndarray, b_at: int) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays in one memory, b so many bytes behind a; where they overlap, what b holds."""
    low = min(b_at, 0)
    memory = np.zeros(a.nbytes + b.nbytes + abs(b_at) + 64, U8)
    start = -memory.ctypes.data % 64
    views = []
    for array, at in ((a, -low), (b, b_at - low)):
        view = memory[start + at : start + at + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        views.append(view)
    return views[0], views[1]


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda row: f"{name_of(TABLE[row][0])}-{row}")
def test_the_table_is_of_good_calls(row):
    operation, tensors, _, _ = TABLE[row]
    call(operation, {name: value.copy() for name, value in tensors.items()})


@pytest.mark.parametrize("place", ["same", "an element on", "a row on", "an element back", "a row back"])
@pytest.mark.parametrize("row, written, other", PAIRS, ids=lambda value: str(value))
def test_an_output_in_another_argument(row, written, other, place):
    operation, tensors, outputs, allowed = TABLE[row]
    tensors = {name: value.copy() for name, value in tensors.items()}
    output, argument = tensors[written], tensors[other]
    itemsize = max(output.itemsize, argument.itemsize)
    size = max(output.strides[0], itemsize) if "row" in place else itemsize
    output, argument = in_one_buffer(output, argument, {"same": 0, "on": size, "back": -size}[place.split()[-1]])
    tensors |= {written: output, other: argument}
    is_fine = not np.shares_memory(output, argument)  # a row of the output is all of the argument
    if is_fine or (place == "same" and (written, other) in allowed):
        call(operation, tensors)
        return
    before = {name: value.copy() for name, value in tensors.items()}
    with pytest.raises(BufferError) as caught:
        call(operation, tensors)
    expected = {f"{written}: overlaps {other}, which is read while it is written"}
    if other in outputs:
        expected = {f"{a}: overlaps {b}, which is written too" for a, b in ((written, other), (other, written))}
    if operation is copy:
        expected = {"src: overlaps the memory that would be written"}
    assert str(caught.value) in expected
    for name, value in tensors.items():
        assert np.array_equal(value, before[name]), name


# --- in place, where the docstring says so


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_in_place(rng, with_residual):
    wide, weight = rng.standard_normal((5, 40)).astype(F32), rng.standard_normal(33).astype(F32)
    residual = rng.standard_normal((5, 33)).astype(F32) if with_residual else None
    x = wide[:, 4:37]
    expected, new_residual = oracle.rms_norm(x.copy(), weight, 1e-6, "float32", residual=residual)
    pagedkv.rms_norm(x, weight, residual=residual, out=x)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
    if with_residual:
        np.testing.assert_allclose(residual, new_residual, rtol=1e-6)


def test_one_part_may_be_merged_in_place(rng):
    o, lse = rng.standard_normal((1, T, H, D)).astype(F32), rng.standard_normal((1, H, T)).astype(F32)
    before = o.copy()
    pagedkv.merge_attention_states(o, lse, out=o[0])
    np.testing.assert_allclose(o, before, rtol=1e-6)
    two = np.concatenate([o, o])
    with pytest.raises(BufferError, match="out: overlaps o, which is read while it is written"):
        pagedkv.merge_attention_states(two, np.concatenate([lse, lse]), out=two[0])


def test_pages_move_within_one_pool(rng):
    pool = rng.standard_normal((N, B, K, D)).astype(F32)
    before = pool.copy()
    pagedkv.swap_blocks([pool], [pool], np.array([[0, 3], [1, 5]]))
    np.testing.assert_array_equal(pool, before[[0, 1, 2, 0, 4, 1]])
    pagedkv.swap_blocks([pool[:2]], [pool], np.array([[0, 2]]))  # less of the same pool
    np.testing.assert_array_equal(pool[2], before[0])
    pagedkv.swap_blocks([pool[:3]], [pool[3:]], np.array([[2, 0], [0, 2]]))  # two pools of one memory
    np.testing.assert_array_equal(pool, before[[0, 1, 0, 0, 4, 0]])
    for src, dst in ((pool[:4], pool[2:]), (pool[::2], pool[:3]), (pool[:3], pool[::2])):
        before = pool.copy()
        with pytest.raises(BufferError, match=r"^dst\[0\]: overlaps src\[0\], which is read while it is written$"):
            pagedkv.swap_blocks([src], [dst], np.array([[0, 1]]))
        np.testing.assert_array_equal(pool, before)


# --- memory that interleaves and does not overlap

INTERLEAVED = {
    "[N, 2, B, H, D]": ((N, 2, B, K, D), lambda m: (m[:, 0], m[:, 1])),
    "[2, N, B, H, D]": ((2, N, B, K, D), lambda m: (m[0], m[1])),
    "[N, B, H, 2 D]": ((N, B, K, 2 * D), lambda m: (m[..., :D], m[..., D:])),
    "[N, B, 2 H, D]": ((N, B, 2 * K, D), lambda m: (m[:, :, :K], m[:, :, K:])),
    "[N, H, B, 2 D]": ((N, K, B, 2 * D), lambda m: (m[..., :D].swapaxes(1, 2), m[..., D:].swapaxes(1, 2))),
    "K [N, B, H, D], V [N, H, B, D]": ((N, 2, B * K * D), lambda m: (
        m[:, 0].reshape(N, B, K, D), m[:, 1].reshape(N, K, B, D).swapaxes(1, 2))),
    "backwards": ((N, 2, B, K, D), lambda m: (m[::-1, 0], m[::-1, 1])),
    "every second page": ((2 * N, B, K, D), lambda m: (m[::2], m[1::2])),
}  # fmt: skip


@pytest.mark.parametrize("layout", INTERLEAVED)
def test_caches_of_one_allocation(rng, layout):
    shape, split = INTERLEAVED[layout]
    memory = np.full(shape, np.nan, F32)
    k_cache, v_cache = split(memory)
    assert np.shares_memory(k_cache, memory) and not np.shares_memory(k_cache, v_cache)
    key, value = rng.standard_normal((2, T, K, D)).astype(F32)
    slots = rng.permutation(N * B)[:T]
    pagedkv.store_kvcache(key, value, k_cache, v_cache, slots)
    np.testing.assert_array_equal(k_cache[slots // B, slots % B], key)
    np.testing.assert_array_equal(v_cache[slots // B, slots % B], value)
    assert np.isnan(memory).sum() == memory.size - 2 * key.size


def test_all_layers_of_one_allocation(rng):
    memory = rng.standard_normal((N, 20, 2, B * K * D)).astype(F32)
    expected = memory.copy()
    expected[4] = expected[1]
    caches = [memory[:, layer, i] for layer in range(20) for i in range(2)]
    pagedkv.copy_blocks(caches, np.array([[1, 4]]))
    np.testing.assert_array_equal(memory, expected)
    wrong = memory.reshape(N, -1)[:, 5 : 5 + B * K * D]
    with pytest.raises(BufferError, match=r"caches\[\d+\]: overlaps caches\[\d+\], which is written too"):
        pagedkv.copy_blocks([*caches, wrong], np.array([[1, 4]]))
    np.testing.assert_array_equal(memory, expected)


def random_view(rng, memory: np.ndarray, shape: tuple[int, ...], *, is_dense: bool) -> np.ndarray:
    """Of such a shape, anywhere in the memory, with any strides that keep it there."""
    while True:
        strides = [int(s) for s in rng.choice([-24, -9, -4, -2, -1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 36], len(shape))]
        if is_dense:
            strides[-1] = 1
        steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low, high = -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        if low + high >= memory.size:
            continue
        first = int(rng.integers(low, memory.size - high))
        return as_strided(memory[first:], shape, [s * memory.itemsize for s in strides])


def has_distinct_elements(view: np.ndarray) -> bool:
    """By pagedkv's rule: each dimension steps over all of the smaller ones."""
    span = 1
    for stride, size in sorted((abs(s) // view.itemsize, n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return True


def test_random_views_of_one_shape_and_two_dtypes(rng):
    """copy_ takes any strides: it refuses exactly what shares memory, and copies the rest right."""
    outcomes = {True: 0, False: 0}
    while min(outcomes.values()) < 700:
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        memory = rng.standard_normal(200).astype(np.float16).view(U8)
        dtypes = rng.choice([F32, np.float16], 2)
        dst, src = (random_view(rng, memory.view(dtype), shape, is_dense=False) for dtype in dtypes)
        if not has_distinct_elements(dst):
            continue
        shares = np.shares_memory(dst, src)
        is_same = dst.dtype == src.dtype and dst.ctypes.data == src.ctypes.data and all(
            a == b for a, b, n in zip(dst.strides, src.strides, shape, strict=True) if n > 1)  # fmt: skip
        outcomes[bool(shares)] += 1
        values, before = src.astype(dst.dtype), memory.copy()
        if shares and not is_same:
            with pytest.raises(BufferError, match="src: overlaps the memory that would be written"):
                pagedkv.from_dlpack(dst).copy_(src)
            np.testing.assert_array_equal(memory, before)
        else:
            pagedkv.from_dlpack(dst).copy_(src)
            np.testing.assert_array_equal(dst, values)


def test_random_views_of_different_shapes(rng):
    """store_kvcache, which skips every token here: refused exactly where a cache shares memory with another argument."""
    outcomes = {True: 0, False: 0}
    memory = np.zeros(400, F32)
    while min(outcomes.values()) < 500:
        tokens, kv_heads, dim, blocks, size = (int(n) for n in rng.integers(1, 4, 5))
        names = {"key": (tokens, kv_heads, dim), "value": (tokens, kv_heads, dim),
                 "k_cache": (blocks, size, kv_heads, dim), "v_cache": (blocks, size, kv_heads, dim)}  # fmt: skip
        views = {name: random_view(rng, memory, shape, is_dense=True) for name, shape in names.items()}
        k_cache, v_cache = views["k_cache"], views["v_cache"]
        if not has_distinct_elements(k_cache) or not has_distinct_elements(v_cache):
            continue
        shares = np.shares_memory(k_cache, v_cache) or any(
            np.shares_memory(views[name], written) for name in ("key", "value") for written in (k_cache, v_cache))
        outcomes[shares] += 1
        slots = np.full(tokens, -1)
        if shares:
            with pytest.raises(BufferError, match="overlaps"):
                pagedkv.store_kvcache(**views, slot_mapping=slots)
        else:
            pagedkv.store_kvcache(**views, slot_mapping=slots)


def test_random_lists_of_pools(rng):
    """copy_blocks and swap_blocks without pairs: refused exactly where a written cache shares memory with another."""
    outcomes = {True: 0, False: 0}
    memory = np.zeros(4000, U8)
    no_pairs = np.zeros((0, 2), I32)
    while min(outcomes.values()) < 500:
        step, pools = int(rng.integers(1, 13)), []
        kinds = [(rng.choice([F32, np.float16, U8]), int(rng.integers(1, 7))) for _ in range(2)]
        for dtype, size in kinds * 2:
            view, blocks = memory.view(dtype), int(rng.integers(0, 12))
            stride = max(step * 8 // view.itemsize, size) if rng.random() < 0.8 else size + int(rng.integers(9))
            first = int(rng.integers(0, 160 // view.itemsize)) + int(rng.choice([0, 1000])) // view.itemsize
            pools.append(as_strided(view[first:], (blocks, size), [stride * view.itemsize, view.itemsize]))
        written, others = pools[:2], pools[2:] if rng.integers(2) else []
        if any(a.ctypes.data == b.ctypes.data for a, b in zip(others, written, strict=False)):
            continue  # may be one pool
        shares = np.shares_memory(*written) or any(np.shares_memory(a, b) for a in others for b in written)
        outcomes[shares] += 1
        call = partial(pagedkv.swap_blocks, others, written) if others else partial(pagedkv.copy_blocks, written)
        if shares:
            with pytest.raises(BufferError, match=r"\[\d\]: overlaps \w+\[\d\], which is "):
                call(no_pairs)
        else:
            call(no_pairs)
