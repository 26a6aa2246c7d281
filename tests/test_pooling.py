"""embed() beside the files of sentence-transformers: what they ask for is done, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, random_weights, safetensors_bytes, write_model

from pagedkv import LLM
from pagedkv.models.files import CheckpointError

PROMPTS = [list(range(1, 20)), [5], [7] * 30]
LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
KIND = "sentence_transformers.models."


def modules(*kinds: str, **changes: object) -> list[dict]:
    return [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": KIND + kind} | changes for i, kind in enumerate(kinds)]


def write(folder: Path, listed: object, pooling: dict | None = None, **files: dict) -> Path:
    write_model(folder)
    if listed is not None:
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def embed(folder: Path) -> np.ndarray:
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        assert llm.generate([[1, 2]], use_tqdm=False)[0].error is None  # answers need no pooling
        outputs = llm.embed([*PROMPTS, []], use_tqdm=False)
        assert outputs[-1].error is not None and outputs[-1].embedding.shape == (0,)
        return np.stack([output.embedding for output in outputs[:-1]])


def expected(folder: Path) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own Qwen3")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.stack([model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in PROMPTS])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_has_no_head(tmp_path, num_ranks):
    """Qwen3-Embedding-8B is saved as a base model, and not tied: it has vectors, and no tokens."""
    weights = random_weights(TINY)
    del weights["lm_head.weight"]
    for name, of_model in (("base", {key.removeprefix("model."): value for key, value in weights.items()}), ("damaged", weights)):
        (write_model(tmp_path / name) / "model.safetensors").write_bytes(safetensors_bytes(of_model))
    with LLM(tmp_path / "base", device="cpu", block_size=4, num_blocks=64, tensor_parallel_size=num_ranks) as llm:
        vectors = np.stack([output.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
        (output,) = llm.generate([[1, 2]], use_tqdm=False)
        assert str(output.error) == f"the model in {tmp_path / 'base'} has no head (lm_head.weight): it makes vectors: embed()"
    with pytest.raises(CheckpointError, match="tensor 'lm_head.weight' is missing"):  # of a model that should have one
        LLM(tmp_path / "damaged", device="cpu")
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]: .*base has no head"):
        draft = {"method": "draft_model", "model": tmp_path / "base"}
        LLM(write_model(tmp_path / "whole"), device="cpu", num_blocks=64, speculative_config=draft)
    right = expected(tmp_path / "base")
    np.testing.assert_allclose(vectors, right / np.linalg.norm(right, axis=1, keepdims=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", [LAST, {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}])
def test_the_length_of_a_vector(tmp_path, pooling):
    """Normalised where the folder says so, and where it says nothing."""
    raw = expected(write(tmp_path / "0", None))
    ways = [(["Transformer", "Pooling"], pooling, False), (["Transformer", "Pooling", "Normalize"], pooling, True)]
    for i, (kinds, each, normalizes) in enumerate([*ways, (None, None, True), (None, pooling, True)]):
        vectors = embed(write(tmp_path / str(i + 1), kinds and modules(*kinds), each))
        right = raw / np.linalg.norm(raw, axis=1, keepdims=True) if normalizes else raw
        np.testing.assert_allclose(vectors, right, rtol=1e-3, atol=1e-4)


WHOLE = modules("Transformer", "Pooling", "Normalize")
REFUSED = {
    "mean": (WHOLE, LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "is mean_tokens; only last"),
    "two": (WHOLE, LAST | {"pooling_mode_cls_token": True}, r"config.json: the pooling is lasttoken \+ cls_token; only"),
    "max by name": (WHOLE, {"pooling_mode": "max"}, "1_Pooling.config.json: the pooling is max; only lasttoken is supported"),
    "two by name": (WHOLE, {"pooling_mode": ["mean", "lasttoken"]}, r"the pooling is mean \+ lasttoken; only"),
    "unsaid": (WHOLE, {"word_embedding_dimension": 64}, "the pooling is mean; only lasttoken"),
    "alone": (None, {"pooling_mode_cls_token": True}, "1_Pooling.config.json: the pooling is cls_token"),
    "dense": (modules("Transformer", "Pooling", "Dense"), LAST, "modules.json: a module is 'sentence_transformers.models.Dense'"),
    "own code": (modules("Transformer", type="mine.Transformer"), LAST, "modules.json: a module is 'mine.Transformer'"),
    "elsewhere": (modules("Transformer", path="0_Model"), LAST, "modules.json: the model is in '0_Model'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_pooling_is_refused(tmp_path, case):
    listed, pooling, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=message):
        embed(write(tmp_path, listed, pooling))


def test_lower_case_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="sentence_bert_config.json: do_lower_case is true; only false"):
        embed(write(tmp_path, WHOLE, LAST, sentence_bert_config={"max_seq_length": 512, "do_lower_case": True}))


def test_broken_files(tmp_path):
    with pytest.raises(ValueError, match="modules.json: a JSON list of objects was expected"):
        embed(write(tmp_path / "a", {"0": "Transformer"}))
    with pytest.raises(FileNotFoundError, match="1_Pooling.config.json"):
        embed(write(tmp_path / "b", WHOLE))
