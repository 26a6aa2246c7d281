"""The dense operations on CUDA beside the CPU backend: shapes that take other kernels than test_dense.py's, CUDA graphs
whose inputs change between replays, and what the status word says of bad ids."""

import os
import subprocess
import sys

import numpy as np
import oracle
import pytest
from cuda_tensors import numbers
from pools import get, put

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu
DTYPES = ["float32", "float16", "bfloat16"]
ERRORS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_near(actual, expected, dtype, scale=1.0):
    """Equal but for a last place, as two orders of one sum are."""
    a, b = actual.float().cpu().numpy(), expected.float().cpu().numpy()
    np.testing.assert_allclose(a, b, rtol=ERRORS[dtype], atol=ERRORS[dtype] * scale)


# --- beside the CPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (5, 256), (9, 264), (300, 512), (7, 1024), (200, 1032), (133, 4096), (2, 4096),
                                            (3, 5120), (140, 8192), (3, 16384), (3, 16392), (3, 4095), (4, 40001)])  # fmt: skip
def test_rms_norm(torch, rng, dtype, with_residual, rows, size):
    x, weight = numbers(torch, rng, (rows, size), dtype), numbers(torch, rng, (size,), dtype)
    residual = numbers(torch, rng, (rows, size), dtype) if with_residual else None
    on_cpu = residual.cpu() if with_residual else None
    expected = ops.rms_norm(x.cpu(), weight.cpu(), 1e-6, residual=on_cpu)
    alone = ops.rms_norm(x[:1], weight, 1e-6, residual=residual[:1].clone() if with_residual else None)
    out = torch.full_like(x, float("nan"))
    assert ops.rms_norm(x, weight, 1e-6, residual=residual, out=out) is out
    assert_near(out, expected, dtype, 2)
    assert (out.cpu() == expected).float().mean() > 0.99 or dtype == "float32"  # the other side of a rounding is rare
    if with_residual:
        assert torch.equal(residual.cpu(), on_cpu)
    assert torch.equal(out[:1], alone)  # a row's bits do not depend on its batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 1), (5, 136), (70, 3072), (9, 12288), (3, 2053), (300, 5000)])
def test_silu_and_mul(torch, rng, dtype, rows, size):
    x = numbers(torch, rng, (rows, 2 * size + 8), dtype) * 4
    out = torch.full((rows, size + 16), 7.0, device="cuda", dtype=x.dtype)
    for start in (0, 8, 3):  # aligned twice, then not
        view, target = x[:, : 2 * size], out[:, start : start + size]
        ops.silu_and_mul(view, out=target)
        expected = ops.silu_and_mul(view.cpu().contiguous())
        assert_near(target, expected, dtype, 16)
        assert torch.equal(target[:1], ops.silu_and_mul(view[:1]))  # a row's bits do not depend on its batch
        target.fill_(7)
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ids", "size"), [(1, 8), (33, 1024), (5, 4096), (6, 4099), (2, 70000)])
def test_embedding(torch, rng, dtype, ids, size):
    table = numbers(torch, rng, (50, size + 8), dtype)
    for start in (0, 8, 1):
        view = table[:, start : start + size]
        index = torch.from_numpy(rng.integers(0, 50, ids)).cuda()
        for which in (index, index.int()):
            assert torch.equal(ops.embedding(which, view), view[index])


ROPE_SHAPES = [  # num_q_heads, num_kv_heads, head_dim, block_size
    (32, 8, 128, 16), (16, 8, 128, 1), (64, 8, 64, 32), (3, 1, 256, 5), (7, 2, 96, 16), (1, 1, 8, 4), (5, 5, 16, 3), (70, 35, 128, 2),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
@pytest.mark.parametrize(("tokens", "start"), [(37, 0), (37, 1), (900, 8)], ids=["few", "unaligned", "many"])
@pytest.mark.parametrize("hidden", [None, 40, 1024, 2056])
def test_qk_norm_rope_store(torch, rng, dtype, shape, tokens, start, hidden):
    heads, kv_heads, head_dim, block_size = shape
    width = (heads + 2 * kv_heads) * head_dim
    num_blocks = 2 * tokens // block_size + 1
    qkv = numbers(torch, rng, (tokens, width + 8), dtype)[:, start : start + width]
    weights = [numbers(torch, rng, (head_dim,), dtype) for _ in range(2)]
    angles = rng.uniform(0, 7, (90, head_dim // 2))
    cos_sin = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)).cuda()
    positions = torch.from_numpy(rng.integers(0, 90, tokens).astype(np.int32)).cuda()
    slots = rng.permutation(num_blocks * block_size)[:tokens]
    slots[rng.random(tokens) < 0.2] = -3
    slots = torch.from_numpy(slots).cuda()
    poison = np.full((num_blocks, block_size, kv_heads, head_dim), np.nan)

    rms_of = hidden and numbers(torch, rng, (tokens, hidden + 8), dtype)[:, start : start + hidden] * 3

    def run(device, cache_dtype, **scales):
        caches = [put(poison, device, cache_dtype) for _ in range(2)]
        scales["rms_of"] = hidden and rms_of.to(device)
        arguments = [a.to(device) for a in (qkv, *weights, cos_sin, positions)]
        return ops.qk_norm_rope_store(*arguments, *caches, slots.to(device), **scales), *caches

    q, k_cache, v_cache = run("cuda", dtype)
    cpu_q, cpu_k, cpu_v = run("cpu", dtype)
    assert_near(q, cpu_q, dtype, 4)
    np.testing.assert_allclose(get(v_cache), get(cpu_v), rtol=ERRORS[dtype] if hidden else 0)
    np.testing.assert_allclose(get(k_cache), get(cpu_k), rtol=ERRORS[dtype], atol=4 * ERRORS[dtype])

    # To fp8 it must round the very numbers that it stores elsewhere: store_kvcache with them leaves the same bits.
    scales = {"k_scale": 0.25, "v_scale": torch.rand(kv_heads, device="cuda") + 0.1}
    stored = [torch.from_dlpack(cache).view(-1, kv_heads, head_dim)[slots.clip(0)] for cache in (k_cache, v_cache)]
    expected = [put(poison, "cuda", "float8_e4m3fn") for _ in range(2)]
    pagedkv.store_kvcache(*stored, *expected, slots, **scales)
    fp8_q, *fp8_caches = run("cuda", "float8_e4m3fn", **scales)
    assert torch.equal(fp8_q, q)
    for cache, other in zip(fp8_caches, expected, strict=True):
        np.testing.assert_array_equal(get(cache), get(other))


# rows, in_features, out_features: own kernels for up to 8 rows of 16 bits, cuBLASLt, and what neither takes
LINEAR_SHAPES = [
    (1, 8, 1), (1, 1024, 4096), (2, 2048, 1024), (3, 3072, 1023), (4, 520, 77), (5, 12288, 64), (8, 4096, 6144), (8, 7168, 9),
    (1, 1000, 151), (7, 1001, 33), (9, 1024, 512), (64, 1024, 4096), (257, 3072, 1024), (100, 515, 130), (3, 0, 5), (33, 0, 7),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
def test_linear(torch, rng, dtype, with_bias, shape):
    rows, size, outputs = shape
    x, weight = numbers(torch, rng, (rows, size), dtype), numbers(torch, rng, (outputs, size), dtype) / max(size, 1) ** 0.5
    bias = numbers(torch, rng, (outputs,), dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    wide = torch.full((rows, outputs + 5), 9.0, device="cuda", dtype=x.dtype)
    out = wide[:, 2 : outputs + 2]
    ops.linear(x, weight, bias, out=out)
    assert_near(out, expected, dtype)
    assert (wide[:, :2] == 9).all() and (wide[:, outputs + 2 :] == 9).all()
    single = torch.full((rows, outputs), float("nan"), device="cuda")
    ops.linear(x, weight, bias, out=single)
    torch.testing.assert_close(single.double(), expected, rtol=2e-5, atol=2e-5)
    again = torch.empty_like(single)
    ops.linear(x, weight, bias, out=again)
    assert torch.equal(single, again)


def test_linear_of_float32_is_not_tf32(torch, rng):
    x, weight = numbers(torch, rng, (70, 2048), "float32"), numbers(torch, rng, (300, 2048), "float32")
    expected = x.double() @ weight.double().T
    error = (ops.linear(x, weight).double() - expected).norm() / expected.norm()
    assert error < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 20])
def test_linear_of_repeated_and_strided_rows(torch, rng, dtype, rows):
    x, weight = numbers(torch, rng, (1, 64), dtype), numbers(torch, rng, (24, 100), dtype)
    for view in (weight[:, :64], weight[:, 3:67], weight[:1, 8:72].expand(24, 64)):
        repeated = x.expand(rows, 64)
        assert_near(ops.linear(repeated, view), repeated.double() @ view.double().T, dtype, 16)


def test_linear_names_every_path_that_it_tried(torch):
    code = """if True:
        import array, pagedkv
        x = pagedkv.asarray(array.array("f", [1.0]) * 64, device="cuda:0").view((16, 4))
        pagedkv.ops.linear(x, x)
    """
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PAGEDKV_CUBLASLT": "/no/such/file.so"},
                         capture_output=True, text=True)  # fmt: skip
    assert "linear needs libcublasLt" in run.stderr and "tried /no/such/file.so" in run.stderr, run.stderr


# --- the status word


def test_bad_ids_are_masked_and_recorded(torch, rng):
    table = numbers(torch, rng, (10, 64), "bfloat16")
    ids = torch.tensor([3, -1, 9, 10, 2147480000], device="cuda")
    for size in (64, 61):
        out = ops.embedding(ids, table[:, :size])
        assert torch.equal(out[[0, 2]], table[[3, 9], :size]) and (out[[1, 3, 4]] == 0).all()
        with pytest.raises(ValueError, match=r"ids: row [134] has id (-1|10|2147480000) but it must be at least 0 and below 10"):
            ops.check_errors()
        ops.check_errors()


@pytest.mark.parametrize("head_dim", [128, 24])
def test_bad_positions_and_slots_are_masked_and_recorded(torch, rng, head_dim):
    qkv = numbers(torch, rng, (6, 4 * head_dim), "bfloat16")
    weight = torch.ones(head_dim, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.rand(50, head_dim, device="cuda")
    positions = torch.tensor([1, 50, 3, -7, 5, 6], dtype=torch.int32, device="cuda")
    for bad_slot, message in ((2, "positions: token [13] has position (50|-7) but it must be at least 0 and below 50"),
                              (20, "(slot_mapping: token 2 has slot 20|positions: token [13])"),
                              (2**40, "(slot_mapping: token 2 has slot 1099511627776|positions: token [13])")):
        slots = torch.tensor([0, 1, bad_slot, 3, -5, 19], device="cuda")
        caches = torch.full((2, 5, 4, 1, head_dim), 99.0, device="cuda", dtype=torch.bfloat16)
        q = ops.qk_norm_rope_store(qkv, weight, weight, cos_sin, positions, *caches, slots)
        assert (q[[1, 3]] == 0).all() and (q[[0, 2, 4, 5]] != 0).any(-1).all()
        written = {0, 19} | ({2} if bad_slot == 2 else set())
        for cache in caches.view(2, 20, head_dim):
            assert {i for i in range(20) if (cache[i] != 99).any()} == written
        with pytest.raises(ValueError, match=message):
            ops.check_errors()


# --- CUDA graphs


def test_a_graph_of_a_layer_follows_its_inputs(torch, rng):
    """Everything between two attentions and the sampler in one graph, replayed with other inputs, beside plain calls."""
    heads, kv_heads, head_dim, hidden, vocab = 4, 2, 64, 256, 2003
    width = (heads + 2 * kv_heads) * head_dim
    table, qkv_weight, gate_up, down, lm_head = (numbers(torch, rng, shape, "bfloat16") / 16 for shape in (
        (vocab, hidden), (width, hidden), (2 * 512, hidden), (hidden, 512), (vocab, hidden)))  # fmt: skip
    norm, head_norm = numbers(torch, rng, (hidden,), "bfloat16"), numbers(torch, rng, (head_dim,), "bfloat16")
    cos_sin = torch.rand(100, head_dim, device="cuda")

    def make_inputs(rows):
        return [torch.from_numpy(a).cuda() for a in (
            rng.integers(0, vocab, rows), rng.integers(0, 100, rows).astype(np.int32), rng.permutation(64)[:rows],
            rng.uniform(0, 2, rows).astype(np.float32), rng.integers(0, 2**50, rows))]  # fmt: skip

    def run(ids, positions, slots, temperatures, seeds, caches):
        residual = ops.embedding(ids, table)
        qkv = ops.linear(residual, qkv_weight)
        q = ops.qk_norm_rope_store(qkv, head_norm, head_norm, cos_sin, positions, *caches, slots, rms_of=residual)
        x = ops.rms_norm(q.view(len(ids), -1), norm, residual=residual)
        x = ops.linear(ops.silu_and_mul(ops.linear(x, gate_up)), down)
        scratch = torch.empty(len(ids), len(gate_up), device="cuda", dtype=torch.bfloat16)
        x = ops.linear(ops.linear(x, gate_up, gate_up=scratch, rms_eps=1e-6), down)
        logits = ops.linear(ops.gather_rows(x, torch.arange(len(ids), device="cuda")), lm_head,
                                out=torch.empty(len(ids), vocab, device="cuda"))  # fmt: skip
        return q, logits, ops.sample(logits, temperatures, seeds, positions)

    for rows in (1, 8, 9, 40, 64):
        inputs, caches = make_inputs(rows), torch.zeros(2, 4, 16, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        run(*inputs, caches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(*inputs, caches)
        for _ in range(3):
            caches.zero_()
            for old, new in zip(inputs, make_inputs(rows), strict=True):
                old.copy_(new)
            graph.replay()
            plain_caches = torch.zeros_like(caches)
            for a, b in zip(captured, run(*inputs, plain_caches), strict=True):
                assert torch.equal(a, b)
            assert torch.equal(caches, plain_caches) and caches.any()
        inputs[0][0] = vocab
        graph.replay()
        with pytest.raises(ValueError, match=f"ids: row 0 has id {vocab}"):
            ops.check_errors()


def test_operations_follow_torchs_stream(torch, rng):
    x, weight = numbers(torch, rng, (4096, 4096), "bfloat16"), numbers(torch, rng, (4096,), "bfloat16")
    expected = ops.rms_norm(x * 2 + 1, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            late = x
            for _ in range(5):
                late = late * 1
            out = ops.rms_norm(late * 2 + 1, weight)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_against_float64_at_a_models_size(torch, rng):
    """One row of everything at the 8B shape beside the oracle."""
    x, weight = numbers(torch, rng, (300, 4096), "bfloat16"), numbers(torch, rng, (4096,), "bfloat16")
    expected, _ = oracle.rms_norm(get(x[:3].cpu()), get(weight.cpu()), 1e-6, "bfloat16")
    np.testing.assert_allclose(get(ops.rms_norm(x, weight)[:3].cpu()), expected, rtol=1.6e-2, atol=1e-2)
    gate_up = numbers(torch, rng, (300, 2 * 12288), "bfloat16")
    expected = oracle.silu_and_mul(get(gate_up[-2:].cpu()), "bfloat16")
    np.testing.assert_allclose(get(ops.silu_and_mul(gate_up)[-2:].cpu()), expected, rtol=1.6e-2, atol=1e-2)
