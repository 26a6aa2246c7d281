"""append_kvcache and rope_append_kvcache against the oracle: whose a token is, where it goes, how it is turned."""

from dataclasses import dataclass

import numpy as np
import oracle
import pytest
from pools import UNUSED_PAGE, get, make_tables, put, put_sliceable

from pagedkv import ops


@dataclass(frozen=True)
class Case:
    new: tuple[int, ...] = (1, 7, 0, 33, 2)  # new tokens of each sequence
    lens: tuple[int, ...] = (0, 5, 17, 64, 255)  # keys that each has
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None
    angle_dtype: str = "float32"
    interleaved: bool = False
    q_at_start: bool = False
    is_ragged: bool = True
    key_starts: bool = False
    rotary_starts: bool = False
    queries: tuple[int, ...] | None = None  # of each sequence; None: as many as new tokens
    is_strided: bool = False  # q, k and v are parts of a wider row, K and V lie side by side, heads before slots

    @property
    def name(self) -> str:
        default = Case()
        texts = {k: str(v) if len(str(v)) < 100 else f"{len(v)} of them" for k, v in vars(self).items() if v != getattr(default, k)}
        return ", ".join(f"{k}={text}" for k, text in texts.items()) or "default"


HALF = {"dtype": "bfloat16", "angle_dtype": "bfloat16"}
CASES = [
    Case(),
    *(Case(interleaved=i, rotary_dim=r, head_dim=d) for i in (False, True) for r, d in ((64, 128), (16, 64), (2, 8), (6, 40), (80, 80), (256, 256))),
    *(Case(**HALF, interleaved=i, rotary_dim=r, head_dim=128) for i in (False, True) for r in (128, 96, 16, 0, 24)),
    *(Case(dtype=d, block_size=b, head_dim=128, rotary_dim=128) for d in ("float16", "bfloat16") for b in (1, 3, 16, 256)),
    Case(new=(1,) * 6, lens=(3, 0, 15, 16, 17, 300), is_ragged=False, **HALF),
    Case(new=(4,) * 3, lens=(3, 0, 15), is_ragged=False, q_at_start=True, queries=(2, 2, 2)),
    Case(queries=(3, 0, 1, 1, 40), q_at_start=True, rotary_starts=True),
    Case(queries=(3, 0, 1, 1, 40), rotary_starts=True, key_starts=True, interleaved=True, **HALF),
    Case(new=(0, 0, 0, 0, 0), queries=(1, 2, 0, 0, 3)),
    Case(new=(), lens=()),
    Case(new=(700,), lens=(1,), heads=(40, 8), head_dim=128, rotary_dim=128, **HALF),
    Case(new=(0, 1, 3) * 500, lens=(2, 31, 15) * 500, heads=(3, 1), **HALF),
    *(Case(dtype=d, cache_dtype="float8_e4m3fn", head_dim=h, rotary_dim=h) for d in ("float32", "bfloat16") for h in (128, 40)),
    *(Case(is_strided=True, dtype=d, head_dim=h, rotary_dim=32, key_starts=True) for d in ("float32", "float16") for h in (64, 40)),
]  # fmt: skip


@dataclass
class Batch:
    arguments: dict  # of both operations, NumPy
    rotation: dict  # of rope_append_kvcache alone
    caches: list


def starts_of(lens, rng) -> np.ndarray:
    """cu_seqlens of them, with rows of nobody in front of the first."""
    return np.cumsum([rng.integers(0, 3), *lens]).astype(np.int32)


def make_batch(case: Case, rng) -> Batch:
    (q_heads, kv_heads), queries = case.heads, case.new if case.queries is None else case.queries
    starts, starts_q = starts_of(case.new, rng), starts_of(queries, rng)
    key_starts = rng.integers(0, 2 * case.block_size, len(case.new)).astype(np.int32)
    slots = np.array(case.new, int) + case.lens + (key_starts if case.key_starts else 0)
    tables, num_blocks = make_tables(rng, slots, case.block_size)
    rows = starts[-1] + 2 if case.is_ragged else sum(case.new)
    rows_q = starts_q[-1] + 2 if case.is_ragged else sum(queries)
    draw = lambda shape, dtype: oracle.rounded(rng.standard_normal(shape) * 2, dtype)
    angles = rng.uniform(0, 7, (800, case.rotary_dim // 2))
    arguments = dict(key=draw((rows, kv_heads, case.head_dim), case.dtype), value=draw((rows, kv_heads, case.head_dim), case.dtype),
                     block_tables=tables, cache_lens=np.array(case.lens, np.int32))  # fmt: skip
    rotation = dict(q=draw((rows_q, q_heads, case.head_dim), case.dtype), cos=oracle.rounded(np.cos(angles), case.angle_dtype),
                    sin=oracle.rounded(np.sin(angles), case.angle_dtype), interleaved=case.interleaved, q_at_start=case.q_at_start)  # fmt: skip
    if case.is_ragged:
        arguments["cu_seqlens"], rotation["cu_seqlens_q"] = starts, starts_q
    if case.key_starts:
        arguments["key_starts"] = key_starts
    if case.rotary_starts:
        rotation["rotary_starts"] = rng.integers(0, 90, len(case.new)).astype(np.int32)
    if case.cache_dtype:
        arguments |= {name: rng.uniform(0.5, 2, kv_heads).astype(np.float32) for name in ("k_scale", "v_scale")}
    shape = (num_blocks, case.block_size, kv_heads, case.head_dim)
    return Batch(arguments, rotation, [draw(shape, case.cache_dtype or case.dtype) for _ in range(2)])


def place(case: Case, batch: Batch, device: str):
    """The tensors of the batch by name, on the device."""
    dtypes = dict.fromkeys(("key", "value", "q"), case.dtype) | dict.fromkeys(("cos", "sin"), case.angle_dtype)
    given = batch.arguments | batch.rotation
    placed = {name: put(x, device, dtypes.get(name)) for name, x in given.items()}
    if not case.is_strided:
        return placed | dict(zip(("k_cache", "v_cache"), (put(x, device, case.cache_dtype or case.dtype) for x in batch.caches)))
    wide = np.concatenate([batch.arguments["key"], batch.arguments["value"]], 1)
    placed["key"], placed["value"] = (put_sliceable(wide, device, case.dtype)[:, i * case.heads[1] :][:, : case.heads[1]] for i in (0, 1))
    both = put_sliceable(np.concatenate(batch.caches, 3).swapaxes(1, 2).copy(), device, case.dtype).swapaxes(1, 2)
    return placed | {"k_cache": both[..., : case.head_dim], "v_cache": both[..., case.head_dim :]}


def check(case: Case, batch: Batch, placed: dict, out) -> None:
    """What the caches hold now, and the queries, where they were asked for."""
    rotation = batch.rotation | {"dtype": case.dtype} if out is not None else {}
    k, v, expected, _ = oracle.append_kvcache(k_cache=batch.caches[0], v_cache=batch.caches[1], **batch.arguments, **rotation,
                                              cache_dtype=case.cache_dtype or case.dtype)  # fmt: skip
    tolerance = oracle.tolerance(case.dtype)
    if case.cache_dtype:  # whose least step is 2^-9
        tolerance = max(tolerance, 2.0**-9)
    rtol = 0 if out is None else 0.13 if case.cache_dtype else tolerance  # a number may be rounded to the other side
    np.testing.assert_allclose(get(placed["k_cache"]), k, rtol=rtol, atol=0 if out is None else tolerance)
    np.testing.assert_array_equal(get(placed["v_cache"]), v)
    if out is not None:
        owned = ~np.isnan(expected)
        np.testing.assert_allclose(get(out)[owned], expected[owned], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, device, rng):
    batch = make_batch(case, rng)
    alone = place(case, batch, device)
    ops.append_kvcache(**{name: x for name, x in alone.items() if name not in batch.rotation})
    check(case, batch, alone, None)
    placed = place(case, batch, device)
    out = put(np.full(batch.rotation["q"].shape, 7.0), device, case.dtype)
    assert ops.rope_append_kvcache(**placed, out=out) is out
    check(case, batch, placed, out)
    if case.is_ragged:
        first, end = batch.rotation["cu_seqlens_q"][[0, -1]]
        assert (get(out)[:first] == 7).all() and (get(out)[end:] == 7).all(), "wrote a row of nobody"


def test_a_negative_page_stores_nothing(device, rng):
    case = Case(new=(20, 20), lens=(6, 6))
    batch = make_batch(case, rng)
    batch.arguments["block_tables"][0, 1] = -1
    placed = place(case, batch, device)
    check(case, batch, placed, ops.rope_append_kvcache(**placed))


# What is changed of CASE, and what the CPU and a GPU say.
CASE = Case(new=(3, 2), lens=(9, 20), block_size=4)


def _at(name: str, index, value):
    def change(batch: Batch) -> None:
        {**batch.arguments, **batch.rotation}[name][index] = value

    return change


def _shorter(batch: Batch) -> None:
    batch.rotation["cos"], batch.rotation["sin"] = batch.rotation["cos"][:12], batch.rotation["sin"][:12]


BAD_CONTENT = [
    (_at("cache_lens", 0, -1), r"cache_lens\[0\] is -1", "sequence 0 has -1 keys|position -1"),
    (_at("cache_lens", 0, 30), r"cache_lens\[0\] is 30 but block_tables has room for 0 to 29 keys and 3 new ones", "sequence 0 has 30 keys but it must be at least 0 and below 3[0-2]"),
    (_at("block_tables", (1, 5), UNUSED_PAGE), r"block_tables\[1, 5\] is 2147480000 but k_cache has", "sequence 1 has block 2147480000"),
    (_shorter, r"cache_lens\[1\] is 20 and 2 tokens are rotated from there on, but cos has rows 0 to 11", "has position 2[01] but it must be at least 0 and below 12"),
]  # fmt: skip


@pytest.mark.parametrize("change, message, on_a_gpu", BAD_CONTENT, ids=[m for _, m, _ in BAD_CONTENT])
def test_bad_content(change, message, on_a_gpu, device, rng):
    batch = make_batch(CASE, rng)
    change(batch)
    placed = place(CASE, batch, device)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            ops.rope_append_kvcache(**placed)
        assert all(np.array_equal(get(placed[name]), x) for name, x in zip(("k_cache", "v_cache"), batch.caches))
        return
    out = ops.rope_append_kvcache(**placed)
    with pytest.raises(ValueError, match=on_a_gpu):
        ops.check_errors(device)
    first, end = batch.rotation["cu_seqlens_q"][1:]
    assert np.isfinite(get(placed["k_cache"])).all() and (get(out)[first:end] == 0).all() == (change is _shorter)


BAD_ARGUMENTS = [
    (dict(cos=np.ones((800, 33), np.float32), sin=np.ones((800, 33), np.float32)), ValueError, "cos: dim 1 is 33, half of rotary_dim, which is more than head_dim 64"),
    (dict(sin=np.ones((799, 32), np.float32)), ValueError, "sin: dim 0 is 799 but cos has P=800"),
    (dict(sin=np.ones((800, 32), np.float16)), TypeError, "sin: dtype is float16"),
    (dict(cu_seqlens=None, key=np.ones((5, 2, 64), np.float32), value=np.ones((5, 2, 64), np.float32)), ValueError, "key: has 5 tokens, which 2 sequences cannot share evenly; ragged batches need cu_seqlens"),
    (dict(cu_seqlens_q=None, q=np.ones((5, 4, 64), np.float32)), ValueError, "q: has 5 tokens, which 2 sequences cannot share evenly; ragged batches need cu_seqlens_q"),
    (dict(cu_seqlens=np.array([0, 3, 2], np.int32)), ValueError, r"cu_seqlens\[2\] is 2 but cu_seqlens\[1\] is 3: it must not fall"),
    (dict(cu_seqlens_q=np.array([-1, 3, 5], np.int32)), ValueError, r"cu_seqlens_q\[0\] is -1"),
    (dict(cu_seqlens=np.array([0, 3, 50], np.int32)), ValueError, r"cu_seqlens\[2\] is 50 but key has"),
    (dict(cache_lens=np.zeros(2, np.int64)), TypeError, "cache_lens: dtype is int64"),
    (dict(cache_lens=np.zeros(3, np.int32)), ValueError, "cache_lens: dim 0 is 3 but block_tables has S=2"),
    (dict(k_scale=2.0), ValueError, "k_scale: is given but the caches are float32"),
    (dict(rotary_starts=np.zeros(1, np.int32)), ValueError, "rotary_starts: dim 0 is 1 but block_tables has S=2"),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, message", BAD_ARGUMENTS, ids=[m for _, _, m in BAD_ARGUMENTS])
def test_bad_arguments(changes, error, message, rng):
    placed = place(CASE, make_batch(CASE, rng), "cpu")
    with pytest.raises(error, match=message):
        ops.rope_append_kvcache(**(placed | changes))


def test_queries_are_not_rotated_in_place(rng):
    placed = place(CASE, make_batch(CASE, rng), "cpu")
    with pytest.raises(BufferError, match="out: overlaps q"):
        ops.rope_append_kvcache(**placed, out=placed["q"])
