"""pagedkv.compat.vllm_ops against the float64 oracle; and its signatures against vLLM's, where vLLM is installed."""

import ast
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="vLLM's operators take torch tensors")
from pagedkv.compat import vllm_ops  # noqa: E402
from pagedkv.compat.vllm_ops import flash_attn_varlen_func, reshape_and_cache_flash  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = ("apart", "NHD", "HND")


def tensor(x, device, dtype=None):
    return torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype)


def ints(x, device, dtype=torch.int32):
    return tensor(np.asarray(x, np.int64), device, dtype)


def values(x):
    return x.float().cpu().numpy().astype(np.float64)


def make_caches(rng, device, layout, dtype, num_blocks, block_size, heads, dim):
    """Keys and values [num_blocks, block_size, heads, dim], random: two tensors, or side by side in one whose memory has
    tokens before heads (NHD) or heads before tokens (HND)."""
    apart = [tensor(rng.standard_normal((num_blocks, block_size, heads, dim), np.float32), device, dtype) for _ in "kv"]
    if layout == "apart":
        return apart
    both = torch.cat([cache.to(torch.float32) for cache in apart], dim=-1)
    if layout == "HND":
        both = both.transpose(1, 2).contiguous().transpose(1, 2)
    return both.to(dtype).split(dim, dim=-1)


def make_scale(rng, device, shape):
    scale = rng.uniform(0.02, 0.2, shape).astype(np.float32)
    return scale, torch.tensor(scale, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_store(rng, device, layout, kv_cache_dtype, dtype):
    """More rows than slots, negative slots of every kind, scales of one number and of one for each head."""
    for num_tokens, scale_shape in [(0, ()), (1, (1,)), (7, (3,)), (90, (3,))]:
        heads, dim, num_blocks, block_size = 3, int(rng.choice([8, 40, 128])), 11, int(rng.choice([1, 16, 17]))
        cache_dtype = torch.float8_e4m3fn if kv_cache_dtype != "auto" else DTYPES[dtype]
        caches = make_caches(rng, device, layout, cache_dtype, num_blocks, block_size, heads, dim)
        num_tokens = min(num_tokens, num_blocks * block_size)
        qkv = tensor(rng.standard_normal((num_tokens + 3, 4 * heads, dim), np.float32), device, DTYPES[dtype])
        new = qkv[:, :heads], qkv[:, 2 * heads : 3 * heads]
        slots = rng.permutation(num_blocks * block_size)[:num_tokens]
        slots[rng.random(num_tokens) < 0.3] = rng.choice([-1, -2, -(2**40)])
        scales = [make_scale(rng, device, scale_shape) for _ in "kv"]
        expected = oracle.store_kvcache(
            *(values(x[:num_tokens]) for x in new), *map(values, caches), slots,
            cache_dtype=dtype if kv_cache_dtype == "auto" else "float8_e4m3fn",
            **({} if kv_cache_dtype == "auto" else {"k_scale": scales[0][0], "v_scale": scales[1][0]}),
        )
        given = [cache.view(torch.uint8) for cache in caches] if kv_cache_dtype == "fp8" else caches
        result = reshape_and_cache_flash(
            *new, *given, ints(slots, device, torch.int64), kv_cache_dtype, scales[0][1], scales[1][1]
        )
        assert result is None
        for cache, rows in zip(caches, expected, strict=True):
            np.testing.assert_array_equal(values(cache), rows)


def test_store_refuses(device):
    cache, key, slots = torch.zeros(2, 4, 1, 8, device=device), torch.zeros(2, 1, 8, device=device), ints([0, 1], device)
    one = torch.ones((), device=device)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8_e5m2'"):
        reshape_and_cache_flash(key, key, cache, cache.clone(), slots, "fp8_e5m2", one, one)
    with pytest.raises(RuntimeError, match="kv_cache_dtype is 'int4' but must be one of auto, float16"):
        reshape_and_cache_flash(key, key, cache, cache.clone(), slots, "int4", one, one)
    with pytest.raises(ValueError, match="slot_mapping"):
        reshape_and_cache_flash(key[:1], key[:1], cache, cache.clone(), slots, "auto", one, one)
    assert not cache.any()


class Batch:
    """Random ragged queries over pages, with every option that vLLM's function has, as it takes them and as the oracle
    does. The tables' padding is out of range, and behind the last sequence q has rows that are nobody's."""

    def __init__(self, rng, device, layout, dtype, is_fp8):
        heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5]))
        dim, block_size = int(rng.choice([8, 64, 128])), int(rng.choice([1, 16, 17, 64]))
        num_seqs = int(rng.integers(1, 6))
        queries, lens = rng.integers(0, 9, num_seqs), rng.integers(0, 80, num_seqs)
        starts = np.concatenate([[0], np.cumsum(queries)])
        num_tokens = int(starts[-1]) + int(rng.integers(0, 3))
        pages = -(-lens // block_size)
        num_blocks = max(int(pages.sum()), 1)
        tables = np.full((num_seqs, int(pages.max(initial=0)) + 2), 1 << 20)
        order = rng.permutation(num_blocks)
        for row, first, count in zip(tables, np.cumsum(pages) - pages, pages, strict=True):
            row[:count] = order[first : first + count]
        q = tensor(rng.standard_normal((num_tokens, heads * group, dim), np.float32), device, DTYPES[dtype])
        cache_dtype = torch.float8_e4m3fn if is_fp8 else DTYPES[dtype]
        caches = make_caches(rng, device, layout, cache_dtype, num_blocks, block_size, heads, dim)

        def maybe(x):
            return x if rng.random() < 0.5 else None

        window = maybe([int(rng.integers(-1, 40)), int(rng.integers(-1, 5))])
        softmax_scale, softcap = maybe(float(rng.uniform(0.05, 0.3))), maybe(float(rng.uniform(5, 30))) or 0.0
        alibi = maybe(rng.uniform(0, 0.3, (heads * group,) if rng.random() < 0.5 else (num_seqs, heads * group)))
        sinks = maybe(rng.standard_normal(heads * group))
        scales = [make_scale(rng, device, (num_seqs, heads)) if is_fp8 else (None, None) for _ in "kv"]
        causal = bool(rng.random() < 0.5)
        sinks = None if sinks is None else oracle.rounded(sinks, "bfloat16")
        self.args = q, *caches, int(queries.max()), ints(starts, device), int(lens.max(initial=0))
        self.pages = dict(seqused_k=ints(lens, device), block_table=ints(tables, device))
        self.options = dict(
            softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
            alibi_slopes=None if alibi is None else tensor(alibi, device, torch.float32),
            s_aux=None if sinks is None else tensor(sinks, device, torch.bfloat16), k_descale=scales[0][1],
            v_descale=scales[1][1], num_splits=int(rng.choice([0, 1, 3])),
        )
        self.expected_options = dict(
            softmax_scale=softmax_scale, causal=causal, window_size=window or (-1, -1), softcap=softcap,
            alibi_slopes=None if alibi is None else alibi.astype(np.float32), sinks=sinks, k_scale=scales[0][0],
            v_scale=scales[1][0],
        )
        self.lens, self.tables, self.starts, self.dtype = lens, tables, starts, dtype

    def expected(self):
        q, k_cache, v_cache = map(values, self.args[:3])
        return oracle.paged_attention_fwd(
            q, k_cache, v_cache, self.tables, self.lens, cu_seqlens_q=self.starts, **self.expected_options
        )

    def check(self, out, lse, expected, no_key):
        used = int(self.starts[-1])
        limit = oracle.tolerance(self.dtype)
        np.testing.assert_allclose(values(out[:used]), expected[0][:used], rtol=limit, atol=limit)
        if lse is not None:
            assert lse.dtype == torch.float32
            wanted = np.where(np.isneginf(expected[1]), no_key, expected[1])[:, :used]
            np.testing.assert_allclose(values(lse[:, :used]), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_pages(rng, device, layout, dtype, is_fp8):
    for _ in range(8):
        batch = Batch(rng, device, layout, dtype, is_fp8)
        expected = batch.expected()
        fa_version = int(rng.choice([2, 3, 4]))
        out, lse = flash_attn_varlen_func(
            *batch.args, **batch.pages, **batch.options, return_softmax_lse=True, fa_version=fa_version
        )
        batch.check(out, lse, expected, np.inf if fa_version == 2 else -np.inf)
        memory = torch.full_like(out, 7)
        assert flash_attn_varlen_func(*batch.args, **batch.pages, **batch.options, out=memory) is memory
        batch.check(memory, None, expected, None)
        assert (memory[int(batch.starts[-1]) :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_ragged_keys(rng, device, dtype):
    """No pages: cu_seqlens_k, and for version 4 seqused_k that cuts its sequences."""
    for is_cut in (False, True, False, True):
        batch = Batch(rng, device, "apart", dtype, False)
        num_seqs, (heads, dim) = len(batch.lens), batch.args[1].shape[2:]
        lens = batch.lens if rng.random() < 0.8 else np.zeros(num_seqs, np.int64)
        starts = np.concatenate([[0], np.cumsum(lens)])
        fused = rng.standard_normal((int(starts[-1]), 3 * heads, dim), np.float32)
        k, v = tensor(fused, device, DTYPES[dtype])[:, heads:].split(heads, dim=1)
        q, _, _, max_q, cu_q, max_k = batch.args
        if rng.random() < 0.5:  # the last dimension is not dense
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        batch.lens = np.minimum(lens, rng.integers(0, 60, num_seqs)) if is_cut else lens
        cut = dict(seqused_k=ints(batch.lens, device), fa_version=4) if is_cut else dict(fa_version=3)
        out, lse = flash_attn_varlen_func(
            q, k, v, max_q, cu_q, max_k, ints(starts, device), **batch.options, **cut, return_softmax_lse=True
        )
        dense = (values(k)[None], values(v)[None]) if len(k) else [np.zeros((1, 1, heads, dim))] * 2
        expected = oracle.paged_attention_fwd(
            values(q), *dense, np.zeros((num_seqs, 1), int), batch.lens,
            cu_seqlens_q=batch.starts, key_starts=starts[:-1], **batch.expected_options,
        )
        batch.check(out, lse, expected, -np.inf)


def test_no_sequence(device):
    q, cu = torch.zeros(0, 4, 64, device=device), ints([0], device)
    k = torch.zeros(0, 2, 64, device=device)
    out, lse = flash_attn_varlen_func(q, k, k, 0, cu, 0, cu, return_softmax_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


REFUSED = dict(
    dropout_p=0.1, q_v=torch.zeros(1), output_scale=torch.zeros(1), cp_world_size=2, mask_mod=len,
    block_sparse_tensors=[0], aux_tensors=[torch.zeros(1)], dynamic_causal=torch.zeros(1),
    gather_kv_indices=torch.zeros(1), gather_kv_valid_length=torch.zeros(1),
)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(rng, name):
    batch = Batch(rng, "cpu", "apart", "float32", False)
    with pytest.raises(NotImplementedError, match=f"^{name} is "):
        flash_attn_varlen_func(*batch.args, **batch.pages, **{name: REFUSED[name]})


def test_attention_asserts_as_the_peer(rng):
    batch = Batch(rng, "cpu", "apart", "float32", False)
    pages, cu = batch.pages, batch.args[4]
    for options, message in [
        (dict(), "cu_seqlens_k or seqused_k must be provided"),
        (pages | dict(cu_seqlens_k=cu), "cannot be provided at the same time"),
        (dict(cu_seqlens_k=cu, block_table=pages["block_table"]), "seqused_k must be provided if block_table is provided"),
        (pages | dict(window_size=[1]), "window_size is .1. but must be a pair"),
    ]:
        with pytest.raises(AssertionError, match=message):
            flash_attn_varlen_func(*batch.args, **options)
    with pytest.raises(ValueError, match="Unsupported FA version: 5"):
        flash_attn_varlen_func(*batch.args, **pages, fa_version=5)
    with pytest.raises(NotImplementedError, match="needs cu_seqlens_k"):
        flash_attn_varlen_func(*batch.args, seqused_k=pages["seqused_k"])
    with pytest.raises(NotImplementedError, match="q, q_descale: fp8"):
        flash_attn_varlen_func(batch.args[0].to(torch.float8_e4m3fn), *batch.args[1:], **pages)


@pytest.mark.parametrize(
    ("file", "name"),
    [("_custom_ops.py", "reshape_and_cache_flash"),
     ("vllm_flash_attn/flash_attn_interface.py", "flash_attn_varlen_func")],
)  # fmt: skip
def test_signatures_are_those_of_vllm(file, name):
    """Read from the source, since vLLM's modules load only beside their CUDA libraries."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or "'0.33." not in Path(spec.origin).with_name("_version.py").read_text():
        pytest.skip("vllm 0.33 is not installed")
    tree = ast.parse(Path(spec.origin).parent.joinpath(file).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    constants = {"DEFAULT_FA_VERSION": 2}
    defaults = [constants.get(node.id) if isinstance(node, ast.Name) else ast.literal_eval(node) for node in found.args.defaults]
    names = [each.arg for each in found.args.args]
    ours = list(inspect.signature(getattr(vllm_ops, name)).parameters.values())
    assert [each.name for each in ours] == names
    assert [each.default for each in ours if each.default is not inspect.Parameter.empty] == defaults
