"""Wrong calls of every function: the exception's type, its message, and that nothing was written. One row a mistake."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv
from pagedkv import ops
from pagedkv.ops import (
    copy_blocks,
    embedding,
    gather_rows,
    linear,
    merge_attention_states,
    paged_attention_fwd,
    plan_attention,
    qk_norm_rope_store,
    qkv_attention_fwd,
    rms_norm,
    sample,
    sample_linear,
    silu_and_mul,
    store_kvcache,
    swap_blocks,
)

F32, I32, I64 = np.float32, np.int32, np.int64
T, H, K, D, N, B = 5, 4, 2, 16, 6, 4  # tokens, q heads, KV heads, head_dim, blocks, block_size


def good() -> SimpleNamespace:
    """Arguments of every operation that fit each other."""
    x = np.ones
    return SimpleNamespace(
        store=dict(key=x((T, K, D), F32), value=x((T, K, D), F32), k_cache=x((N, B, K, D), F32),
                   v_cache=x((N, B, K, D), F32), slot_mapping=np.arange(T, dtype=I64)),
        attention=dict(q=x((T, H, D), F32), k_cache=x((N, B, K, D), F32), v_cache=x((N, B, K, D), F32),
                       block_tables=np.array([[0, 1], [2, 3]], I32), context_lens=np.array([3, 6], I32),
                       cu_seqlens_q=np.array([0, 2, 5], I32)),
        plan=dict(q=x((T, H, D), F32), k_cache=x((N, B, K, D), F32), v_cache=x((N, B, K, D), F32),
                  block_tables=np.array([[0, 1], [2, 3]], I32), context_lens=np.array([3, 6], I32),
                  cu_seqlens_q=np.array([0, 2, 5], I32)),
        copy=dict(caches=[x((N, B, K, D), F32), x((N, B, K, D), F32)], src_dst_pairs=np.array([[0, 1], [2, 3]])),
        swap=dict(src=[x((N, B, K, D), F32)], dst=[x((2 * N, B, K, D), F32)], pairs=np.array([[0, 1], [2, 11]])),
        merge=dict(o=x((3, T, H, D), F32), lse=x((3, H, T), F32)),
        embedding=dict(token_ids=np.array([0, 2, 1], I32), weight=x((4, 8), F32)),
        gather=dict(x=x((4, 8), F32), indices=np.array([3, 3], I64)),
        norm=dict(x=x((T, D), F32), weight=x(D, F32)),
        linear=dict(x=x((T, D), F32), weight=x((7, D), F32), bias=x(7, F32)),
        silu=dict(x=x((T, 2 * D), F32)),
        sample=dict(logits=x((T, 9), F32), temperatures=x(T, F32), seeds=np.arange(T), positions=np.arange(T, dtype=I32)),
        sample_linear=dict(x=x((T, D), F32), weight=x((9, D), F32), temperatures=x(T, F32), seeds=np.arange(T),
                           positions=np.arange(T, dtype=I32), logits=x((T, 9), F32)),
        rope=dict(qkv=x((T, (H + 2 * K) * D), F32), q_weight=x(D, F32), k_weight=x(D, F32), cos_sin=x((9, D), F32),
                  positions=np.arange(T, dtype=I32), k_cache=x((N, B, K, D), F32), v_cache=x((N, B, K, D), F32),
                  slot_mapping=np.arange(T, dtype=I64)),
        qkv=dict(qkv=x((T, (H + 2 * K) * D), F32), q_weight=x(D, F32), k_weight=x(D, F32), cos_sin=x((9, D), F32),
                 positions=np.arange(T, dtype=I32), k_cache=x((N, B, K, D), F32), v_cache=x((N, B, K, D), F32),
                 slot_mapping=np.arange(T, dtype=I64), block_tables=np.array([[0, 1], [2, 3]], I32),
                 context_lens=np.array([3, 6], I32), cu_seqlens_q=np.array([0, 2, 5], I32)),
    )  # fmt: skip


OPS: dict[str, Callable] = {
    "store": store_kvcache, "attention": paged_attention_fwd, "plan": plan_attention, "copy": copy_blocks,
    "swap": swap_blocks, "merge": merge_attention_states, "embedding": embedding, "gather": gather_rows,
    "norm": rms_norm, "linear": linear, "silu": silu_and_mul, "sample": sample, "sample_linear": sample_linear,
    "rope": qk_norm_rope_store, "qkv": qkv_attention_fwd,
}  # fmt: skip
WHOLE = (1 << 63) - 1


def sealed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


# operation, what is changed of the good arguments, exception, the message (from its start)
TABLE = [
    ("store", dict(key=np.ones((T, K), F32)), ValueError, "key: has 2 dimensions but must have 3: [T H D]"),
    ("store", dict(key=np.ones((T, K, D), I32)), TypeError, "key: dtype is int32 but must be one of float32, float16, bfloat16"),
    ("store", dict(key=np.ones((T, K, D), "f8")), TypeError, "key: dtype float64 is not supported (float32, float16, "),
    ("store", dict(key=3), TypeError, "key: must be a tensor (torch, NumPy, pagedkv, DLPack), not 'int'"),
    ("store", dict(key=[[1.0]]), TypeError, "key: must be a tensor (torch, NumPy, pagedkv, DLPack), not 'list'"),
    ("store", dict(key=None), TypeError, "key: must be a tensor (torch, NumPy, pagedkv, DLPack), not 'NoneType'"),
    ("store", dict(value=np.ones((T, K, D + 8), F32)), ValueError, "value: dim 2 is 24 but key has D=16"),
    ("store", dict(value=np.ones((T, K, D), np.float16)), TypeError, "value: dtype is float16 but key has float32"),
    ("store", dict(k_cache=np.ones((N, B, K + 1, D), F32)), ValueError, "k_cache: dim 2 is 3 but key has H=2"),
    ("store", dict(v_cache=np.ones((N, B + 1, K, D), F32)), ValueError, "v_cache: dim 1 is 5 but k_cache has B=4"),
    ("store", dict(v_cache=sealed(np.ones((N, B, K, D), F32))), BufferError, "v_cache: is read-only but would be written"),
    ("store", dict(k_cache=np.broadcast_to(np.ones((1, B, K, D), F32), (N, B, K, D))), BufferError, "k_cache: is read-only"),
    ("store", dict(k_cache=np.ones((N, B, K, 2 * D), F32)[..., ::2]), BufferError, "k_cache: the last dimension must be dense but its stride is 2"),
    ("store", dict(slot_mapping=np.arange(T, dtype=F32)), TypeError, "slot_mapping: dtype is float32 but must be one of int32, int64"),
    ("store", dict(slot_mapping=np.arange(T + 1)), ValueError, "slot_mapping: dim 0 is 6 but key has T=5"),
    ("store", dict(slot_mapping=np.array([0, 1, N * B, 2, 3])), ValueError, "slot_mapping[2] is 24"),
    ("store", dict(slot_mapping=np.array([0, 1, WHOLE, 2, 3])), ValueError, f"slot_mapping[2] is {WHOLE}"),
    ("store", dict(k_scale="big"), TypeError, "k_scale: must be a tensor"),
    ("store", dict(k_scale=2.0), ValueError, "k_scale: "),
    ("attention", dict(q=np.ones((T, 3, D), F32)), ValueError, "q: has 3 heads, which is no multiple of k_cache's 2 KV heads"),
    ("attention", dict(q=np.ones((T, H, D + 8), F32)), ValueError, "k_cache: dim 3 is 16 but q has D=24"),
    ("attention", dict(block_tables=np.zeros((2, 2), I64)), TypeError, "block_tables: dtype is int64 but must be int32"),
    ("attention", dict(block_tables=np.array([[0, 1], [2, N]], I32)), ValueError, "block_tables[1, 1] is 6"),
    ("attention", dict(context_lens=np.zeros(3, I32)), ValueError, "context_lens: dim 0 is 3 but block_tables has S=2"),
    ("attention", dict(context_lens=np.array([3, 9], I32)), ValueError, "context_lens[1] is 9"),
    ("attention", dict(context_lens=np.array([3, -1], I32)), ValueError, "context_lens[1] is -1"),
    ("attention", dict(cu_seqlens_q=np.array([0, 2], I32)), ValueError, "cu_seqlens_q: dim 0 is 2 but must be S + 1"),
    ("attention", dict(cu_seqlens_q=np.array([0, 6, 5], I32)), ValueError, "cu_seqlens_q"),
    ("attention", dict(cu_seqlens_q=None), ValueError, "q: has 5 tokens, which 2 sequences cannot share evenly"),
    ("attention", dict(window_size=3), TypeError, "window_size: must be a pair of ints, not 3"),
    ("attention", dict(window_size=(1, 2, 3)), TypeError, "window_size: must be a pair of ints, not (1, 2, 3)"),
    ("attention", dict(window_size="ab"), TypeError, "window_size: must be a pair of ints, not 'ab'"),
    ("attention", dict(window_size=(1.5, 0)), TypeError, "window_size[0]: must be an int, not 'float'"),
    ("attention", dict(window_size=(-2, 0)), ValueError, "window_size[0] is -2 but must be at least -1"),
    ("attention", dict(window_size=(0, 2**70)), ValueError, f"window_size[1]: {2**70} does not fit in 64 bits"),
    ("attention", dict(softcap=-1.0), ValueError, "softcap is -1 but must be finite and at least 0"),
    ("attention", dict(softcap=float("nan")), ValueError, "softcap is "),
    ("attention", dict(softcap=1e39), ValueError, "softcap is 1e+39 but must be finite"),
    ("attention", dict(softmax_scale=float("nan")), ValueError, "softmax_scale is nan but must be finite as a float32"),
    ("attention", dict(softmax_scale=1e300), ValueError, "softmax_scale is 1e+300 but must be finite as a float32"),
    ("attention", dict(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1 but must be at least 0"),
    ("attention", dict(softmax_scale=float("inf")), ValueError, "softmax_scale is inf but must be finite as a float32"),
    ("attention", dict(softmax_scale="1"), TypeError, "softmax_scale: must be a number, not 'str'"),
    ("attention", dict(softmax_scale=10**400), ValueError, "softmax_scale: 1000000"),
    ("attention", dict(causal="no"), TypeError, "causal: must be True or False, not 'no'"),
    ("attention", dict(causal=[]), TypeError, "causal: must be True or False, not []"),
    ("attention", dict(return_lse="yes"), TypeError, "return_lse: must be True or False, not 'yes'"),
    ("attention", dict(num_splits=-1), ValueError, "num_splits is -1 but must be 0 to "),
    ("attention", dict(num_splits=1.0), TypeError, "num_splits: must be an int, not 'float'"),
    ("attention", dict(max_seqlen_q=-5), ValueError, "max_seqlen_q is -5 but must be at least 0"),
    ("attention", dict(sinks=np.ones(H + 1, F32)), ValueError, "sinks: dim 0 is 5 but q has H=4"),
    ("attention", dict(alibi_slopes=np.ones((3, H), F32)), ValueError, "alibi_slopes: dim 0 is 3 but block_tables has S=2"),
    ("attention", dict(out=np.ones((T, H, D + 1), F32)), ValueError, "out: dim 2 is 17 but q has D=16"),
    ("attention", dict(out=np.ones((T, H, D), np.float16)), TypeError, "out: dtype is float16 but q has float32"),
    ("attention", dict(out=sealed(np.ones((T, H, D), F32))), BufferError, "out: is read-only but would be written"),
    ("attention", dict(out="here"), TypeError, "out: must be a tensor"),
    ("plan", dict(context_lens=np.zeros(3, I32)), ValueError, "context_lens: dim 0 is 3 but block_tables has S=2"),
    ("plan", dict(num_splits=257), ValueError, "num_splits is 257 but must be 0 to 256"),
    ("plan", dict(out=np.zeros((1, 11), I32)), ValueError, "out: dim 1 is 11 but must be 12"),
    ("plan", dict(out=np.zeros((0, 12), F32)), TypeError, "out: dtype is float32 but must be int32"),
    ("attention", dict(k_scale=np.ones(1, F32)), ValueError, "k_scale: "),
    ("attention", dict(plan=np.zeros((0, 11), I32)), ValueError, "plan: dim 1 is 11 but must be 12"),
    ("attention", dict(plan=np.zeros((0, 12), F32)), TypeError, "plan: dtype is float32 but must be int32"),
    ("copy", dict(caches=[]), None, ""),
    ("copy", dict(caches=[np.ones((N, 2), F32), 3]), TypeError, "caches[1]: must be a tensor"),
    ("copy", dict(caches=[sealed(np.ones((N, 2), F32))]), BufferError, "caches[0]: is read-only but would be written"),
    ("copy", dict(caches=np.ones((N, 4), F32)[:, ::2]), BufferError, "caches[0]: a block's memory has gaps"),
    ("copy", dict(caches=np.float32(1)), ValueError, "caches[0]: has no dimensions"),
    ("copy", dict(src_dst_pairs=np.array([[0, N]])), ValueError, "src_dst_pairs[0, 1] is 6 but caches[0] has 6 blocks"),
    ("copy", dict(src_dst_pairs=np.array([[-1, 0]])), ValueError, "src_dst_pairs[0, 0] is -1 but caches[0] has 6 blocks"),
    ("copy", dict(src_dst_pairs=np.array([[0, 1], [2, 1]])), ValueError, "src_dst_pairs: block 1 is a destination twice"),
    ("copy", dict(src_dst_pairs=np.array([[0, 1], [1, 2]])), ValueError, "src_dst_pairs: block 1 is both a source and a destination"),
    ("copy", dict(src_dst_pairs=np.array([0, 1])), ValueError, "src_dst_pairs: has 1 dimensions but must have 2"),
    ("copy", dict(src_dst_pairs=np.ones((2, 3), I64)), ValueError, "src_dst_pairs: dim 1 is 3 but must be 2"),
    ("copy", dict(src_dst_pairs=[(0, 1)]), TypeError, "src_dst_pairs: must be a tensor"),
    ("swap", dict(dst=[]), ValueError, "dst: has 0 tensors but src has 1"),
    ("swap", dict(dst=[np.ones((N, B + 1, K, D), F32)]), ValueError, "dst[0]: dim 1 is 5 but src[0] has 4"),
    ("swap", dict(dst=[np.ones((N, B, K, D), I32)]), TypeError, "dst[0]: dtype is int32 but src[0] has float32"),
    ("swap", dict(dst=[sealed(np.ones((N, B, K, D), F32))]), BufferError, "dst[0]: is read-only but would be written"),
    ("swap", dict(pairs=np.array([[0, 99]])), ValueError, "pairs[0, 1] is 99 but dst[0] has 12 blocks"),
    ("merge", dict(lse=np.ones((3, T, H), F32)), ValueError, "lse: dim 1 is 5 but o has H=4"),
    ("merge", dict(o=np.ones((T, H, D), F32)), ValueError, "o: has 3 dimensions but must have 4: [P T H D]"),
    ("merge", dict(o=np.ones((3, T, H, 2 * D), F32)[..., :D]), BufferError, "o: must be contiguous"),
    ("embedding", dict(token_ids=np.array([0, 4], I32)), ValueError, "token_ids[1] is 4 but must be 0 to 3"),
    ("embedding", dict(token_ids=np.array([-1], I64)), ValueError, "token_ids[0] is -1 but must be 0 to 3"),
    ("embedding", dict(token_ids=np.array([0.0], F32)), TypeError, "token_ids: dtype is float32 but must be one of int32, int64"),
    ("embedding", dict(token_ids=3), TypeError, "token_ids: must be a tensor"),
    ("embedding", dict(weight=np.ones(3, F32)), ValueError, "weight: has 1 dimensions but must have 2"),
    ("gather", dict(indices=np.array([9], I64)), ValueError, "indices[0] is 9 but must be 0 to 3"),
    ("gather", dict(out=np.ones((1, 8), F32)), ValueError, "out: dim 0 is 1 but indices has T=2"),
    ("norm", dict(weight=np.ones(D + 1, F32)), ValueError, "weight: dim 0 is 17 but x has D=16"),
    ("norm", dict(eps=-1.0), ValueError, "eps is -1 but must be finite and at least 0"),
    ("norm", dict(eps=1e300), ValueError, "eps is 1e+300 but must be finite and at least 0"),
    ("norm", dict(eps="small"), TypeError, "eps: must be a number, not 'str'"),
    ("norm", dict(residual=np.ones((T, D), np.float16)), TypeError, "residual: dtype is float16 but x has float32"),
    ("norm", dict(residual=sealed(np.ones((T, D), F32))), BufferError, "residual: is read-only but would be written"),
    ("linear", dict(weight=np.ones((7, D + 1), F32)), ValueError, "weight: dim 1 is 17 but x has "),
    ("linear", dict(bias=np.ones(8, F32)), ValueError, "bias: dim 0 is 8 but weight has "),
    ("linear", dict(out=np.ones((T, 7), I32)), TypeError, "out: dtype is int32"),
    ("silu", dict(x=np.ones((T, 3), F32)), ValueError, "x: dim 1 is 3 but must be even"),
    ("silu", dict(x=np.ones((1,) * 9, F32)), ValueError, "x: has 9 dimensions but at most 8 are supported"),
    ("sample", dict(temperatures=np.ones(T - 1, F32)), ValueError, "temperatures: dim 0 is 4 but logits has "),
    ("sample", dict(temperatures=-np.ones(T, F32)), ValueError, "temperatures[0] is -1"),
    ("sample", dict(seeds=np.arange(T, dtype=I32)), TypeError, "seeds: dtype is int32 but must be int64"),
    ("sample", dict(positions=np.arange(T)), TypeError, "positions: dtype is int64 but must be int32"),
    ("sample", dict(logits=np.ones((T, 0), F32)), ValueError, "logits: "),
    ("sample_linear", dict(weight=np.ones((9, D + 1), F32)), ValueError, "weight: dim 1 is 17 but x has K=16"),
    ("sample_linear", dict(weight=np.ones((9, D), np.float16)), TypeError, "weight: dtype is float16 but x has float32"),
    ("sample_linear", dict(logits=np.ones((T, 8), F32)), ValueError, "logits: dim 1 is 8 but weight has V=9"),
    ("sample_linear", dict(logits=np.ones((T + 1, 9), F32)), ValueError, "logits: dim 0 is 6 but x has T=5"),
    ("sample_linear", dict(logits=np.ones((T, 9), np.float16)), TypeError, "logits: dtype is float16 but must be float32"),
    ("sample_linear", dict(logits=sealed(np.ones((T, 9), F32))), BufferError, "logits: is read-only but would be written"),
    ("sample_linear", dict(logits=None), TypeError, "logits: must be a tensor"),
    ("sample_linear", dict(temperatures=np.ones(T - 1, F32)), ValueError, "temperatures: dim 0 is 4 but x has T=5"),
    ("sample_linear", dict(seeds=np.arange(T, dtype=I32)), TypeError, "seeds: dtype is int32 but must be int64"),
    ("sample_linear", dict(positions=np.arange(T)), TypeError, "positions: dtype is int64 but must be int32"),
    ("sample_linear", dict(weight=np.ones((0, D), F32), logits=np.ones((T, 0), F32)), ValueError, "logits: dim 1 is 0 but must be 1 to"),
    ("sample_linear", dict(out=np.ones(T + 1, I32)), ValueError, "out: dim 0 is 6 but x has T=5"),
    ("sample_linear", dict(out=np.ones(T, I64)), TypeError, "out: dtype is int64 but must be int32"),
    ("rope", dict(k_weight=None), ValueError, "q_weight is given but k_weight is not: give both or neither"),
    ("rope", dict(qkv=np.ones((T, 7 * D + 1), F32)), ValueError, "qkv: dim 1 is 113 but must be (num_q_heads + 2 * num_kv_heads)"),
    ("rope", dict(positions=np.full(T, 9, I32)), ValueError, "positions[0] is 9"),
    ("rope", dict(cos_sin=np.ones((9, D + 1), F32)), ValueError, "cos_sin: dim 1 is 17 but k_cache has D=16"),
    ("rope", dict(slot_mapping=np.full(T, N * B)), ValueError, "slot_mapping[0] is 24"),
    ("rope", dict(eps=float("nan")), ValueError, "eps is "),
    ("qkv", dict(positions=np.full(T, 9, I32)), ValueError, "positions[0] is 9"),
    ("qkv", dict(slot_mapping=np.full(T, N * B)), ValueError, "slot_mapping[0] is 24"),
    ("qkv", dict(qkv=np.ones((T, 7 * D), F32)), ValueError, "q: has 3 heads, which is no multiple of k_cache's 2 KV heads"),
    ("qkv", dict(out=np.ones((T, H, D + 1), F32)), ValueError, "out: dim 2 is 17 but q has D=16"),
    ("qkv", dict(context_lens=np.zeros(3, I32)), ValueError, "context_lens: dim 0 is 3 but block_tables has S=2"),
    ("qkv", dict(cu_seqlens_q=None), ValueError, "q: has 5 tokens, which 2 sequences cannot share evenly"),
    ("qkv", dict(k_scale=np.ones((2, K), F32)), ValueError, "k_scale: "),
    ("qkv", dict(plan=np.zeros((1, 11), I32)), ValueError, "plan: dim 1 is 11 but must be 12"),
]  # fmt: skip


def arrays_of(arguments: dict) -> list[np.ndarray]:
    values = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
    return [v for v in values if isinstance(v, np.ndarray)]


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda row: f"{TABLE[row][0]}-{row}")
def test_bad_argument(row):
    op, change, error, message = TABLE[row]
    arguments = vars(good())[op] | change
    before = [a.copy() for a in arrays_of(arguments)]
    if error is None:
        assert OPS[op](**arguments) is None
        return
    with pytest.raises(error) as caught:
        OPS[op](**arguments)
    assert str(caught.value).startswith(message)
    assert type(caught.value) is error
    for array, old in zip(arrays_of(arguments), before, strict=True):
        assert np.array_equal(array, old, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_are_good(op):
    OPS[op](**vars(good())[op])
    OPS[op](**vars(good())[op], stream=None)


@pytest.mark.parametrize("op", OPS)
def test_binding(op):
    """CPython's own words for what does not bind, for every operation."""
    function, arguments = OPS[op], vars(good())[op]
    name, first = function.__name__, next(iter(arguments))
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing \d+ required positional arguments?: '{first}'"):
        function()
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'strem'$"):
        function(**arguments, strem=None)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got multiple values for argument '{first}'$"):
        function(arguments[first], **arguments)
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes (from \d+ to )?\d+ positional arguments? but 20 were given$"):
        function(*[None] * 20)
    with pytest.raises(TypeError, match="^stream: must be None, an int"):
        function(**arguments, stream="0")


def test_binding_words():
    for call, message in [
        (lambda: rms_norm(), "rms_norm() missing 2 required positional arguments: 'x' and 'weight'"),
        (lambda: rms_norm(weight=1), "rms_norm() missing 1 required positional argument: 'x'"),
        (lambda: store_kvcache(1, 2), "store_kvcache() missing 3 required positional arguments: 'k_cache', 'v_cache', and 'slot_mapping'"),
        (lambda: rms_norm(1, 2, 3, 4), "rms_norm() takes from 2 to 3 positional arguments but 4 were given"),
        (lambda: silu_and_mul(1, 2), "silu_and_mul() takes 1 positional argument but 2 were given"),
        (lambda: pagedkv.from_dlpack(obj=1), "from_dlpack() got an unexpected keyword argument 'obj'"),
        (lambda: ops.set_num_threads(), "set_num_threads() missing 1 required positional argument: 'n'"),
        (lambda: pagedkv.BlockManager(1), "BlockManager() missing 1 required positional argument: 'block_size'"),
        (lambda: pagedkv.BlockManager(1, 2, 3), "BlockManager() takes 2 positional arguments but 3 were given"),
        (lambda: pagedkv.BlockManager(1, 2, size=3), "BlockManager() got an unexpected keyword argument 'size'"),
    ]:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == message
    name = "".join(["e", "ps"])  # not interned
    assert rms_norm(np.ones((1, 2), F32), np.ones(2, F32), **{name: 0.0}).tolist() == [[1.0, 1.0]]


TENSOR_TABLE = [
    (lambda t: pagedkv.empty(-1), ValueError, "shape: a size is -1 but must be at least 0"),
    (lambda t: pagedkv.empty("3"), TypeError, "shape: must be an int or a sequence of ints, not '3'"),
    (lambda t: pagedkv.empty(None), TypeError, "shape: must be an int or a sequence of ints, not None"),
    (lambda t: pagedkv.empty([1.5]), TypeError, "shape: must be an int, not 'float'"),
    (lambda t: pagedkv.empty((1,) * 9), ValueError, "shape: has 9 dimensions but at most 8 are supported"),
    (lambda t: pagedkv.empty(2**70), ValueError, f"shape: {2**70} does not fit in 64 bits"),
    (lambda t: pagedkv.empty((2**40, 2**40)), MemoryError, "a tensor of this shape has more than 2^63 bytes"),
    (lambda t: pagedkv.empty((2**59,)), MemoryError, "cannot allocate 2305843009213693952 bytes of host memory"),
    (lambda t: pagedkv.empty(1, "float64"), TypeError, "dtype: 'float64' is not a dtype (float32, float16, "),
    (lambda t: pagedkv.empty(1, None), TypeError, "dtype: None is not a dtype"),
    (lambda t: pagedkv.empty(1, device="tpu"), ValueError, "device: 'tpu' is not a device (\"cpu\", \"cuda\", "),
    (lambda t: pagedkv.empty(1, device="cuda:"), ValueError, "device: 'cuda:' is not a device"),
    (lambda t: pagedkv.empty(1, device="cuda:x"), ValueError, "device: 'cuda:x' is not a device"),
    (lambda t: pagedkv.empty(1, device="cuda:99999999999"), ValueError, "device: 'cuda:99999999999' is not a device"),
    (lambda t: pagedkv.asarray("abc"), TypeError, "obj: must be a tensor"),
    (lambda t: pagedkv.asarray(None), TypeError, "obj: must be a tensor"),
    (lambda t: pagedkv.asarray(["a"]), TypeError, "obj: elements of NumPy dtype <U1 cannot be in a tensor"),
    (lambda t: pagedkv.asarray([1j]), TypeError, "obj: elements of NumPy dtype complex128 cannot be in a tensor"),
    (lambda t: pagedkv.asarray([[1], [2, 3]]), ValueError, "setting an array element with a sequence"),
    (lambda t: pagedkv.from_dlpack([1]), TypeError, "obj: must be a tensor (torch, NumPy, pagedkv, DLPack), not 'list'"),
    (lambda t: t.view((5,)), ValueError, "shape: (5,) does not fit 6 elements"),
    (lambda t: t.view((-1, -1)), ValueError, "shape: (-1, -1) does not fit 6 elements"),
    (lambda t: t.view((4, -1)), ValueError, "shape: (4, -1) does not fit 6 elements"),
    (lambda t: t.view((0, -1)), ValueError, "shape: (0, -1) does not fit 6 elements"),
    (lambda t: t.view((-2, 3)), ValueError, "shape: a size is -2 but must be at least 0"),
    (lambda t: t.view((2**62, 2**62)), ValueError, f"shape: ({2**62}, {2**62}) does not fit 6 elements"),
    (lambda t: t[::-1].view(6), BufferError, "only a contiguous tensor can be viewed with another shape"),
    (lambda t: t[2], IndexError, "index 2 is out of range for dimension 0 of size 2"),
    (lambda t: t[2**80], IndexError, "cannot fit 'int' into an index-sized integer"),
    (lambda t: t["a"], TypeError, "a tensor is indexed by integers and slices"),
    (lambda t: t[0, "a"], TypeError, "a tensor is indexed by integers and slices"),
    (lambda t: t[:, 3], IndexError, "index 3 is out of range for dimension 1 of size 3"),
    (lambda t: t[0, 0, 0], IndexError, "too many indices: the tensor has 2 dimensions"),
    (lambda t: t[0][0][0], IndexError, "too many indices: the tensor has 0 dimensions"),
    (lambda t: t[::0], ValueError, "slice step cannot be zero"),
    (lambda t: t["x":], TypeError, "slice indices must be integers"),
    (lambda t: t.copy_([1]), TypeError, "src: must be a tensor"),
    (lambda t: t.__dlpack__(max_version=1), TypeError, "max_version: must be None or a tuple of two ints, not 1"),
    (lambda t: t.__dlpack__(max_version=("a", 1)), TypeError, "max_version: must be None or a tuple of two ints, not ('a', 1)"),
    (lambda t: t.__dlpack__(dl_device=(2, 0)), BufferError, "dl_device: the tensor is on (1, 0)"),
    (lambda t: t.__dlpack__(dl_device=1), TypeError, "dl_device: must be None or a tuple of two ints, not 1"),
    (lambda t: pagedkv.empty(1 // 0 for _ in range(2)), ZeroDivisionError, "integer division or modulo by zero"),
    (lambda t: pagedkv.empty(1, "float32\0"), TypeError, "dtype: 'float32\\x00' is not a dtype"),
    (lambda t: pagedkv.empty(1, device="cpu\0"), ValueError, "device: 'cpu\\x00' is not a device"),
    (lambda t: ops.set_num_threads(0), ValueError, "n: is 0 but must be in [1, 4096]"),
    (lambda t: ops.set_num_threads("2"), TypeError, "n: must be an int, not 'str'"),
    (lambda t: ops.synchronize("gpu"), ValueError, "device: 'gpu' is not a device"),
    (lambda t: ops.synchronize(3), ValueError, "device: 3 is not a device"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(TENSOR_TABLE)))
def test_bad_tensor_call(row):
    call, error, message = TENSOR_TABLE[row]
    tensor = pagedkv.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    with pytest.raises(error) as caught:
        call(tensor)
    assert str(caught.value).startswith(message)
    assert tensor.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_cuda_without_cuda():
    if ops.build_info()["cuda_devices"]:
        pytest.skip("there is one")
    error = BufferError if ops.build_info()["cuda"] else NotImplementedError
    for call in (
        lambda: pagedkv.empty(1, device="cuda"),
        lambda: pagedkv.asarray([1.0], device="cuda:0"),
        lambda: ops.synchronize("cuda"),
        ops.check_errors,
    ):
        with pytest.raises((error, pagedkv.CudaError), match="cuda|CUDA"):
            call()


CALLABLES = {name: each for module in (pagedkv, ops) for name, each in vars(module).items()
             if getattr(each, "__module__", "").startswith("pagedkv._C") or isinstance(each, type(ops.linear))
             or each in (pagedkv.BlockManager, pagedkv.Stream, pagedkv.Event, pagedkv.Graph, ops.ElasticBuffer)}  # fmt: skip


@pytest.mark.parametrize("key", [1, 1e300, (1, 2), b"x", None, object()], ids=lambda key: type(key).__name__)
@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_a_keyword_that_is_no_string(name, key):
    """The interpreter looks for a function, but not for a type."""
    assert len(CALLABLES) > 40
    with pytest.raises(TypeError, match="keywords must be strings|takes at most 0 arguments"):
        CALLABLES[name](**{key: 2})


def test_keywords_of_every_kind_of_string():
    class Text(str):
        __slots__ = ()

    assert pagedkv.BlockManager(**{Text("num_blocks"): 3, "".join(["block", "_size"]): 4}).num_blocks == 3
    for word in ("\ud800", "a" * 5000, "", "num_blocks\0"):
        with pytest.raises((TypeError, UnicodeEncodeError), match="unexpected keyword|surrogates"):
            pagedkv.BlockManager(1, 2, **{word: 1})
