"""What another kernel left in shared memory changes nothing: every operation, with NaN, zeros and huge numbers there."""

import numpy as np
import pytest

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="these tests use torch's tensors")
cupy = pytest.importorskip("cupy", reason="cupy compiles the kernel that fills shared memory")

from test_torch_operators import assert_same_bits, draw  # noqa: E402

from pagedkv.torch import OPERATIONS  # noqa: E402

WORDS = 0, 0xFFFFFFFF, 0x7F7F7F7F  # zeros; NaN of every dtype; 3e38 in float32 and bfloat16, NaN in float8


@pytest.fixture(scope="module")
def fill():
    """fill(word): writes the word to the shared memory of every SM, and waits."""
    source = r"""
    extern "C" __global__ void fill(unsigned word, int count) {
        extern __shared__ volatile unsigned memory[];
        for (int i = threadIdx.x; i < count; i += blockDim.x) memory[i] = word;
    }"""
    kernel, card = cupy.RawKernel(source, "fill"), cupy.cuda.Device().attributes
    size = card["MaxSharedMemoryPerBlockOptin"]
    kernel.max_dynamic_shared_size_bytes = size
    grid = (4 * card["MultiProcessorCount"],)  # one CTA an SM at a time; four rounds, so that none is left out

    def launch(word: int) -> None:
        torch.cuda.synchronize()
        kernel(grid, (512,), (cupy.uint32(word), cupy.int32(size // 4)), shared_mem=size)
        cupy.cuda.runtime.deviceSynchronize()

    return launch


def assert_same_after(fill, run) -> None:
    """run() gives the same bits, whatever lay in shared memory."""
    results = []
    for word in WORDS:
        fill(word)
        results.append(run())
        torch.cuda.synchronize()
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_operation(cuda, rng, fill, name):
    for seed in rng.integers(2**32, size=12):

        def run(seed=seed):
            arguments = draw(name, np.random.default_rng(seed), "cuda:0")
            return getattr(pagedkv._C, name)(**arguments), arguments

        assert_same_after(fill, run)


# Groups that fill a tile of 128 query rows, and those that do not; prompts, decodes, both; caches of 16 and 8 bits.
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 9, 11, 14, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention(cuda, rng, fill, group, head_dim):
    for cache_dtype, queries in (("bfloat16", [700, 1, 3]), ("bfloat16", [1, 1]), ("float8_e4m3fn", [65, 1, 300])):
        dtype = getattr(torch, cache_dtype)
        kv_heads, page, blocks = int(rng.integers(1, 4)), 16, 64
        pool = torch.randn(2, blocks * len(queries), page, kv_heads, head_dim, device="cuda").to(dtype)
        tables = torch.randperm(blocks * len(queries), device="cuda", dtype=torch.int32).view(len(queries), blocks)
        q = torch.randn(sum(queries), kv_heads * group, head_dim, device="cuda", dtype=torch.bfloat16)
        lens = torch.tensor([n + int(rng.integers(0, 1024 - n)) for n in queries], device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, *np.cumsum(queries)], device="cuda", dtype=torch.int32)
        arguments = dict(cu_seqlens_q=starts, max_seqlen_q=max(queries))
        assert_same_after(fill, lambda a=(q, *pool, tables, lens), b=arguments: pagedkv.paged_attention_fwd(*a, **b))


@pytest.mark.parametrize("rows", [1, 3, 17, 33, 65, 129, 257])
def test_products(cuda, rng, fill, rows):
    for columns, hidden in (64, 64), (136, 1024), (6144, 2048), (1000, 4104):
        x, weight = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (rows, columns))
        assert_same_after(fill, lambda x=x, weight=weight: ops.linear(x, weight))
