"""config.json and generation_config.json: every spelling that is read, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from checkpoints import TINY

from pagedkv.models.config import Qwen3Config


def config_of(folder, remove: str | None = None, generation: dict | None = None, **changes) -> Qwen3Config:
    raw = {k: v for k, v in (TINY | changes).items() if k != remove}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Qwen3Config.from_folder(folder)


def test_spellings_of_transformers_4_and_5(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    new = config_of(tmp_path, rope_parameters=yarn | {"rope_theta": 1e6})
    old = config_of(tmp_path, remove="rope_parameters", rope_scaling=yarn, rope_theta=1e6)
    older = config_of(tmp_path, remove="rope_parameters", rope_scaling={"type": "yarn", **yarn}, rope_theta=1e6)
    assert new == old == older
    assert (new.rope.type, new.rope.theta, new.rope.factor) == ("yarn", 1e6, 4.0)
    assert config_of(tmp_path, remove="dtype", torch_dtype="bfloat16").dtype == "bfloat16"
    assert config_of(tmp_path, remove="head_dim").head_dim == 16
    assert config_of(tmp_path, remove="rope_parameters", rope_scaling=None, rope_theta=5e5).rope.theta == 5e5


def test_eos_ids_of_both_files(tmp_path):
    """Other engines know one end-of-sequence id. A model's two files may name several."""
    assert config_of(tmp_path).eos_token_ids == frozenset()
    assert config_of(tmp_path, eos_token_id=3).eos_token_ids == {3}
    assert config_of(tmp_path, eos_token_id=3, generation={"eos_token_id": [5, 6]}).eos_token_ids == {3, 5, 6}
    assert config_of(tmp_path, eos_token_id=None, generation={"eos_token_id": 7}).eos_token_ids == {7}


REFUSED = {
    "moe": ({"model_type": "qwen3_moe"}, NotImplementedError, "model_type is 'qwen3_moe'"),
    "llama3 rope": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        NotImplementedError,
        "rope type 'llama3'; supported are default, linear, yarn",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act is 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, NotImplementedError, "quant_method is 'fp8'"),
    "dtype": ({"dtype": "float64"}, NotImplementedError, "dtype is 'float64'"),
    "layer type": (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]},
        NotImplementedError,
        "layer_types holds 'chunked_attention'",
    ),
    "heads": ({"num_key_value_heads": 3}, ValueError, "num_attention_heads is 4, no multiple of num_key_value_heads 3"),
    "negative": ({"hidden_size": -1}, ValueError, "hidden_size is -1 but must be a positive integer"),
    "huge": ({"num_hidden_layers": 2**63}, ValueError, "num_hidden_layers is 9223372036854775808 but must be"),
    "text": ({"vocab_size": "97"}, ValueError, "vocab_size is '97' but must be a positive integer"),
    "quantisation": ({"quantization_config": ["fp8"]}, ValueError, "'list' object has no attribute 'get'"),
    "eos": ({"eos_token_id": "x"}, ValueError, "eos_token_id is 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_config(tmp_path, case):
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=f"config.json: .*{message}"):
        config_of(tmp_path, **changes)


def test_config_without_an_entry_or_no_json(tmp_path):
    with pytest.raises(ValueError, match="config.json: no 'hidden_size'"):
        config_of(tmp_path, remove="hidden_size")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: "):
        Qwen3Config.from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        Qwen3Config.from_folder(tmp_path)
