"""FlashAttention's names over pagedkv: random calls with every option against a float64 reference of their definition."""

import inspect
from types import SimpleNamespace

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat is for PyTorch code")
from pagedkv import ops  # noqa: E402
from pagedkv.compat import flash_attn, flash_attn_3  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}


def reference(q, k, v, *, causal, window_size, softcap, alibi=None, scale=None):
    """One sequence: q [queries, heads, dim], k and v [keys, kv_heads, dim], float64. Returns out, lse [heads, queries]."""
    blocks = np.zeros((1, 1), np.int32)
    return oracle.paged_attention_fwd(q, k[None], v[None], blocks, [len(k)], causal=causal, window_size=window_size,
                                      softcap=softcap, alibi_slopes=alibi, softmax_scale=scale)  # fmt: skip


class Draw:
    """Random tensors on a device, beside the float64 numbers that they hold."""

    def __init__(self, rng, device):
        self.rng, self.device = rng, device

    def chance(self, p=0.5) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def upto(self, most: int, least: int = 0) -> int:
        return int(self.rng.integers(least, most + 1))

    def put(self, numbers, dtype: str):
        return torch.tensor(numbers).to(self.device, getattr(torch, dtype))

    def floats(self, shape, dtype: str):
        numbers = oracle.rounded(self.rng.standard_normal(shape), dtype)
        return numbers, self.put(numbers, dtype)

    def heads(self) -> SimpleNamespace:
        kv = self.one_of(1, 2, 3)
        return SimpleNamespace(q=kv * self.one_of(1, 2, 5), kv=kv, dim=self.one_of(8, 32, 40, 64, 96, 128, 256), dtype=self.one_of(*DTYPES))

    def mask(self, most: int) -> dict:
        """Options of what a query sees."""
        side = lambda: self.one_of(-1, self.upto(most), 0)
        window = (side(), side()) if self.chance(0.4) else (-1, -1)
        return dict(causal=self.chance(), window_size=window, softcap=self.one_of(0.0, 0.0, 5.0))


def assert_near(got, expected, dtype: str):
    got = got.detach().cpu().double().numpy()
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def with_empty_lse(lse, value: float):
    return np.where(np.isneginf(lse), value, lse)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_dense(rng, device, module):
    d = Draw(rng, device)
    for _ in range(40):
        h, batch, n, keys = d.heads(), d.upto(3, 1), d.upto(40, 1), d.upto(70, 1) * d.chance(0.95)
        if module is flash_attn and d.chance(0.3):
            h.dim = d.one_of(4, 59, 111)  # padded, as flash-attn does
        (qn, q), (kn, k), (vn, v) = (d.floats((batch, x, y, h.dim), h.dtype) for x, y in ((n, h.q), (keys, h.kv), (keys, h.kv)))
        options, alibi = d.mask(keys), None
        if module is flash_attn and d.chance(0.3):
            alibi = rng.uniform(0, 0.5, (batch, h.q)).astype(np.float32)
            options["alibi_slopes"] = d.put(alibi, "float32")
        out, lse, *_ = module.flash_attn_func(q, k, v, **options, return_attn_probs=True)
        options.pop("alibi_slopes", None)
        for i in range(batch):
            expected, expected_lse = reference(qn[i], kn[i], vn[i], **options, alibi=None if alibi is None else alibi[i])
            assert_near(out[i], expected, h.dtype)
            assert_near(lse[i], with_empty_lse(expected_lse, np.inf if module is flash_attn else -np.inf), "float32")


def lens_of(d: Draw, batch: int, most: int) -> np.ndarray:
    return np.array([d.upto(most) * d.chance(0.85) for _ in range(batch)])


def starts_of(d: Draw, lens):
    starts = np.cumsum([0, *lens]).astype(np.int32)
    return starts, d.put(starts, "int32")


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_varlen(rng, device, module):
    """Sequences without queries or keys, too, and pages of any size in FlashAttention 2."""
    d = Draw(rng, device)
    for _ in range(40):
        h, batch = d.heads(), d.upto(6, 1)
        lens_q, lens_k = lens_of(d, batch, 40), lens_of(d, batch, 90) * d.chance(0.95)
        (starts_q, cu_q), (starts_k, cu_k) = starts_of(d, lens_q), starts_of(d, lens_k)
        (qn, q), (kn, k), (vn, v) = (d.floats((x, y, h.dim), h.dtype) for x, y in ((starts_q[-1], h.q), (starts_k[-1], h.kv), (starts_k[-1], h.kv)))
        options, more, used = d.mask(60), {}, lens_k
        if module is flash_attn and d.chance():
            k, v, more["block_table"] = paged(d, k, v, starts_k, d.one_of(1, 4, 16, 17, 64, 128, 256))
        if module is flash_attn_3 and d.chance():
            used = np.array([d.upto(n) for n in lens_k])
            more["seqused_k"] = d.put(used, "int32")
        out, lse, *_ = module.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, int(lens_q.max()), int(lens_k.max()), **options, **more, return_attn_probs=True)  # fmt: skip
        for i in range(batch):
            rows, keys = slice(*starts_q[i : i + 2]), slice(starts_k[i], starts_k[i] + used[i])
            expected, expected_lse = reference(qn[rows], kn[keys], vn[keys], **options)
            assert_near(out[rows], expected, h.dtype)
            assert_near(lse[:, rows], with_empty_lse(expected_lse, np.inf if module is flash_attn else -np.inf), "float32")


def paged(d: Draw, k, v, starts, page: int):
    """Rows of ragged sequences in pages, in random order, with NaN around them; -1 behind a sequence's pages."""
    lens = np.diff(starts)
    counts = -(-lens // page)
    order = d.rng.permutation(counts.sum() + 2)
    table = np.full((len(lens), max(counts.max(), 1)), -1)
    pools = [x.new_full((counts.sum() + 2, page, *x.shape[1:]), float("nan")) for x in (k, v)]
    for i, n in enumerate(counts):
        table[i, :n], order = order[:n], order[n:]
        at = np.arange(lens[i])
        for pool, x in zip(pools, (k, v)):
            pool[table[i, at // page], at % page] = x[starts[i] : starts[i + 1]]
    return *pools, d.put(table, "int32")


class Cache:
    """A cache of random length, dense or paged, and the rows of each sequence in it."""

    def __init__(self, d: Draw, h, batch: int, capacity: int, page: int | None, has_batch_idx: bool):
        self.arguments, self.page, rows = {}, page, batch + 2 * has_batch_idx
        picked = d.rng.permutation(rows)[:batch] if has_batch_idx else np.arange(batch)
        if has_batch_idx:
            self.arguments["cache_batch_idx"] = d.put(picked, "int32")
        if page is None:
            shape, self.slots = (rows, capacity, h.kv, h.dim), picked[:, None] * capacity + np.arange(capacity)
        else:
            per = -(-capacity // page)
            table = d.rng.permutation(rows * per + 3)[: rows * per].reshape(rows, per)
            shape = (rows * per + 3, page, h.kv, h.dim)
            self.slots = (table[picked][:, :, None] * page + np.arange(page)).reshape(batch, -1)
            self.table = d.put(table, "int32")
        (self.kn, self.k), (self.vn, self.v) = d.floats(shape, h.dtype), d.floats(shape, h.dtype)
        self.kn, self.vn = (x.reshape(-1, h.kv, h.dim) for x in (self.kn, self.vn))
        self.room = self.slots.shape[1]


def draw_new_keys(d: Draw, h, cache: Cache, lens, new, is_ragged: bool, call: dict, rotary_starts, at_start: bool, qn, lens_q):
    """Gives the call new keys, rotated or not; writes them to the numbers of the cache; returns the queries."""
    shape = (int(new.sum()), h.kv, h.dim)
    (kn, k), (vn, v) = d.floats(shape, h.dtype), d.floats(shape, h.dtype)
    pairs = d.one_of(0, 8, h.dim // 16 * 8) if h.dim >= 16 else 0
    if pairs:
        angles, interleaved = d.rng.uniform(0, 7, (cache.room + 50, pairs)), d.chance()
        (cos, call["rotary_cos"]), (sin, call["rotary_sin"]) = ((oracle.rounded(x, h.dtype), d.put(x, h.dtype)) for x in (np.cos(angles), np.sin(angles)))
        call["rotary_interleaved"] = interleaved
        turn = lambda x, at: oracle.rounded(oracle.rotated(x, cos[at][:, None], sin[at][:, None], interleaved), h.dtype)
        at_k = np.concatenate([s + np.arange(n) for s, n in zip(rotary_starts, new)])
        at_q = np.concatenate([s + np.arange(n) * (not at_start) for s, n in zip(rotary_starts, lens_q)])
        kn, qn = turn(kn, at_k.astype(int)), turn(qn, at_q.astype(int))
    for i, (first, n) in enumerate(zip(np.cumsum([0, *new]), new)):
        at = cache.slots[i, lens[i] : lens[i] + n]
        cache.kn[at], cache.vn[at] = kn[first : first + n], vn[first : first + n]
    call["k"], call["v"] = (x if is_ragged else x.view(len(new), -1, h.kv, h.dim) for x in (k, v))
    return qn


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_with_kvcache(rng, device, module):
    d, is_3 = Draw(rng, device), module is flash_attn_3
    for _ in range(60):
        h, batch, capacity = d.heads(), d.upto(4, 1), d.upto(200, 60)
        page = d.one_of(None, None, 1, 4, 16, 17, 64, 128, 256)
        cache = Cache(d, h, batch, capacity, page, has_batch_idx=d.chance(0.4) and (is_3 or page is None))
        is_ragged = is_3 and d.chance(0.4)
        lens_q = lens_of(d, batch, 20) if is_ragged else np.full(batch, d.one_of(1, d.upto(20, 1)))
        new = (lens_of(d, batch, 20) if is_ragged else np.full(batch, d.upto(20, 1))) if d.chance() else np.zeros(batch, int)
        is_int = not is_ragged and d.chance(0.2)
        lens = np.full(batch, d.upto(capacity - 40)) if is_int else np.array([d.upto(capacity - 40) for _ in range(batch)])
        pad = np.array([d.upto(n) for n in lens]) if d.chance(0.3) else np.zeros(batch, int)
        options = d.mask(capacity)
        call = {"cache_seqlens": int(lens[0]) if is_int else d.put(lens, "int32"), **options, **cache.arguments}
        if pad.any():
            call["cache_leftpad"] = d.put(pad, "int32")
        if page is not None:
            call["page_table" if is_3 else "block_table"] = cache.table
        qn, q = d.floats((int(lens_q.sum()), h.q, h.dim), h.dtype)
        if is_ragged:
            call["cu_seqlens_q"], call["max_seqlen_q"] = starts_of(d, lens_q)[1], int(lens_q.max())
        alibi = rng.uniform(0, 0.5, h.q).astype(np.float32) if not is_3 and d.chance(0.3) else None
        if alibi is not None:
            call["alibi_slopes"] = d.put(alibi, "float32")
        bounds = (cache.room - 1, lens_q.max() - 1) if is_3 else (cache.room, cache.room)  # as flash_api.cpp of each has it
        is_local = any(0 <= side < bound for side, bound in zip(options["window_size"], bounds))
        if new.any():
            if is_ragged:
                call["cu_seqlens_k_new"] = starts_of(d, new)[1]
            rotary_starts = lens
            if is_3 and d.chance(0.3):
                rotary_starts = lens // 2
                call["rotary_seqlens"] = d.put(rotary_starts, "int32")
            qn = draw_new_keys(d, h, cache, lens, new, is_ragged, call, rotary_starts, not (options["causal"] or is_local), qn, lens_q)
        call |= {"num_splits": d.one_of(0, 0, 1, 3)}
        given = q if is_ragged else q.view(batch, -1, h.q, h.dim)
        out, lse, *_ = module.flash_attn_with_kvcache(given, cache.k, cache.v, **call, return_softmax_lse=True)
        for pool, numbers in ((cache.k, cache.kn), (cache.v, cache.vn)):
            assert_near(pool.view(numbers.shape), numbers, h.dtype)
        lse = lse if is_ragged else lse.transpose(0, 1).flatten(1)
        of_lse = h.dtype if "rotary_cos" in call else "float32"  # what is rotated may be rounded to the other side
        for i, (first, n) in enumerate(zip(np.cumsum([0, *lens_q]), lens_q)):
            at = cache.slots[i, pad[i] : lens[i] + new[i]]
            expected, expected_lse = reference(qn[first : first + n], cache.kn[at], cache.vn[at], **options, alibi=alibi)
            assert_near(out.view(-1, h.q, h.dim)[first : first + n], expected, h.dtype)
            assert_near(lse[:, first : first + n], with_empty_lse(expected_lse, -np.inf if is_3 else np.inf), of_lse)


def test_the_whole_cache_where_no_lengths_are_given(rng, device):
    d = Draw(rng, device)
    (qn, q), (kn, k), (vn, v) = (d.floats(shape, "float32") for shape in ((2, 1, 4, 32), (2, 21, 2, 32), (2, 21, 2, 32)))
    out = flash_attn.flash_attn_with_kvcache(q, k, v)
    for i in range(2):
        assert_near(out[i], reference(qn[i], kn[i], vn[i], causal=False, window_size=(-1, -1), softcap=0)[0], "float32")


def strided(tensor):
    """The same numbers, each beside another one that must not be read."""
    poison = float("nan") if tensor.is_floating_point() else -(2**31)
    return torch.stack([tensor, torch.full_like(tensor, poison)], -1)[..., 0]


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_tensors_whose_last_dimension_is_not_dense(rng, device, module):
    """The bits of dense ones. Only a cache must be dense."""
    d = Draw(rng, device)
    q, k, v, new = (d.floats(shape, "float32")[1] for shape in ((2, 3, 4, 32), (2, 21, 2, 32), (2, 21, 2, 32), (2, 3, 2, 32)))
    bounds, lens = d.put([0, 2, 6], "int32"), d.put([5, 18], "int32")
    cos, sin = d.floats((40, 16), "float32")[1], d.floats((40, 16), "float32")[1]
    table = "block_table" if module is flash_attn else "page_table"

    def results(form):
        first = [form(x) for x in (q, k, v)]
        yield module.flash_attn_func(*first, causal=True)
        flat = [form(x.flatten(0, 1)) for x in (q, k[:, :3], v[:, :3])]
        yield module.flash_attn_varlen_func(*flat, form(bounds), form(bounds), 4, 4, causal=True)
        caches, news = [k.clone(), v.clone()], [form(new), form(new)]
        yield module.flash_attn_with_kvcache(form(q), *caches, *news, cache_seqlens=form(lens), causal=True,
                                             rotary_cos=form(cos), rotary_sin=form(sin))  # fmt: skip
        yield from caches
        pages = [x.reshape(6, 7, 2, 32) for x in (k, v)]
        yield module.flash_attn_with_kvcache(form(q), *pages, cache_seqlens=form(lens), causal=True,
                                             **{table: form(d.put([[3, 1, 4], [5, 0, 2]], "int32"))})  # fmt: skip

    for got, expected in zip(results(strided), results(lambda tensor: tensor), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(RuntimeError, match="k_cache: .*dense"):
        module.flash_attn_with_kvcache(q, strided(k), v, cache_seqlens=lens)


def test_fp8_in_flash_attention_3(rng, device):
    """Queries, keys and values, with a scale for each KV head of each sequence; new keys go in as they are."""
    d, fp8 = Draw(rng, device), "float8_e4m3fn"
    for _ in range(6):
        (qn, q), (kn, k), (vn, v) = (d.floats(shape, fp8) for shape in ((3, 2, 4, 64), (3, 50, 2, 64), (3, 50, 2, 64)))
        (kn_new, k_new), (vn_new, v_new) = (d.floats((3, 2, 2, 64), fp8) for _ in range(2))
        scales = [rng.uniform(0.5, 2, (3, 2)).astype(np.float32) for _ in range(3)]
        lens = np.array([0, 20, 48])
        names = ("q_descale", "k_descale", "v_descale")
        out = flash_attn_3.flash_attn_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=d.put(lens, "int32"), causal=True,
                                                   **{name: d.put(x, "float32") for name, x in zip(names, scales)})  # fmt: skip
        assert out.dtype == torch.bfloat16
        for i, n in enumerate(lens):
            kn[i, n : n + 2], vn[i, n : n + 2] = kn_new[i], vn_new[i]
            of_q = np.repeat(scales[0][i], 2)[:, None]
            expected, _ = reference(qn[i] * of_q, kn[i, : n + 2] * scales[1][i][:, None], vn[i, : n + 2] * scales[2][i][:, None],
                                    causal=True, window_size=(-1, -1), softcap=0)  # fmt: skip
            assert_near(out[i], expected, "bfloat16")
        assert np.array_equal(k.float().cpu().numpy(), kn)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_lengths_that_are_no_ints_and_arguments_that_there_are_not(device, module):
    """An unknown argument is a TypeError, by which callers find out what a version has."""
    q, k = (torch.zeros((2, n, 2, 8), device=device) for n in (1, 5))
    for lens in (3.7, "3", [3, 4], np.array([3, 4])):
        with pytest.raises(RuntimeError, match="flash_attn_with_kvcache: cache_seqlens is .* but must be an int or a tensor"):
            module.flash_attn_with_kvcache(q, k, k, cache_seqlens=lens)
    for lens in (3, np.int64(3)):
        assert module.flash_attn_with_kvcache(q, k, k, cache_seqlens=lens).shape == q.shape
    for function in (module.flash_attn_func, module.flash_attn_varlen_func, module.flash_attn_with_kvcache):
        with pytest.raises(TypeError, match=f"^{function.__name__}.. got an unexpected keyword argument 'cache_seqlen'"):
            function(q, k, k, cache_seqlen=3)


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "bfloat16"), ("bfloat16", "float8_e4m3fn")])
def test_fp8_in_some_tensors_alone_is_refused(rng, device, dtypes):
    d = Draw(rng, device)
    (_, q), (_, k), (_, v) = (d.floats(shape, dtype) for shape, dtype in
                              zip(((2, 3, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64)), (*dtypes, dtypes[1]), strict=True))  # fmt: skip
    ends, lens = d.put([0, 3, 6], "int32"), d.put([9, 4], "int32")
    with pytest.raises(RuntimeError, match=f"q is torch.{dtypes[0]} but k is torch.{dtypes[1]}"):
        flash_attn_3.flash_attn_func(q, k, v)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        flash_attn_3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, 3 * ends, 3, 9)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_no_gradient_flows_through_a_cache(rng, device, module):
    """Compiled or not, as in the peers, whose functions with a cache have no backward."""
    d = Draw(rng, device)
    q, k, v, new = (d.floats(shape, "float32")[1] for shape in ((2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32), (2, 3, 2, 32)))
    lens = d.put([5, 30], "int32")
    call = lambda q, k, v, new: module.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lens, causal=True)
    expected = call(q, k.clone(), v.clone(), new)
    torch._dynamo.reset()
    for function in call, torch.compile(call, fullgraph=True, backend="aot_eager"):
        out = function(q.clone().requires_grad_(), k.clone(), v.clone(), new.clone().requires_grad_())
        assert torch.equal(out, expected) and not out.requires_grad


def test_compiled(rng, device):
    """The functions stay in one graph, and what they write in place is written."""
    d = Draw(rng, device)
    call = lambda q, k, v, new, lens: flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lens, causal=True)
    q, k, v, new = (d.floats(shape, "float32")[1] for shape in ((2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32), (2, 3, 2, 32)))
    lens, others = d.put([5, 30], "int32"), (k.clone(), v.clone())
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, *others, new, lens), call(q, k, v, new, lens))
    assert torch.equal(others[0], k) and torch.equal(others[1], v)


@pytest.mark.gpu
def test_captured(torch, rng):
    """A graph of the whole call, replayed after lengths, tables and queries changed in place."""
    d = Draw(rng, "cuda")
    _, q = d.floats((4, 1, 16, 128), "bfloat16")
    (_, k), (_, v) = (d.floats((40, 16, 8, 128), "bfloat16") for _ in range(2))
    _, new = d.floats((4, 1, 8, 128), "bfloat16")
    angles = torch.rand(200, 64, device="cuda")
    table, lens = d.put(rng.permutation(40).reshape(4, 10), "int32"), d.put([3, 30, 100, 159], "int32")
    call = lambda k, v: flash_attn.flash_attn_with_kvcache(
        q, k, v, new, new, angles.cos(), angles.sin(), lens, block_table=table, causal=True, rotary_interleaved=False)  # fmt: skip
    call(k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(k, v)
    for _ in range(3):
        q.normal_()
        new.normal_()
        table.copy_(d.put(rng.permutation(40).reshape(4, 10), "int32"))
        lens.copy_(d.put(rng.integers(0, 160, 4), "int32"))
        others = k.clone(), v.clone()
        graph.replay()
        assert torch.equal(out, call(*others)) and torch.equal(others[0], k) and torch.equal(others[1], v)
    ops.check_errors()


SIGNATURES = {
    flash_attn.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    flash_attn.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None",
    flash_attn.flash_attn_func: "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    flash_attn_3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    flash_attn_3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    flash_attn_3.flash_attn_func: "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__[-1]}.{function.__name__}")
def test_signatures(function):
    shown = [p.name + ("" if p.default is p.empty else f"={p.default}".replace(" ", "")) for p in inspect.signature(function).parameters.values()]
    assert " ".join(shown) == SIGNATURES[function]


def test_what_is_refused():
    q, odd = torch.ones(1, 2, 4, 32), torch.ones(1, 2, 4, 30)
    wanted = torch.ones(1, 2, 4, 32, requires_grad=True)
    table = [
        (NotImplementedError, "dropout_p is 0.1", lambda: flash_attn.flash_attn_func(q, q, q, 0.1)),
        (NotImplementedError, "k requires grad", lambda: flash_attn.flash_attn_func(q, wanted, q)),
        (NotImplementedError, "k_cache has a head_dim of 30", lambda: flash_attn.flash_attn_with_kvcache(odd, odd, odd)),
        (NotImplementedError, "qv is a tensor", lambda: flash_attn_3.flash_attn_func(q, q, q, qv=q)),
        (NotImplementedError, "attention_chunk is 7", lambda: flash_attn_3.flash_attn_with_kvcache(q, q, q, attention_chunk=7)),
        (NotImplementedError, "v has a head_dim of 30 and k of 32", lambda: flash_attn_3.flash_attn_func(q, q, odd)),
        (RuntimeError, "flash_attn_func: k has 1 sequences but q has 2", lambda: flash_attn.flash_attn_func(torch.cat([q, q]), q, q)),
        (RuntimeError, "flash_attn_func: k has 2 sequences but q has 1", lambda: flash_attn_3.flash_attn_func(q, *[torch.cat([q, q])] * 2)),
        (RuntimeError, "k is given but v is not", lambda: flash_attn.flash_attn_with_kvcache(q, q, q, q, cache_seqlens=0)),
        (RuntimeError, "k is given but cache_seqlens", lambda: flash_attn.flash_attn_with_kvcache(q, q, q, q, q)),
        (RuntimeError, "only new keys are rotated", lambda: flash_attn.flash_attn_with_kvcache(q, q, q, rotary_cos=q, rotary_sin=q)),
        (RuntimeError, r"flash_attn_with_kvcache: cache_leftpad is torch.int64 \(1,\) but must be torch.int32 \(1,\)", lambda: flash_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=2, cache_leftpad=torch.zeros(1, dtype=torch.int64))),
        (RuntimeError, r"context_lens\[0\] is 3 but block_tables has room for 0 to 2 keys", lambda: flash_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=3)),
    ]  # fmt: skip
    for error, message, call in table:
        with pytest.raises(error, match=message):
            call()
    assert flash_attn_3.get_scheduler_metadata(1, 2, 3, 4, 5, 6, torch.zeros(1)) is None
