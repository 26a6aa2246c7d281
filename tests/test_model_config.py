"""config.json and generation_config.json: every spelling that is read, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from checkpoints import FAMILIES, tiny_config, write_model

from pagedkv import LLM, SamplingParams
from pagedkv.models.registry import read_spec

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def config_of(folder, family: str = "qwen3", remove: str | None = None, generation: dict | None = None, **changes):
    raw = {k: v for k, v in tiny_config(family, **changes).items() if k != remove}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(folder)


def test_spellings_of_transformers_4_and_5(tmp_path):
    new = config_of(tmp_path, rope_parameters=YARN | {"rope_theta": 1e6})
    old = config_of(tmp_path, remove="rope_parameters", rope_scaling=YARN, rope_theta=1e6)
    older = config_of(tmp_path, remove="rope_parameters", rope_scaling={"type": "yarn", **YARN}, rope_theta=1e6)
    assert new == old == older
    assert (new.rope.type, new.rope.theta, new.rope.factor) == ("yarn", 1e6, 4.0)
    assert config_of(tmp_path, remove="dtype", torch_dtype="bfloat16").dtype == "bfloat16"
    assert config_of(tmp_path, remove="head_dim").head_dim == 128  # what Qwen3Config of transformers has
    assert config_of(tmp_path, head_dim=None).head_dim == 16
    assert config_of(tmp_path, remove="rope_parameters", rope_scaling=None, rope_theta=5e5).rope.theta == 5e5


def test_eos_ids_of_both_files(tmp_path):
    """Other engines know one end-of-sequence id. A model's two files may name several."""
    assert config_of(tmp_path).eos_token_ids == frozenset()
    assert config_of(tmp_path, eos_token_id=3).eos_token_ids == {3}
    assert config_of(tmp_path, eos_token_id=3, generation={"eos_token_id": [5, 6]}).eos_token_ids == {3, 5, 6}
    assert config_of(tmp_path, eos_token_id=None, generation={"eos_token_id": 7}).eos_token_ids == {7}


REFUSED = {
    "moe": ({"model_type": "mixtral"}, NotImplementedError, "model_type is 'mixtral'"),
    "another rope": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}},
        NotImplementedError,
        "rope type 'dynamic'; supported are default, linear, yarn, llama3",
    ),
    "half of a llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ValueError, "no 'low_freq_factor'"),
    "llama3 rope, key": ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, ValueError, "rope_scaling.beta_fast is 32, a setting"),
    "llama3 rope, factors": (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ValueError, "low_freq_factor is 1.0 and high_freq_factor is 1.0",
    ),
    "llama3 rope, factor": ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, ValueError, "scaling factor is 0.5 but must be at"),
    "partial rope": ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act is 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "quanto"}}, NotImplementedError, "quant_method is 'quanto'; supported are awq, "),
    "dtype": ({"dtype": "float64"}, NotImplementedError, "dtype is 'float64'"),
    "layer type": (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]},
        NotImplementedError,
        "layer_types holds 'chunked_attention'",
    ),
    "layer type without windows": ({"layer_types": ["conv", "full_attention"]}, NotImplementedError, "layer_types holds 'conv'"),
    "layers without windows": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ValueError,
        "layer_types holds 'sliding_attention' but there is no window: use_sliding_window is None",
    ),
    "no layers": ({"layer_types": []}, ValueError, "layer_types has 0 entries but num_hidden_layers is 2"),
    "no KV heads": ({"num_key_value_heads": 0}, ValueError, "num_key_value_heads is 0 but must be a positive integer"),
    "number of layers": ({"layer_types": ["full_attention"]}, ValueError, "layer_types has 1 entries but num_hidden"),
    "window": ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, ValueError, "sliding_window is 0"),
    "both directions": ({"is_causal": False}, NotImplementedError, "is_causal is False; only True is supported"),
    "null directions": ({"is_causal": None}, NotImplementedError, "is_causal is None; only True is supported"),
    "bidirectional": ({"use_bidirectional_attention": True}, NotImplementedError, "use_bidirectional_attention is True"),
    "softcap": ({"attn_logit_softcapping": 50.0}, NotImplementedError, "attn_logit_softcapping is 50.0; only None"),
    "scale": ({"logit_scale": 0.5}, NotImplementedError, "logit_scale is 0.5; only 1 is supported"),
    "experts": ({"num_experts": 8}, NotImplementedError, "num_experts is 8; only 0 is supported"),
    "layers of their own": ({"per_layer_config": {"0": {"head_dim": 16}}}, NotImplementedError, "per_layer_config is {'0'"),
    "unknown": ({"qk_clip": 100}, ValueError, "qk_clip is 100, a setting that is not known here"),
    "unknown text": ({"position_embedding_type": "alibi"}, ValueError, "position_embedding_type is 'alibi', a setting"),
    "unknown flag": ({"use_sparse_attention": False}, ValueError, "use_sparse_attention is False, a setting"),
    "unknown and long": ({"steps": list(range(1000))}, ValueError, r"steps is \[0, 1, 2, 3, 4, 5, ...\], a setting"),
    "weights of another name": ({"transformers_weights": "a.safetensors"}, ValueError, "transformers_weights is 'a.saf"),
    "quantised by MLX": ({"quantization": {"bits": 4}}, ValueError, "quantization is {'bits': 4}, a setting"),
    "own code": ({"auto_map": {"AutoModel": "modeling.Mine"}}, NotImplementedError, "auto_map is .*code of its own"),
    "class": ({"architectures": ["Qwen3ForSequenceClassification"]}, NotImplementedError, "architectures holds 'Qwen3ForSeq"),
    "draft": ({"architectures": ["DFlashDraftModel"]}, NotImplementedError, "architectures holds 'DFlashDraftModel'"),
    "rope key": ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ValueError, "rope_parameters.factor is 2.0, a"),
    "yarn key": ({"rope_scaling": YARN | {"finetuned": True}}, ValueError, "rope_scaling.finetuned is True, a setting"),
    "sections": ({"rope_parameters": {"mrope_section": [8, 4, 4]}}, ValueError, "rope_parameters.mrope_section is"),
    "extrapolation": (
        {"rope_scaling": YARN | {"extrapolation_factor": 0.5}}, NotImplementedError, "rope_scaling.extrapolation_factor is 0.5",
    ),
    "rope of each layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ValueError, "rope_parameters.full_attention is",
    ),
    "two factors": (
        {"rope_scaling": YARN | {"attention_factor": 1.0, "attn_factor": 0.9}}, ValueError,
        "attention_factor is 1.0 and attn_factor is 0.9: only one",
    ),
    "two thetas": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}, ValueError,
        "rope_scaling has no rope_theta but rope_parameters has 1000000.0: write it into rope_scaling",
    ),
    "rope that is none": ({"rope_scaling": "yarn"}, ValueError, "rope_scaling is 'yarn' but must be an object"),
    "heads": ({"num_key_value_heads": 3}, ValueError, "num_attention_heads is 4, no multiple of num_key_value_heads 3"),
    "negative": ({"hidden_size": -1}, ValueError, "hidden_size is -1 but must be a positive integer"),
    "huge": ({"num_hidden_layers": 2**63}, ValueError, "num_hidden_layers is 9223372036854775808 but must be"),
    "layers": ({"num_hidden_layers": 2**31 - 1}, ValueError, r"num_hidden_layers is 2147483647 but must be .* below 2\*\*16"),
    "text": ({"vocab_size": "97"}, ValueError, "vocab_size is '97' but must be a positive integer"),
    "quantisation": ({"quantization_config": ["fp8"]}, ValueError, r"quantization_config is \['fp8'\] but must be an object"),
    "eos": ({"eos_token_id": "x"}, ValueError, "eos_token_id is 'x'"),
    "eos of the other file": ({"generation": {"eos_token_id": "x"}}, ValueError, "generation_config.json: eos_token_id is 'x'"),
    "eos, a flag": ({"eos_token_id": [3, True]}, ValueError, r"eos_token_id is \[3, True\] but must be an integer"),
    "odd heads": ({"head_dim": 10}, NotImplementedError, "head_dim is 10; only multiples of 8 up to 256 are supported"),
    "wide heads": ({"head_dim": 264}, NotImplementedError, "head_dim is 264; only multiples of 8 up to 256 are supported"),
    "a flag of text": ({"tie_word_embeddings": "false"}, ValueError, "tie_word_embeddings is 'false' but must be true or false"),
    "a flag of a number": ({"attention_bias": 0}, ValueError, "attention_bias is 0 but must be true or false"),
    "windows of text": ({"use_sliding_window": "no", "sliding_window": 8}, ValueError, "use_sliding_window is 'no' but must be"),
    "epsilon": ({"rms_norm_eps": float("nan")}, ValueError, "rms_norm_eps is nan but must be a positive number"),
    "epsilon of text": ({"rms_norm_eps": "1e-6"}, ValueError, "rms_norm_eps is '1e-6' but must be a positive number"),
    "theta": ({"rope_parameters": {"rope_theta": -1.0}}, ValueError, "rope_theta is -1.0 but must be a positive number"),
    "theta 0": ({"rope_parameters": None, "rope_theta": 0}, ValueError, "rope_theta is 0 but must be a positive number"),
    "factor of text": ({"rope_scaling": YARN | {"factor": "4"}}, ValueError, "rope_scaling.factor is '4' but must be a positive"),
    "infinite factor": ({"rope_scaling": YARN | {"factor": float("inf")}}, ValueError, "rope_scaling.factor is inf but must be"),
    "linear without a factor": ({"rope_scaling": {"type": "linear"}}, ValueError, "no 'factor'"),
    "length": ({"rope_scaling": YARN | {"original_max_position_embeddings": -5}}, ValueError, "original_max_position_embeddings is -5"),
    "beta": ({"rope_scaling": YARN | {"beta_fast": 0}}, ValueError, "rope_scaling.beta_fast is 0 but must be a positive number"),
    "beta, digits": ({"rope_scaling": YARN | {"beta_fast": 10**400}}, ValueError, "beta_fast is 1000.* but must be a positive number"),
    "beta, tiny": ({"rope_scaling": YARN | {"beta_slow": 1e-320}}, ValueError, "rotary embedding is no number at some position .*1e-320"),
    "theta 1": ({"rope_scaling": YARN | {"rope_theta": 1}}, ValueError, "rotary embedding is no number at some position .*theta=1.0"),
    "huge theta": ({"rope_parameters": {"rope_theta": 1e308}}, ValueError, "rotary embedding is no number at .*theta=1e.308"),
    "no attention": ({"rope_scaling": YARN | {"attention_factor": 0}}, ValueError, "attention_factor is 0 but must be a positive"),
    "attention, nan": ({"rope_scaling": YARN | {"attention_factor": float("nan")}}, ValueError, "attention_factor is nan but must be"),
    "much attention": ({"rope_scaling": YARN | {"attention_factor": 1e300}}, ValueError, "rotary embedding is no number at .*1e.300"),
    "attn_factor of text": ({"rope_scaling": YARN | {"attn_factor": "1"}}, ValueError, "rope_scaling.attn_factor is '1' but must be"),
    "mscale": ({"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1}}, ValueError, "rope_scaling.mscale is '1' but must be"),
    "truncate": ({"rope_scaling": YARN | {"truncate": "false"}}, ValueError, "truncate is 'false' but must be true or false"),
    "first layer with a window": (
        {"use_sliding_window": True, "max_window_layers": None}, ValueError, "max_window_layers is None but must be an integer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_config(tmp_path, case):
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=f"config.json: .*{message}"):
        config_of(tmp_path, **changes)


SLIDING, FULL = "sliding_attention", "full_attention"
REFUSED_BY_FAMILY = {  # what transformers passes over, or computes otherwise than the file says
    "qwen2": {
        "class": ({"architectures": ["Qwen3ForCausalLM"]}, NotImplementedError, "architectures holds 'Qwen3ForCausalLM'; supp"),
        "no bias": ({"attention_bias": False}, NotImplementedError, "attention_bias is False; only True is supported"),
        "MLP's bias": ({"mlp_bias": True}, NotImplementedError, "mlp_bias is True; only False is supported"),
        "no window": ({"layer_types": [FULL, SLIDING]}, ValueError, "there is no window: use_sliding_window is None, sliding_window is 4"),
        "norms": ({"use_qk_norm": True}, ValueError, "use_qk_norm is True, a setting that is not known here"),
        "experts": ({"num_experts": 60}, NotImplementedError, "num_experts is 60"),
        "heads": ({"hidden_size": 70}, ValueError, "hidden_size is 70, no multiple of num_attention_heads 4: no head_dim"),
        "both directions": ({"is_causal": False}, NotImplementedError, "is_causal is False"),  # GTE-Qwen2 and its kin
    },
    "llama": {
        "class": ({"architectures": ["LlamaForSequenceClassification"]}, NotImplementedError, "architectures holds 'LlamaForSeq"),
        "window": ({"sliding_window": 4096}, NotImplementedError, "sliding_window is 4096; only None is supported"),
        "windows": ({"use_sliding_window": True}, NotImplementedError, "use_sliding_window is True; only False"),
        "layer types": ({"layer_types": [FULL, SLIDING]}, ValueError, r"layer_types is \['full_attention', 'sliding_attention'\], a setting"),
        "pairs": ({"rope_interleaved": True}, NotImplementedError, "rope_interleaved is True; only False is supported"),
        "no rope": ({"no_rope_layers": [1, 0]}, ValueError, r"no_rope_layers is \[1, 0\], a setting that is not known here"),
        "multipliers": ({"residual_multiplier": 0.2}, ValueError, "residual_multiplier is 0.2, a setting"),
        "length beside the rope": ({"original_max_position_embeddings": 64}, ValueError, "original_max_position_embeddings is 64, a"),
        "activation": ({"hidden_act": "relu2"}, NotImplementedError, "hidden_act is 'relu2'"),
    },
    "mistral": {
        "class": ({"architectures": ["MixtralForCausalLM"]}, NotImplementedError, "architectures holds 'MixtralForCausalLM'"),
        "window": ({"sliding_window": 0}, ValueError, "sliding_window is 0 but must be a positive integer"),
        "window of text": ({"sliding_window": "4096"}, ValueError, "sliding_window is '4096' but must be"),
        "no windows": ({"use_sliding_window": False}, NotImplementedError, "use_sliding_window is False; only True"),
        "layers with windows": (
            {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, NotImplementedError,
            "layer_types holds 'full_attention' but sliding_window is 8",
        ),
        "layers without": ({"layer_types": [SLIDING] * 2}, NotImplementedError, "layer_types holds 'sliding_attention' but sliding_window is None"),
        "bias": ({"attention_bias": True}, NotImplementedError, "attention_bias is True; only False is supported"),
        "experts": ({"num_local_experts": 8}, NotImplementedError, "num_local_experts is 8"),
        "scale of queries": ({"llama_4_scaling": {"beta": 0.1}}, ValueError, "llama_4_scaling is {'beta': 0.1}, a setting"),
        "Mistral's own file": ({"dim": 4096}, ValueError, "dim is 4096, a setting that is not known here"),
    },
    "qwen3_moe": {
        "window": ({"use_sliding_window": True}, NotImplementedError, "use_sliding_window is True; only False is supported"),
        "no experts": ({"num_experts": 0}, ValueError, "num_experts is 0 but must be a positive integer"),
        "two numbers of experts": ({"num_local_experts": 8}, ValueError, "num_experts is 6 but num_local_experts is 8"),
        "many experts": ({"num_experts": 1025}, NotImplementedError, "num_experts is 1025; at most 1024"),
        "more than there are": ({"num_experts_per_tok": 7}, NotImplementedError, "num_experts_per_tok is 7, of 6 experts; at most 6"),
        "many at once": ({"num_experts": 64, "num_experts_per_tok": 33}, NotImplementedError, "is 33, of 64 experts; at most 32"),
        "a shared expert": ({"shared_expert_intermediate_size": 64}, NotImplementedError, "shared_expert_intermediate_size is 64; only 0"),
        "no norms": ({"use_qk_norm": False}, NotImplementedError, "use_qk_norm is False; only True is supported"),
        "layers of text": ({"mlp_only_layers": ["0"]}, ValueError, r"mlp_only_layers is \['0'\] but must be a list of integers"),
        "sums of text": ({"norm_topk_prob": "false"}, ValueError, "norm_topk_prob is 'false' but must be true or false"),
        "step": ({"decoder_sparse_step": 0}, ValueError, "decoder_sparse_step is 0 but must be a positive integer"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in REFUSED_BY_FAMILY.items() for case in cases])
def test_refused_by_a_family(tmp_path, family, case):
    changes, error, message = REFUSED_BY_FAMILY[family][case]
    with pytest.raises(error, match=f"config.json: .*{message}"):
        config_of(tmp_path, family, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(tmp_path, family):
    """Of each key that may be absent: its class there, given the rest."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "use_sliding_window": True, "num_hidden_layers": 30}
    absent = {"num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "sliding_window", "max_window_layers",
              "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_parameters", "hidden_act"}  # fmt: skip
    raw = {key: value for key, value in tiny_config(family, **sizes).items() if key not in absent}
    if family in ("llama", "mistral", "qwen3_moe"):
        del raw["use_sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_spec(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads and ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    types = getattr(theirs, "layer_types", [SLIDING if family == "mistral" else FULL] * 30)
    assert ours.windows == tuple(theirs.sliding_window if each == SLIDING else 0 for each in types)
    assert ours.o_bias == getattr(theirs, "attention_bias", False) and ours.mlp_bias == getattr(theirs, "mlp_bias", False)


# What other people's tools leave in config.json, and what asks for nothing.
RECORDS = {
    "transformers 4": {
        "_name_or_path": "Qwen/Qwen3-0.6B", "_attn_implementation_autoset": True, "transformers_version": "4.51.0",
        "torch_dtype": "bfloat16", "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": False,
        "bos_token_id": 151643, "pad_token_id": 151643, "max_window_layers": 36, "sliding_window": 32768,
        "use_sliding_window": False, "rope_scaling": None, "pretraining_tp": 1, "return_dict": True,
        "output_attentions": False, "is_decoder": True, "is_encoder_decoder": False, "pruned_heads": {},
        "chunk_size_feed_forward": 0, "tie_encoder_decoder": False, "torchscript": False, "task_specific_params": None,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "finetuning_task": None, "num_beams": 1,
        "temperature": 1.0, "problem_type": None, "layer_types": ["full_attention"] * 2,
    },
    "Unsloth": {"unsloth_version": "2025.9.1", "unsloth_fixed": True, "model_name": "unsloth/Qwen3-4B", "layer_types": ["attention"] * 2},
    "FSDP": {"architectures": ["FSDPQwen3ForCausalLM"], "gradient_checkpointing": True, "use_flash_attn": True},
    "sentence-transformers": {"architectures": ["Qwen3Model"], "is_matryoshka": True, "task_names": ["a"], "is_causal": True},
    "transformers.js": {"transformers.js_config": {"dtype": "q4"}, "auto_map": {"AutoTokenizer": ["a.B", None]}},
    "other families": {
        "use_mrope": False, "mlp_bias": False, "num_experts": 0, "logit_scale": 1.0, "attn_logit_softcapping": None,
        "use_bidirectional_attention": None, "partial_rotary_factor": 1.0, "unheard_of": None, "quantization_config": None,
    },
}  # fmt: skip


# The keys of published files, with smaller sizes.
PUBLISHED = {
    "qwen2": {"use_mrope": False, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 131072, "rope_theta": 1e6},
    "llama": {
        "pretraining_tp": 1, "rope_scaling": LLAMA3, "rope_theta": 5e5, "bos_token_id": 128000, "eos_token_id": [128001, 128009],
        "is_llama_config": True, "rope_interleaved": False, "attention_dropout": 0.0,
    },
    "mistral": {"head_dim": None, "rope_theta": 1e6, "use_cache": True, "sliding_window": None, "bos_token_id": 1},
    "qwen3_moe": {
        "head_dim": 16, "rope_theta": 1e6, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "norm_topk_prob": True,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
        "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,  # of Qwen3-Coder
    },
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_keys_are_known(tmp_path, family):
    spec = config_of(tmp_path, family, remove="rope_parameters", torch_dtype="bfloat16", **PUBLISHED[family])
    assert spec.family == family and spec.windows == (0, 0) and spec.rope.theta == PUBLISHED[family]["rope_theta"]
    assert spec.rope.type == ("llama3" if family == "llama" else "default") and spec.head_dim == 16


@pytest.mark.parametrize("tool", RECORDS)
def test_records_change_nothing(tmp_path, tool):
    changed = config_of(tmp_path, **RECORDS[tool])
    assert changed == config_of(tmp_path, **{key: RECORDS[tool][key] for key in RECORDS[tool] if key == "layer_types"})


def test_settings_that_mean_the_default_are_read(tmp_path):
    neutral = {"partial_rotary_factor": 1.0, "extrapolation_factor": 1, "apply_yarn_scaling": True, "mscale": None}
    assert config_of(tmp_path, rope_scaling=YARN | neutral) == config_of(tmp_path, rope_scaling=YARN)
    assert config_of(tmp_path, use_sliding_window=True, max_window_layers=1).windows == (0, 4096)
    assert config_of(tmp_path, use_sliding_window=True, sliding_window=None, max_window_layers=0).windows == (0, 0)


def test_attn_factor_multiplies(tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B, a dense Qwen3, has this one, with which nothing is scaled."""
    factor = {"attn_factor": 0.8782488562869419}
    assert config_of(tmp_path, rope_scaling=YARN | factor).rope.attention_factor == pytest.approx(1.0, abs=1e-12)
    assert config_of(tmp_path, rope_scaling=YARN | {"attention_factor": 0.7}).rope.attention_factor == 0.7


THETA = {"rope_type": "default", "rope_theta": 1e6}
TWO_ROPES = {
    "yarn of the model card": {"rope_scaling": YARN},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "theta in rope_scaling": {"rope_parameters": THETA, "rope_scaling": YARN | {"rope_theta": 500.0}},
    "theta beside both": {"rope_parameters": THETA, "rope_scaling": YARN, "rope_theta": 500.0},
    "theta beside rope_parameters": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    "theta in rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 9.0},
    "two types": {"rope_scaling": {"type": "linear", **YARN}},
    "an empty rope_scaling": {"rope_parameters": YARN, "rope_scaling": {}},
}


@pytest.mark.parametrize("case", TWO_ROPES)
def test_rope_scaling_beside_rope_parameters(tmp_path, case):
    """The tokens are those of transformers: a file saved by its version 5 has rope_parameters, and the model cards'
    recipes for long contexts add rope_scaling."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, prompt = write_model(tmp_path, **TWO_ROPES[case]), list(range(1, 61))
    oracle, ids = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list(prompt)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        assert llm.generate([prompt], params, use_tqdm=False)[0].token_ids == ids[len(prompt) :]


def test_config_without_an_entry_or_no_json(tmp_path):
    with pytest.raises(ValueError, match="config.json: no 'hidden_size'"):
        config_of(tmp_path, remove="hidden_size")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: "):
        read_spec(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no config.json: not the folder of a model"):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_an_adapter_is_refused(tmp_path, name, is_alone):
    """transformers with PEFT loads it: the base model alone would answer as if nothing had been trained."""
    if not is_alone:
        write_model(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(NotImplementedError, match=f"{name}: adapters .LoRA. are not read from a model's folder"):
        LLM(tmp_path, device="cpu")
