"""The model against transformers' own Qwen3ForCausalLM, on tiny random checkpoints written by save_pretrained."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, save_pretrained
from model_oracle import assert_close, oracle_logits, oracle_tokens, poison, record_logits

from pagedkv import LLM, SamplingParams, ops
from pagedkv.models.rope import Rope, cos_sin_table, parse_rope

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FORMS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "no_groups": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 80},
    "yarn": {"rope_parameters": YARN},
    "yarn_mscale": {
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16}
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_at_every_position(tmp_path, rng, monkeypatch, form):
    model = save_pretrained(tmp_path, **FORMS[form])
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 5, 50, 97)]
    for chunk in (8, 2048):
        with LLM(tmp_path, device="cpu", block_size=4, num_blocks=128, max_num_seqs=4, max_num_batched_tokens=chunk) as llm:
            poison(llm)
            if chunk == 8:  # as on a GPU: products leave squares for the next ones
                monkeypatch.setattr(ops, "linear_squares", lambda x, weight, **options: 4)
            recorded = record_logits(llm)
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        for seq_id, output in enumerate(outputs):
            assert output.error is None
            expected = oracle_logits(model, output.prompt_token_ids + output.token_ids)
            seen = np.zeros(len(expected), bool)
            for start, logits in recorded[seq_id]:
                assert_close(logits, expected[start : start + len(logits)], 1e-4)
                seen[start : start + len(logits)] = True
            assert seen[:-1].all() and not seen[-1]  # the last token is sampled and never computed


ENGINES = {
    "plain": {"enable_prefix_caching": False},
    "cached": {"enable_prefix_caching": True},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "chunked_uncached": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False},
    "small_pool": {"num_blocks": 40},
    "small_pool_uncached": {"num_blocks": 40, "enable_prefix_caching": False},
    "large_pages": {"block_size": 64, "num_blocks": 32},
}


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """A folder, prompts of which some share their beginning, and what transformers generates from each."""
    folder = tmp_path_factory.mktemp("greedy")
    model = save_pretrained(folder, seed=3)
    rng = np.random.default_rng(11)  # fixed: fresh prompts would meet a tie of two tokens some day
    common = rng.integers(VOCAB_SIZE, size=33).tolist()
    prompts = [common + rng.integers(VOCAB_SIZE, size=n).tolist() for n in (0, 1, 17)]
    prompts += [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 3, 60, 100)]
    prompts.append(list(prompts[2]))
    return folder, prompts, [oracle_tokens(model, prompt, 64) for prompt in prompts]


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens(greedy, engine):
    folder, prompts, expected = greedy
    options = {"block_size": 8, "num_blocks": 256} | ENGINES[engine]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(folder, **options) as llm:
        poison(llm)
        for _ in range(2):  # the second time the cache holds the prompts
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.token_ids for output in outputs] == expected
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert llm.generate([prompt], params, use_tqdm=False)[0].token_ids == tokens
        llm.manager.check()
        assert llm.manager.num_free_blocks == llm.manager.num_blocks
        num_hits, num_preemptions = llm.manager.stats()["hit_tokens"], llm.scheduler.queues.num_preemptions
    assert (num_preemptions > 0) == engine.startswith("small_pool")
    assert (num_hits > 0) == options.get("enable_prefix_caching", True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(tmp_path, rng, dtype):
    model = save_pretrained(tmp_path, dtype=dtype)
    prompt = rng.integers(VOCAB_SIZE, size=40).tolist()
    with LLM(tmp_path, device="cpu", block_size=4, num_blocks=64) as llm:
        assert llm.dtype == dtype
        poison(llm)
        recorded = record_logits(llm)
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    expected = oracle_logits(model, prompt)  # the same weights without rounding in between
    assert_close(recorded[0][0][1], expected, 0.1 if dtype == "bfloat16" else 0.02)


def test_a_bfloat16_checkpoint_computed_in_float32(tmp_path, rng):
    model = save_pretrained(tmp_path, dtype="bfloat16")
    prompt = rng.integers(VOCAB_SIZE, size=40).tolist()
    with LLM(tmp_path, device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        recorded = record_logits(llm)
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert_close(recorded[0][0][1], oracle_logits(model, prompt), 1e-4)


@pytest.mark.parametrize("form", ["untied", "yarn", "yarn_mscale", "linear", "odd theta"])
def test_rotary_table(form):
    """Against transformers' cos and sin, up to positions where a wrong ramp or factor shows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    theta = 12345.6 if form == "odd theta" else 10000.0  # which float32 does not have
    parameters = FORMS.get(form, {}).get("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    config = transformers.Qwen3Config(head_dim=128, max_position_embeddings=256, rope_parameters=dict(parameters))
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(3000)[None])
    table = cos_sin_table(parse_rope({"rope_parameters": parameters}, 256, 128), 128, 3000)
    np.testing.assert_allclose(table[:, :64], cos[0, :, :64].numpy(), atol=1e-6)
    np.testing.assert_allclose(table[:, 64:], sin[0, :, :64].numpy(), atol=1e-6)


def test_rotary_table_default():
    """By the formula, without torch."""
    table = cos_sin_table(Rope(theta=100.0), 4, 50)
    positions = np.arange(50.0)
    np.testing.assert_allclose(table[:, 0], np.cos(positions), atol=1e-5)
    np.testing.assert_allclose(table[:, 3], np.sin(positions * 0.1), atol=1e-5)
