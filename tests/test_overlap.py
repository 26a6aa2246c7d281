"""What an operation writes must be no memory of another argument, unless its docstring allows it. Every operation, every
pair of an output and another tensor. Whether two views overlap is tests/test_overlap_views.py's."""

import inspect
from collections.abc import Callable
from functools import partial

import numpy as np
import oracle
import pytest
from fuzz_calls_collectives import COMM

import pagedkv
from pagedkv import ops

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
                rms_of=ones(T, 8), rms_squares=ones(T, 1), q_out=ones(T, H, D))  # fmt: skip


def batch() -> dict:
    return dict(block_tables=np.array([[0, 1], [2, 3]], I32), context_lens=np.array([3, 6], I32),
                cu_seqlens_q=np.array([0, 2, 4], I32), out=ones(T, H, D))  # fmt: skip


def placed() -> dict:
    """What only a call that is not fused takes."""
    return batch() | dict(key_starts=np.zeros(2, I32), table_starts=np.zeros(2, I32))


def appended() -> dict:
    return dict(key=ones(T, K, D), value=ones(T, K, D), k_cache=fp8_cache(), v_cache=fp8_cache(),
                block_tables=np.array([[0, 1], [2, 3]], I32), cache_lens=np.array([3, 5], I32), cu_seqlens=np.array([0, 2, 4], I32),
                key_starts=np.zeros(2, I32), k_scale=ones(K), v_scale=ones(K))  # fmt: skip


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
    (pagedkv.paged_attention_fwd, dict(q=ones(T, H, D), k_cache=fp8_cache(), v_cache=fp8_cache(), **placed(), plan=plan(),
                                       alibi_slopes=ones(H), sinks=ones(H), k_scale=ones(K), v_scale=ones(2, K)),
     {"out"}, set()),
    (pagedkv.plan_attention, dict(q=ones(T, H, D), k_cache=cache(), v_cache=cache(), **placed()) | dict(out=plan()),
     {"out"}, set()),
    (ops.append_kvcache, appended(), {"k_cache", "v_cache"}, set()),
    (ops.rope_append_kvcache, dict(q=ones(T, H, D), cos=ones(9, D // 2), sin=ones(9, D // 2), **appended(),
                                       cu_seqlens_q=np.array([0, 2, 4], I32), rotary_starts=np.array([3, 5], I32), out=ones(T, H, D)),
     {"k_cache", "v_cache", "out"}, set()),
    (ops.qk_norm_rope_store, heads(), {"k_cache", "v_cache", "q_out"}, set()),
    (ops.qkv_attention_fwd, without(heads(), "q_out") | batch() | dict(plan=plan()),
     {"k_cache", "v_cache", "out"}, set()),
    (pagedkv.copy_blocks, {"caches[0]": cache(), "caches[1]": cache(), "src_dst_pairs": np.array([[0, 1], [2, 3]])},
     {"caches[0]", "caches[1]"}, set()),
    (pagedkv.swap_blocks, {"src[0]": cache(), "src[1]": cache(), "dst[0]": cache(), "dst[1]": cache(),
                           "pairs": np.array([[0, 1], [2, 3]])},
     {"dst[0]", "dst[1]"}, {("dst[0]", "src[0]"), ("dst[1]", "src[1]")}),
    (pagedkv.merge_attention_states, dict(o=ones(3, T, H, D), lse=ones(3, H, T), out=ones(T, H, D)), {"out"}, set()),
    (ops.embedding, dict(token_ids=upto(T), weight=ones(V, D), out=ones(T, D)), {"out"}, set()),
    (ops.gather_rows, dict(x=ones(V, D), indices=upto(T, I64), out=ones(T, D)), {"out"}, set()),
    (ops.rms_norm, dict(x=ones(T, D), weight=ones(D), residual=ones(T, D), out=ones(T, D)), {"residual", "out"},
     {("out", "x")}),
    (ops.scale_columns, dict(x=ones(T, D), factors=ones(D), out=ones(T, D)), {"out"}, {("out", "x")}),
    (ops.linear, dict(x=ones(T, D), weight=ones(8, D), bias=ones(8), gate_up=ones(T, 8), out=ones(T, 4)),
     {"gate_up", "out"}, set()),
    (partial(ops.linear, rms_eps=1e-6), dict(x=ones(T, 8), weight=ones(8, 8), gate_up=ones(T, 8), x_squares=ones(T, 1),
                                             out=ones(T, 4)), {"gate_up", "out"}, set()),
    (partial(ops.linear, add_to_out=True), dict(x=ones(T, D), weight=ones(8, D), bias=ones(8), out=ones(T, 8),
                                                    out_squares=ones(T, 1)), {"out", "out_squares"}, set()),
    (ops.linear, dict(x=ones(T, 8), weight=np.ones((8, 4), U8), weight_scales=ones(8, 1), weight_zeros=np.ones((8, 1), U8), out=ones(T, 8)),
     {"out"}, set()),
    (ops.route_experts, dict(logits=ones(T, V), out_experts=np.zeros((T, 2), I32), out_weights=ones(T, 2)),
     {"out_experts", "out_weights"}, set()),
    (ops.expert_linear, dict(x=ones(T, 2, D), weight=ones(3, 8, D), experts=np.ones((T, 2), I32), weights=ones(T, 2), out=ones(T, 8)),
     {"out"}, set()),
    (ops.moe_mlp, dict(x=ones(T, D), router=ones(3, D), gate_up=ones(3, 8, D), down=ones(3, D, 4), logits=ones(T, 3),
                       experts=np.zeros((T, 2), I32), weights=ones(T, 2), activation=ones(T, 2, 4), out=ones(T, D)),
     {"logits", "experts", "weights", "activation", "out"}, set()),
    (ops.lora_add, dict(x=ones(T, D), a=ones(2, 3, D), b=ones(2, 8, 3), slots=np.ones(T, I32), out=ones(T, 8)), {"out"}, set()),
    (ops.expert_linear, dict(x=ones(T, 8), weight=np.ones((3, 8, 4), U8), experts=np.ones((T, 2), I32), weight_scales=ones(3, 8, 1),
                             weight_zeros=np.ones((3, 8, 1), U8), out=ones(T, 2, 8)), {"out"}, set()),
    (ops.silu_and_mul, dict(x=ones(T, 2 * D), out=ones(T, D)), {"out"}, set()),
    (ops.take_sampled, dict(token_ids=-upto(T), sampled=upto(T)), {"token_ids"}, set()),
    (ops.sample, dict(logits=ones(T, V), **rows(), top_k=upto(T), top_p=ones(T), min_p=ones(T),
                          repetition_penalties=ones(T), presence_penalties=ones(T), frequency_penalties=ones(T),
                          counts=np.zeros((T, V), I32), slots=upto(T)), {"counts", "out"}, set()),
    (ops.sample_linear, dict(x=ones(T, D), weight=ones(V, D), **rows(), logits=ones(T, V)), {"logits", "out"}, set()),
    (ops.sample_linear, dict(x=ones(T, 8), weight=np.ones((V, 4), U8), weight_scales=ones(V, 1), weight_zeros=np.ones((V, 1), U8), **rows(),
                             logits=ones(T, V)), {"logits", "out"}, set()),
    (partial(ops.linear_candidates, first_token=64), dict(x=ones(T, D), weight=ones(V, D), **rows(), logits=ones(T, V)) | dict(out=upto(T, I64)),
     {"logits", "out"}, set()),
    (partial(ops.linear_candidates, first_token=0), dict(x=ones(T, 8), weight=np.ones((V, 4), U8), weight_scales=ones(V, 1),
                                                         weight_zeros=np.ones((V, 1), U8), **rows(), logits=ones(T, V)) | dict(out=upto(T, I64)),
     {"logits", "out"}, set()),
    (partial(ops.all_reduce, comm=COMM), dict(x=ones(T, D), residual=ones(T, D), out_squares=ones(T, 1), out=ones(T, D)),
     {"out_squares", "out"}, {("out", "x"), ("out", "residual")}),
    (partial(ops.all_gather, comm=COMM), dict(x=ones(T, D), out=ones(T, D)), {"out"}, set()),
    (partial(ops.sample_candidates, comm=COMM), dict(candidates=upto(T, I64) + (0x90000000 - 2**32 << 32), out=upto(T)), {"out"}, set()),
    (ops.count_tokens, dict(prompt_ids=upto(4), output_ids=upto(5, I64), counts=np.zeros(V, I32)), {"counts"}, set()),
    (ops.token_logprobs, dict(logits=ones(T, V), token_ids=upto(T), num_best=np.array(3), out_ids=np.zeros((T, 4), I32),
                                  out=ones(T, 4)), {"out_ids", "out"}, set()),
    (ops.bias_logits, dict(logits=ones(T, V), rows=upto(T), token_ids=upto(T), values=ones(T)), {"logits"}, set()),
    (ops.mask_logits, dict(logits=ones(T, V), bitmask=np.ones((T, 1), I32), rows=upto(T)), {"logits"}, set()),
    (copy, dict(dst=ones(T, D), src=ones(T, D)), {"dst"}, {("dst", "src")}),
]  # fmt: skip
NOT_TENSORS = {
    "stream", "eps", "rms_eps", "add_to_out", "weight_is_constant", "quantize_x", "weight_block", "normalize", "gated",
    "experts_are_constant", "max_seqlen_q", "softmax_scale", "causal",
    "window_size", "softcap", "num_splits", "batch_invariant", "past_is_constant", "return_lse", "num_best", "comm", "first_row", "first_token", "interleaved", "q_at_start",
}  # fmt: skip
PAIRS = [(row, written, other) for row, (_, tensors, outputs, _) in enumerate(TABLE) for written in sorted(outputs)
         for other in tensors if other not in NOT_TENSORS | {written}]  # fmt: skip


def name_of(operation: Callable) -> str:
    return (operation.func if isinstance(operation, partial) else operation).__name__


def operations() -> dict[str, Callable]:
    """Those of the module that take a stream, but for decode_step, which has its own tests."""
    builtins = {name: f for name, f in vars(ops).items() if inspect.isbuiltin(f) and name != "decode_step"}
    return {name: f for name, f in builtins.items() if "stream=" in str(f.__text_signature__)}


def test_the_table_has_every_operation_and_every_tensor():
    given: dict[str, set] = {}
    for operation, tensors, _, _ in TABLE:
        given.setdefault(name_of(operation), set()).update(name.partition("[")[0] for name in tensors)
    del given["copy"]
    assert given.keys() == operations().keys()
    for name, operation in operations().items():
        assert given[name] - NOT_TENSORS == set(inspect.signature(operation).parameters) - NOT_TENSORS, name


def call(operation: Callable, tensors: dict) -> object:
    """Lists are put together, and numbers and fp8 tensors made of what stands for them."""
    arguments: dict = {}
    for name, value in tensors.items():
        if value.dtype == U8 and value.ndim == 4:
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
    ops.rms_norm(x, weight, residual=residual, out=x)
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
