"""What an installed wheel must do anywhere: `python tests/smoke.py`, with NumPy and nothing else beside pagedkv."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle

import pagedkv


def check_installed() -> None:
    folder = Path(pagedkv.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not in {sys.prefix}"
    for name in ("_C.pyi", "py.typed", "data/demo_model/model.safetensors"):
        assert (folder / name).is_file(), f"{folder / name} is missing"


def check_attention(rng: np.random.Generator) -> None:
    """Two prompts stored into pages of 4 and read again, beside NumPy; no other page is read."""
    lens, block_size, num_q_heads, num_kv_heads, head_dim = (5, 9), 4, 4, 2, 32
    manager = pagedkv.BlockManager(num_blocks=16, block_size=block_size)
    for seq_id, length in enumerate(lens):
        manager.allocate(seq_id, rng.integers(0, 1000, length).tolist())
    step = manager.prepare([0, 1], [0, 0], lens)
    num_tokens = sum(lens)
    q = rng.standard_normal((num_tokens, num_q_heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, num_tokens, num_kv_heads, head_dim)).astype(np.float32)
    k_cache, v_cache = np.full((2, 16, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    pagedkv.store_kvcache(k, v, k_cache, v_cache, step.slot_mapping)
    tables, context_lens, starts = step.block_tables, step.context_lens, step.cu_seqlens_q
    arguments = (q, k_cache, v_cache, tables, context_lens)
    out, lse = pagedkv.paged_attention_fwd(*arguments, cu_seqlens_q=starts, return_lse=True)
    expected_out, expected_lse = oracle.paged_attention_fwd(*arguments, cu_seqlens_q=starts)
    np.testing.assert_allclose(out, expected_out, atol=oracle.tolerance("float32"))
    np.testing.assert_allclose(lse, expected_lse, atol=oracle.tolerance("float32"))
    manager.commit_batch([0, 1], list(lens))
    manager.free_batch([0, 1])
    manager.check()
    assert manager.num_used_blocks == 0


def check_bad_call() -> None:
    try:
        pagedkv.BlockManager(num_blocks=0, block_size=4)
    except ValueError as error:
        assert "num_blocks" in str(error), error
    else:
        raise AssertionError("num_blocks=0 was taken")


def main() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"pagedkv {pagedkv.__version__} on Python {sys.version.split()[0]}, seed {seed}")
    check_installed()
    check_attention(np.random.default_rng(seed))
    check_bad_call()
    subprocess.run([sys.executable, "-m", "pagedkv", "demo", "--num-prompts", "4", "--seed", str(seed)], check=True)


if __name__ == "__main__":
    main()
