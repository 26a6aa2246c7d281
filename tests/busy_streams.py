"""Streams that are kept at work, and the tensors that their tests read and write."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest

import pagedkv
from pagedkv import Stream, ops

BUSY = 60_000_000  # cycles: 30 ms at 2 GHz


def on_gpu(array: np.ndarray) -> pagedkv.Tensor:
    return pagedkv.asarray(array, device="cuda:0")


@functools.cache
def large_matrices() -> tuple[pagedkv.Tensor, pagedkv.Tensor]:
    """Kept: freeing memory would wait for the GPU."""
    return pagedkv.empty((8192, 8192), "bfloat16", "cuda:0"), pagedkv.empty((8192, 8192), "bfloat16", "cuda:0")


def busy(stream: Stream, milliseconds: float = 20) -> None:
    """Keeps the stream at work for at least so long."""
    x, out = large_matrices()
    for _ in range(int(milliseconds / 1.2) + 1):  # 8192^3 takes 1.4 ms at 800 TFLOP/s
        ops.linear(x, x, out=out, stream=stream)


def silu_and_mul(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def is_close(result: object, expected: np.ndarray) -> bool:
    array = result.cpu().numpy() if hasattr(result, "cpu") else np.asarray(result)
    return np.allclose(array, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def x(rng) -> np.ndarray:
    return rng.standard_normal((64, 512)).astype(np.float32)


@pytest.fixture
def own(cuda, x) -> pagedkv.Tensor:
    return pagedkv.asarray(x, device=cuda)


@pytest.fixture
def side(torch):
    """A stream of PyTorch's beside its current one."""
    return torch.cuda.Stream()


@pytest.fixture
def poisoned(cuda, own):
    """A Tensor for the result, full of NaN, with nothing on its way; the kernels are loaded, which may wait."""
    if torch := sys.modules.get("torch"):
        torch.from_dlpack(ops.silu_and_mul(own)) + 0
    out = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device=cuda)
    ops.synchronize(cuda)
    return out


def keep_busy(torch, stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)


def late(torch, values: np.ndarray, stream):
    """A tensor that holds NaN until `stream` comes to it."""
    target, source = torch.full(values.shape, float("nan"), device="cuda"), torch.from_numpy(values).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        target.copy_(source)
    return target
