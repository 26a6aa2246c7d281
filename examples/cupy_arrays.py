"""CuPy arrays in paged attention on a GPU, on a stream of CuPy's.

    python examples/cupy_arrays.py [--seed 0]

pagedkv reads and writes CuPy arrays in place, by DLPack: queries, keys and values, the caches, `out`. Without `out` the
result of a call is a pagedkv.Tensor, and `cupy.from_dlpack` makes an array of its memory.

Where CuPy works on another stream than the default one, every call gets `stream=stream.ptr`. It then runs after what
CuPy has queued on that stream, and what CuPy queues next runs after it. The host waits only in `cupy.asnumpy`.

Three sequences go through attention with random queries, keys and values: their prompts in one call, then a token of
each per call. The results are compared with attention computed by NumPy in float32. Without CuPy, a GPU or pagedkv's
CUDA backend the program says which one is missing, and exits with status 2.
"""

import argparse
import sys

import numpy as np

import pagedkv

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, NUM_NEW = 8, 2, 64, 16, 16, 6
TOLERANCE = 0.02  # of values with a standard deviation below 1, rounded to float16


def find_cupy():
    """The module cupy. Without it, or where pagedkv cannot use a GPU, this ends the program."""
    try:
        import cupy

        pagedkv.Stream("cuda")
    except (ModuleNotFoundError, NotImplementedError, BufferError) as error:
        print(f"cupy_arrays.py needs CuPy and a GPU: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    return cupy


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one whole sequence."""
    k, v = (each.repeat(HEADS // KV_HEADS, axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    rng = np.random.default_rng(parser.parse_args().seed)
    cupy = find_cupy()
    manager = pagedkv.BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    sequences, qkvs, results = range(3), [], [[], [], []]
    for i, length in enumerate((5, 37, 16)):
        manager.allocate(i, rng.integers(1000, size=length))
        qkvs.append(rng.standard_normal((length + NUM_NEW, HEADS + 2 * KV_HEADS, HEAD_DIM)).astype(np.float16))

    with cupy.cuda.Stream(non_blocking=True) as stream:
        k_cache, v_cache = cupy.zeros((2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), cupy.float16)
        for _ in range(1 + NUM_NEW):
            starts = [manager.num_computed(i) for i in sequences]
            ends = [manager.num_tokens(i) for i in sequences]
            step = manager.prepare(sequences, starts, [end - start for start, end in zip(starts, ends, strict=True)])
            new = [qkv[start:end] for qkv, start, end in zip(qkvs, starts, ends, strict=True)]
            q, k, v = cupy.split(cupy.asarray(np.concatenate(new)), [HEADS, HEADS + KV_HEADS], axis=1)
            slots, _, lens, cu_seqlens, tables = (cupy.asarray(each) for each in step[:5])
            out = cupy.empty(q.shape, cupy.float16)
            pagedkv.store_kvcache(k, v, k_cache, v_cache, slots, stream=stream.ptr)
            pagedkv.paged_attention_fwd(
                q, k_cache, v_cache, tables, lens, cu_seqlens_q=cu_seqlens, out=out, stream=stream.ptr
            )
            rows = cupy.asnumpy(out.astype(cupy.float32))  # CuPy's kernel and copy, after pagedkv's
            for i, mine in zip(sequences, np.split(rows, step.cu_seqlens_q[1:-1]), strict=True):
                results[i].append(mine)
                manager.commit(i, ends[i])
                manager.append(i, rng.integers(1000, size=1))  # a model would sample it
    print(f"CuPy {cupy.__version__}, on a stream of its own")
    for i in sequences:
        qkv = qkvs[i].astype(np.float32)
        expected = plain_attention(*np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1))
        error = float(np.abs(np.concatenate(results[i]) - expected).max())
        print(f"sequence {i}, {len(qkv)} tokens: attention within {error:.4f} of NumPy in float32")
        if not error < TOLERANCE:
            raise SystemExit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
