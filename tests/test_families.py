"""Every family of models beside transformers' own, on tiny random checkpoints: logits at every position and greedy
tokens; and a family that another distribution brings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    random_weights,
    safetensors_bytes,
    save_pretrained,
    tiny_config,
    write_model,
)
from model_oracle import assert_close, oracle_logits, oracle_tokens, poison, record_logits

from pagedkv import LLM, SamplingParams, ops
from pagedkv.models import registry
from pagedkv.models.registry import read_spec
from pagedkv.models.rope import cos_sin_table, parse_rope

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
SHARDS = {"max_shard_size": "40KB"}
FORMS = {  # prompts are longer than the windows
    "qwen2": {
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
        "untied, window": {**WINDOW, "max_window_layers": 1, "num_key_value_heads": 1},
        "shards, yarn": {**SHARDS, "rope_parameters": YARN, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
        "bfloat16": {"dtype": "bfloat16", "layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    },
    "llama": {
        "tied, llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "untied, biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        "shards, heads": {**SHARDS, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        "a bias of the MLP": {"mlp_bias": True, "rope_parameters": LLAMA3 | {"low_freq_factor": 0.5, "factor": 32.0}},
        "a bias of the attention": {"attention_bias": True, "dtype": "float16"},
    },
    "mistral": {
        "tied": {"tie_word_embeddings": True},
        "untied, window": {"sliding_window": 7, "head_dim": 32},
        "shards, wide window": {**SHARDS, "sliding_window": 48, "num_key_value_heads": 4},
        "bfloat16": {"dtype": "bfloat16", "sliding_window": 2, "num_hidden_layers": 3},
    },
    "qwen3_moe": {
        "tied, sums to 1": {"tie_word_embeddings": True, "norm_topk_prob": True},
        "untied, dense layers": {"mlp_only_layers": [0, 3], "num_hidden_layers": 4, "num_experts_per_tok": 3, "num_key_value_heads": 1},
        "shards, every second": {**SHARDS, "decoder_sparse_step": 2, "num_hidden_layers": 3, "norm_topk_prob": True, "num_experts": 9},
        "bfloat16": {"dtype": "bfloat16", "num_experts_per_tok": 1, "attention_bias": True, "mlp_only_layers": [1]},
    },
}  # fmt: skip
ALL_EXPERTS = {"qwen3_moe": {"num_experts_per_tok": 6}}  # rounding cannot choose others
CASES = [(family, form) for family, forms in FORMS.items() for form in forms]
POOL = {"block_size": 4, "num_blocks": 256, "max_num_seqs": 8}


def test_every_family_is_tested():
    assert set(registry.FAMILIES) == set(FAMILIES) == {*FORMS, "qwen3"}  # test_qwen3.py has more of it


def logits_of(llm: LLM, prompts: list[list[int]], params: SamplingParams):
    """The answers, and their logits at all positions but the last."""
    recorded = record_logits(llm)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for seq_id, output in enumerate(outputs):
        assert output.error is None
        whole = np.full((len(output.prompt_token_ids + output.token_ids) - 1, VOCAB_SIZE), np.nan)
        for start, logits in recorded[seq_id]:
            whole[start : start + len(logits)] = logits
        yield output, whole


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_at_every_position(tmp_path, rng, device, monkeypatch, family, form):
    model = save_pretrained(tmp_path, family, **FORMS[family][form])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("shards" in form)
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 5, 50, 97)]
    for chunk in (8, 2048):
        options = POOL | {"dtype": "float32", "max_num_batched_tokens": chunk, "enforce_eager": True}
        with LLM(tmp_path, device=device, **options) as llm:
            poison(llm)
            if chunk == 8 and device == "cpu":  # as on a GPU: products leave squares for the next ones
                monkeypatch.setattr(ops, "linear_squares", lambda x, weight, **options: 4)
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            for output, logits in logits_of(llm, prompts, params):
                assert_close(logits, oracle_logits(model, output.prompt_token_ids + output.token_ids)[:-1], 1e-4)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_greedy_tokens(tmp_path, device, family, form):
    model = save_pretrained(tmp_path, family, seed=5, **FORMS[family][form])
    rng = np.random.default_rng(12)  # fixed: fresh prompts would meet a tie of two tokens some day
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (3, 40, 100)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(tmp_path, device=device, dtype="float32", **POOL) as llm:
        poison(llm)
        for _ in range(2):  # the second time the cache holds the prompts
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.token_ids for output in outputs] == [oracle_tokens(model, prompt, 64) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FORMS)
def test_half_precision_is_close(tmp_path, rng, device, family, dtype):
    model = save_pretrained(tmp_path, family, dtype=dtype, **ALL_EXPERTS.get(family, {}))
    prompt = rng.integers(VOCAB_SIZE, size=40).tolist()
    with LLM(tmp_path, device=device, **POOL, enforce_eager=True) as llm:
        assert llm.dtype == dtype
        ((_, logits),) = logits_of(llm, [prompt], SamplingParams(temperature=0, max_tokens=1))
    # Weights and inputs of the products are rounded to 8 or 11 bits, which the logits share with the oracle's weights.
    assert_close(logits, oracle_logits(model, prompt), 0.1 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_one_tensor(tmp_path, rng, dtype):
    """As transformers 5 holds them in memory, and some files do: the same tokens as from a tensor for each expert."""
    apart, joined = write_model(tmp_path / "apart", "qwen3_moe"), write_model(tmp_path / "joined", "qwen3_moe")
    config = tiny_config("qwen3_moe")
    weights = random_weights(config)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([weights.pop(f"{name}.{i}.{part}_proj.weight") for i in range(config["num_experts"])])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{name}.gate_up_proj": np.concatenate([gate, up], 1), f"{name}.down_proj": down}
    (joined / "model.safetensors").write_bytes(safetensors_bytes(weights))
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 9, 60)]
    params, answers = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), []
    for folder in (apart, joined):
        with LLM(folder, dtype=dtype, **POOL) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


ROTARY = [  # head_dim, and rope_scaling with its theta: the files of Llama 3.1 8B and 3.2 1B, and the corners
    (128, LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}),
    (64, LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192, "factor": 32.0}),
    (64, LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 2.0, "factor": 1.0}),
    (32, LLAMA3 | {"original_max_position_embeddings": 6}),  # all are slow
    (32, LLAMA3 | {"original_max_position_embeddings": 10**8}),  # none is
]


@pytest.mark.parametrize(("head_dim", "parameters"), ROTARY, ids=range(len(ROTARY)))
def test_rotary_table_of_llama3(head_dim, parameters):
    """Against transformers' cos and sin, up to positions where a wrong ramp shows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(parameters))
    positions = [*range(3000), 100_000, 131_071]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    table = cos_sin_table(parse_rope({"rope_parameters": parameters}, 131072, head_dim), head_dim, 131072)[positions]
    half = head_dim // 2
    np.testing.assert_allclose(table[:3000, :half], cos[0, :3000, :half].numpy(), atol=2e-6)
    np.testing.assert_allclose(table[:3000, half:], sin[0, :3000, :half].numpy(), atol=2e-6)
    np.testing.assert_allclose(table[3000:, half:], sin[0, 3000:, :half].numpy(), atol=0.02)  # a unit in the last place


@pytest.mark.parametrize(("family", "form"), CASES)
def test_what_a_layer_keeps(tmp_path, family, form):
    """Of each token, and for how many tokens."""
    folder = write_model(tmp_path, family, **{k: v for k, v in FORMS[family][form].items() if k != "max_shard_size"})
    spec, raw = read_spec(folder), json.loads((folder / "config.json").read_text())
    dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    assert {layer[:2] for layer in spec.kv_layers} == {(raw["num_key_value_heads"], dim)}
    windows = {"qwen2/untied, window": [0, 7], "qwen2/bfloat16": [7, 0], "mistral/untied, window": [7, 7],
               "mistral/shards, wide window": [48, 48], "mistral/bfloat16": [2, 2, 2]}  # fmt: skip
    assert [layer.window for layer in spec.kv_layers] == windows.get(f"{family}/{form}", [0] * raw["num_hidden_layers"])


# Settings on which the KV of a prompt depends though the weights may be the same.
CHANGES = {
    "qwen2": [WINDOW | {"max_window_layers": 0}, WINDOW | {"max_window_layers": 1}, WINDOW | {"max_window_layers": 0, "sliding_window": 8}],
    "llama": [{"rope_parameters": LLAMA3}] + [{"rope_parameters": LLAMA3 | {name: 3}} for name in list(LLAMA3)[1:]],
    "mistral": [{"sliding_window": 7}, {"sliding_window": 8}],
    "qwen3_moe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 3}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}],
}
COMMON_CHANGES = [{}, {"rms_norm_eps": 1e-5}, {"rope_parameters": YARN}, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}]


@pytest.mark.parametrize("family", FORMS)
def test_a_fingerprint_for_each_way_to_compute(tmp_path, family):
    def print_of(**changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(family, **changes)))
        return read_spec(tmp_path).fingerprint()

    prints = [print_of(**changes) for changes in COMMON_CHANGES + CHANGES[family]]
    assert len(set(prints)) == len(prints) and prints[0] == print_of(eos_token_id=5, attention_dropout=0.1)


@pytest.mark.parametrize("family", FORMS)
def test_random_weights_of_a_config_alone(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family)))
    with LLM(tmp_path, device="cpu", load_format="dummy", **POOL) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=30, seed=1, ignore_eos=True), use_tqdm=False)
    assert len(set(output.token_ids)) > 15
