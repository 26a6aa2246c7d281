"""A saved cache belongs to the weights that computed it: any change of them refuses it, a copy of them does not."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, random_weights, safetensors_bytes, split_in_shards, write_model
from tiny_engine import GREEDY, engine, generate

from pagedkv import LLM
from pagedkv.models.files import CheckpointError
from pagedkv.models.weights import Checkpoint

PROMPT = [5, 9, 5, 7, 5, 3, 5, 8] * 5
CPU = ("cpu", 1)


def print_of(folder: Path) -> str:
    return Checkpoint(folder, "float32", "cpu").fingerprint()


def rewrite(folder: Path, weights: dict[str, np.ndarray]) -> Path:
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def test_a_cache_of_other_weights_is_refused(folder, tmp_path):
    """One token's row was trained, as PEFT's trainable_token_indices does."""
    weights = random_weights(TINY)
    weights["model.embed_tokens.weight"][5] *= -1.5
    new, cache = rewrite(write_model(tmp_path / "new"), weights), tmp_path / "cache"
    with engine(folder, CPU) as llm:
        generate(llm, [PROMPT], GREEDY)
        assert llm.save_cache(cache) > 0
    with engine(new, CPU) as llm:
        expected = generate(llm, [PROMPT], GREEDY)[0].token_ids
    with engine(new, CPU) as llm:
        with pytest.raises(CheckpointError, match="model is '[0-9a-f]+' but this engine's is"):
            llm.load_cache(cache)
        output = generate(llm, [PROMPT], GREEDY)[0]
    assert output.num_cached_tokens == 0 and output.token_ids == expected
    with engine(shutil.copytree(folder, tmp_path / "copy"), CPU) as llm:
        assert llm.load_cache(cache) > 0


def test_any_bit_of_any_tensor_counts(folder, seed):
    rng, weights = random.Random(seed), random_weights(TINY)
    first = print_of(folder)
    for name in weights:
        bits = weights[name].view(np.uint8).reshape(-1)
        at, bit = rng.choice([0, len(bits) - 1, rng.randrange(len(bits))]), 1 << rng.randrange(8)
        bits[at] ^= bit
        assert print_of(rewrite(folder, weights)) != first, (name, at, bit)
        bits[at] ^= bit
    assert print_of(rewrite(folder, weights)) == first
    turned = weights | {"lm_head.weight": weights["lm_head.weight"].reshape(64, 97)}  # the same bytes
    renamed = {name.replace("model.norm", "model.norm_"): array for name, array in weights.items()}
    assert len({first, print_of(rewrite(folder, turned)), print_of(rewrite(folder, renamed))}) == 3


def test_tensors_longer_than_a_piece(folder, monkeypatch, seed):
    """The last bytes of each piece, too."""
    monkeypatch.setattr("pagedkv.models.weights.PIECE_BYTES", 1000)
    weights, rng = random_weights(TINY), random.Random(seed)
    prints = {print_of(folder)}
    bits = weights["model.embed_tokens.weight"].view(np.uint8).reshape(-1)
    for at in (999, 1000, 1999, len(bits) - 1, rng.randrange(len(bits))):
        bits[at] ^= 1
        prints.add(print_of(rewrite(folder, weights)))
    assert len(prints) == 6


def test_files_and_order_do_not_count(folder):
    first = print_of(folder)
    assert print_of(rewrite(folder, dict(reversed(random_weights(TINY).items())))) == first
    split_in_shards(folder, 3)
    assert print_of(folder) == first


def test_weights_that_change_under_an_engine(folder, tmp_path):
    """The engine computes with what it has loaded. What lies in the folder now names another model."""
    path = folder / "model.safetensors"
    with engine(folder, CPU) as llm:
        generate(llm, [PROMPT], GREEDY)
        other = tmp_path / "other"
        other.write_bytes(safetensors_bytes(random_weights(TINY, seed=1)))
        os.replace(other, path)
        with pytest.raises(CheckpointError, match="the weights in the folder are not those that were loaded from it"):
            llm.save_cache(tmp_path / "cache")
        path.unlink()
        with pytest.raises(FileNotFoundError):
            llm.save_cache(tmp_path / "cache")
        assert not (tmp_path / "cache").exists() and generate(llm, [PROMPT], GREEDY)[0].finish_reason == "length"


def test_weights_are_read_only_when_a_cache_is_saved(folder, monkeypatch):
    """Of a large model that takes seconds."""
    monkeypatch.setattr("pagedkv.models.weights.fingerprint", lambda files: pytest.fail("nobody asked"))
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        generate(llm, [PROMPT], GREEDY)
        with pytest.raises(FileNotFoundError):
            llm.load_cache(folder / "nowhere")
