"""JAX arrays in paged attention, and its results back in JAX, on the CPU.

    python examples/jax_arrays.py [--seed 0]

pagedkv reads JAX arrays in place, by DLPack. A JAX array must never change, but JAX cannot say so by DLPack, so nothing
would refuse to write into one. Whatever pagedkv writes (the caches, `out`) must therefore be no JAX array. Here the
caches are pagedkv Tensors, because NumPy has no bfloat16; for float32 and float16 NumPy arrays do as well. The result
of a call is a new Tensor, and `jnp.from_dlpack` makes a JAX array of its memory.

Three sequences go through one random attention layer: their prompts in one call, then a token of each per call. The
results are compared with attention computed by jax.numpy in float32.
"""

import argparse
import sys

import numpy as np

import pagedkv

try:
    import jax
    from jax import numpy as jnp
except ModuleNotFoundError as error:
    print(f"jax_arrays.py needs JAX, package jax: {error}", file=sys.stderr)
    raise SystemExit(2) from error

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB_SIZE = 8, 2, 32, 64, 100
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS, NUM_NEW = 16, 16, 64, 6
TOLERANCE = 0.05  # of values with a standard deviation of 1.4, rounded to bfloat16


@jax.jit
def project(weights: list[jax.Array], ids: jax.Array, positions: jax.Array) -> list[jax.Array]:
    """q, k and v of tokens at their positions: [num_tokens, heads, HEAD_DIM] bfloat16."""
    words, places, qkv = weights
    heads = ((words[ids] + places[positions]) @ qkv).reshape(len(ids), HEADS + 2 * KV_HEADS, HEAD_DIM)
    return jnp.split(heads.astype(jnp.bfloat16), [HEADS, HEADS + KV_HEADS], axis=1)


@jax.jit
def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of one whole sequence, in float32."""
    k, v = (jnp.repeat(each.astype(jnp.float32), HEADS // KV_HEADS, axis=1) for each in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k) * HEAD_DIM**-0.5
    seen = jnp.tril(jnp.ones((len(q), len(q)), bool))
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    jax.config.update("jax_platforms", "cpu")
    rng = np.random.default_rng(seed)
    words, places, qkv = jax.random.split(jax.random.key(seed), 3)
    weights = [
        jax.random.normal(words, (VOCAB_SIZE, HIDDEN)),
        jax.random.normal(places, (MAX_TOKENS, HIDDEN)),
        jax.random.normal(qkv, (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)) / HIDDEN**0.5,
    ]
    manager = pagedkv.BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = pagedkv.empty(shape, "bfloat16"), pagedkv.empty(shape, "bfloat16")
    sequences, results = range(3), [[], [], []]
    for i, length in enumerate((5, 37, 16)):
        manager.allocate(i, rng.integers(VOCAB_SIZE, size=length))
    for _ in range(1 + NUM_NEW):
        starts = [manager.num_computed(i) for i in sequences]
        ids = [manager.token_ids(i)[start:] for i, start in zip(sequences, starts, strict=True)]
        step = manager.prepare(sequences, starts, [len(each) for each in ids])
        positions = jnp.array(step.positions)  # a copy: JAX may read an argument late, and prepare writes it again
        q, k, v = project(weights, np.concatenate(ids), positions)
        pagedkv.store_kvcache(k, v, k_cache, v_cache, step.slot_mapping)
        out = pagedkv.paged_attention_fwd(
            q, k_cache, v_cache, step.block_tables, step.context_lens, cu_seqlens_q=step.cu_seqlens_q
        )
        rows = jnp.from_dlpack(out)  # safe: every call makes a new `out`, so nobody writes this memory again
        for i, mine in zip(sequences, jnp.split(rows, step.cu_seqlens_q[1:-1]), strict=True):
            results[i].append(mine)
            manager.commit(i, manager.num_tokens(i))
            manager.append(i, rng.integers(VOCAB_SIZE, size=1))  # a model would sample it
    print(f"the last result: {out}, in JAX {rows.dtype}{list(rows.shape)}")
    for i in sequences:
        ids = manager.token_ids(i)[: manager.num_computed(i)]
        expected = plain_attention(*project(weights, ids, np.arange(len(ids))))
        error = float(jnp.abs(jnp.concatenate(results[i]).astype(jnp.float32) - expected).max())
        print(f"sequence {i}, {len(ids)} tokens: attention within {error:.3f} of jax.numpy in float32")
        if not error < TOLERANCE:
            raise SystemExit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
