"""The one list of attention cases: plain data, shared by the tests and the benchmarks. Imports nothing."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionCase:
    """One ragged batch. A window, softcap and so on are what paged_attention_fwd takes."""

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # keys of each sequence, the new ones included
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: str | None = None  # "shared" [heads] or "per_seq" [seqs, heads]
    sinks: bool = False
    scales: str | None = None  # "number", "one" [1], "heads" [kv heads], "seqs" [seqs, kv heads]
    num_splits: int = 0
    masked_page: bool = False  # one page of every sequence is -1
    # "HND": heads before slots in memory; "interleaved": K and V of a block side by side; "backwards": the last page first
    layout: str = "NHD"
    strided_q: bool = False  # q and out are views of wider rows
    uniform: bool = False  # without cu_seqlens_q
    # "one": of each sequence, as long as the longest; "shared": one, where all sequences lie; "listed": those of all in one row
    pages: str = "many"
    key_starts: bool = False  # there are slots in front of a sequence's keys

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that are not masked (pages aside), for counting FLOPs."""
        left, right = self.window_size[0], 0 if self.causal else self.window_size[1]
        pairs = 0
        for n, context in zip(self.query_lens, self.context_lens):
            for i in range(n):
                position = i + context - n
                first = max(0, position - left) if left >= 0 else 0
                end = min(context, position + right + 1) if right >= 0 else context
                pairs += max(0, end - first)
        return pairs

    @property
    def flops(self) -> int:
        return 4 * self.head_dim * self.num_q_heads * self.visible_pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that must be read at least once."""
        width = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}[self.cache_dtype or self.dtype]
        return sum(self.context_lens) * 2 * self.num_kv_heads * self.head_dim * width


# Tokens in a page: no power of two, a prefill tile and less, more than a tile, more than most contexts.
PAGE_SIZES = (1, 3, 16, 48, 100, 256, 512)

_RAGGED = AttentionCase("ragged", (1, 7, 0, 33, 1, 2), (130, 7, 5, 70, 1, 0))
_DECODE = AttentionCase("decode", (1, 1, 1, 1), (1, 15, 64, 300))
# Rows and keys of several tiles of the prefill kernels, beside sequences that the decode kernels take.
_CHUNKS = AttentionCase("chunks", (150, 1, 0, 65, 90, 70), (313, 30, 9, 64, 0, 71), head_dim=128)

ATTENTION_CASES: list[AttentionCase] = [
    _DECODE,
    _RAGGED,
    replace(_DECODE, name="decode without cu_seqlens_q", uniform=True),
    AttentionCase("no sequences", (), ()),
    AttentionCase("no queries", (0, 0), (3, 0)),
    AttentionCase("no keys", (2, 1), (0, 0)),
    AttentionCase("no keys but sinks", (2, 1), (0, 3), sinks=True),
    AttentionCase("more queries than keys", (9,), (4,)),
    AttentionCase("one key", (1,), (1,)),
    AttentionCase("two per sequence", (2, 2, 2), (2, 40, 129), uniform=True),
    AttentionCase("long decode in several parts", (1, 3), (4500, 2049)),
    AttentionCase("chunk of a long prompt", (40,), (2100,), head_dim=32),
    AttentionCase("prefill of several tiles", (200,), (200,), head_dim=32),
    *(replace(_RAGGED, name=f"block size {b}", block_size=b) for b in sorted({*PAGE_SIZES, 8, 32, 64})),
    *(replace(_DECODE, name=f"decode, block size {b}", block_size=b, context_lens=(1, b, b + 1, 520)) for b in PAGE_SIZES),
    *(replace(_RAGGED, name=f"head_dim {d}", head_dim=d) for d in (8, 16, 24, 32, 40, 80, 96, 120, 128, 192, 248, 256)),
    *(replace(_RAGGED, name=f"heads {h}/{k}", num_q_heads=h, num_kv_heads=k)
      for h, k in ((1, 1), (3, 3), (6, 2), (5, 1), (16, 2), (12, 1), (40, 1), (16, 8))),
    *(replace(_RAGGED, name=f"{d}", dtype=d) for d in ("float16", "bfloat16")),
    *(replace(_RAGGED, name=f"{d} head_dim 120", dtype=d, head_dim=120) for d in ("float16", "bfloat16")),
    *(replace(_RAGGED, name=f"{d} with an fp8 cache, scale {s}", dtype=d, cache_dtype="float8_e4m3fn", scales=s)
      for d, s in (("float32", None), ("float16", "number"), ("bfloat16", "one"), ("float32", "heads"), ("float32", "seqs"))),
    replace(_RAGGED, name="fp8 cache head_dim 40", cache_dtype="float8_e4m3fn", scales="heads", head_dim=40),
    replace(_RAGGED, name="not causal", causal=False),
    *(
        replace(_RAGGED, name=f"window {w}, causal {c}", window_size=w, causal=c)
        for w, c in (
            ((0, 0), True), ((5, 0), True), ((64, -1), True), ((3, 2), False), ((-1, 4), False), ((7, -1), False),
            ((0, 0), False), ((1000, 1000), False), ((2**62, 2**63 - 1), False),
        )
    ),
    replace(_RAGGED, name="softcap", softcap=3.0),
    replace(_RAGGED, name="softcap, scale", softcap=30.0, softmax_scale=0.7),
    replace(_RAGGED, name="negative scale", softmax_scale=-0.3),
    replace(_RAGGED, name="scale 0", softmax_scale=0.0),
    *(replace(_RAGGED, name=f"alibi {a}, causal {c}", alibi=a, causal=c)
      for a, c in (("shared", True), ("per_seq", True), ("shared", False))),
    replace(_RAGGED, name="sinks", sinks=True),
    *(replace(_RAGGED, name=f"{n} splits", num_splits=n) for n in (1, 2, 5, 200)),
    replace(_RAGGED, name="3 splits, sinks, window", num_splits=3, sinks=True, window_size=(20, 0)),
    replace(_RAGGED, name="masked page", masked_page=True),
    replace(_RAGGED, name="masked page, 2 splits, window", masked_page=True, num_splits=2, window_size=(30, 0)),
    replace(_RAGGED, name="HND", layout="HND"),
    replace(_RAGGED, name="interleaved", layout="interleaved"),
    replace(_RAGGED, name="backwards", layout="backwards"),
    replace(_RAGGED, name="backwards, bfloat16", layout="backwards", dtype="bfloat16"),
    replace(_RAGGED, name="strided q and out", strided_q=True),
    *(replace(case, name=f"{case.name}, {pages} page, key_starts {starts}, window {window[0]}", pages=pages, key_starts=starts, window_size=window)
      for case, window in ((_RAGGED, (-1, -1)), (_DECODE, (40, 0)), (_CHUNKS, (90, 0)), (_CHUNKS, (-1, -1)))
      for pages, starts in (("one", False), ("one", True), ("shared", True), ("many", True))),
    *(replace(_CHUNKS, name=f"chunks, {pages} page, key_starts, {d}", pages=pages, key_starts=True, head_dim=d, causal=False)
      for pages, d in (("one", 64), ("shared", 96), ("shared", 256), ("many", 64))),
    replace(_RAGGED, name="key_starts in odd pages", key_starts=True, block_size=7, num_splits=3),
    replace(_RAGGED, name="key_starts, masked page", key_starts=True, masked_page=True),
    *(replace(case, name=f"{case.name}, listed pages, {d}", pages="listed", dtype=d, window_size=window)
      for case in (_RAGGED, _DECODE, _CHUNKS) for d, window in (("float16", (-1, -1)), ("bfloat16", (60, 0)))),
    *(replace(_CHUNKS, name=f"chunks, listed pages of {n}, key_starts {starts}", pages="listed", block_size=n, key_starts=starts)
      for n in (1, 7, 16, 64) for starts in (False, True)),
    replace(_RAGGED, name="listed pages, masked page", pages="listed", masked_page=True, num_splits=2),
    replace(
        _RAGGED, name="everything", dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="seqs", softcap=20.0,
        alibi="per_seq", sinks=True, num_splits=3, window_size=(50, 9), causal=False, masked_page=True, block_size=5,
        head_dim=72, num_q_heads=6, num_kv_heads=3,
    ),
    _CHUNKS,
    *(replace(_CHUNKS, name=f"chunks, head_dim {d}", head_dim=d) for d in (40, 64, 96, 256)),
    *(replace(_CHUNKS, name=f"chunks, heads {h}/{k}", num_q_heads=h, num_kv_heads=k) for h, k in ((1, 1), (5, 1), (24, 2))),
    replace(_CHUNKS, name="chunks, window", window_size=(70, 0)),
    replace(_CHUNKS, name="chunks, window both sides", window_size=(20, 33), causal=False, head_dim=64),
    replace(_CHUNKS, name="chunks, not causal, sinks", causal=False, sinks=True),
    replace(_CHUNKS, name="chunks, softcap, alibi", softcap=10.0, alibi="per_seq"),
    replace(_CHUNKS, name="chunks, softcap", softcap=10.0),
    *(replace(_CHUNKS, name=f"chunks, block size {b}", block_size=b) for b in sorted({*PAGE_SIZES, 8, 64})),
    *(replace(_CHUNKS, name=f"chunks, float16 with an fp8 cache, scale {s}", dtype="float16", cache_dtype="float8_e4m3fn", scales=s)
      for s in (None, "heads")),
    replace(_CHUNKS, name="chunks, backwards", layout="backwards"),
    replace(_CHUNKS, name="chunks, backwards, page of 16", layout="backwards", block_size=16),
    replace(_CHUNKS, name="chunks, negative scale", softmax_scale=-0.1),
    replace(_CHUNKS, name="chunks, large scale", softmax_scale=0.7),
    replace(_CHUNKS, name="chunks, masked page", masked_page=True, sinks=True, block_size=24),
]


def _row(name: str, batch: int, query_len: int, context_len: int, **arguments) -> AttentionCase:
    shape = dict(num_q_heads=16, num_kv_heads=8, head_dim=128, dtype="bfloat16") | arguments
    return AttentionCase(name, (query_len,) * batch, (context_len,) * batch, **shape)


# What benchmarks/attention.py --device cpu measures.
CPU_PERFORMANCE: list[AttentionCase] = [
    *(_row(f"decode {b} x {c} {d}", b, 1, c, dtype=d)
      for d in ("float32", "bfloat16") for b, c in ((8, 4096), (1, 16384))),
    *(_row(f"prefill 1 x 2048 {d}", 1, 2048, 2048, dtype=d) for d in ("float32", "bfloat16")),
]
