"""Checkpoints of every format beside a model of the same weights in float32: logits at every position, greedy tokens,
what is refused; and weights that are quantised while they are loaded."""

from __future__ import annotations

import json
import threading
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quantized_checkpoints
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_model
from model_oracle import assert_close, poison, record_logits
from quantized_checkpoints import AWQ, FORMATS, GPTQ, PROJECTIONS, QWEN, compressed, fp8, write_plain, write_quantised

from pagedkv import LLM, SamplingParams, ops
from pagedkv.models.files import CheckpointError
from pagedkv.models.quantized import int4, parse_quantization
from pagedkv.models.registry import read_spec
from pagedkv.models.upload import Upload
from pagedkv.models.weight import Part, Scales, part_of_view, stack_scales
from pagedkv.models.weights import Checkpoint
from pagedkv.progress import progress_bar

POOL = {"block_size": 4, "num_blocks": 256, "max_num_seqs": 8, "seed": 0}
CPU = POOL | {"device": "cpu"}
CASES = [(name, family) for name in FORMATS for family in ("qwen3", "qwen2")]  # qwen2: biases, and other head sizes
PROMPT_LENS = (3, 40)


def answers(folder, prompts, device, **options) -> tuple[list[list[int]], list[np.ndarray]]:
    """Greedy tokens, and the logits at all positions of the prompts and the tokens but the last."""
    with LLM(folder, **POOL, device=device, enforce_eager=True, **options) as llm:
        poison(llm)
        recorded = record_logits(llm)
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(prompts)
        logits = [np.concatenate([each for _, each in recorded[i]]) for i in range(len(prompts))]
        return [output.token_ids for output in outputs], logits


def assert_like(folder, plain, device, **options) -> None:
    rng = np.random.default_rng(7)  # fixed: fresh prompts would meet a tie of two tokens some day
    prompts = [rng.integers(97, size=n).tolist() for n in PROMPT_LENS]
    tokens, logits = answers(folder, prompts, device, **options)
    expected_tokens, expected = answers(plain, prompts, device, dtype="float32")
    assert tokens == expected_tokens
    for one, other in zip(logits, expected):
        assert_close(one, other, 1e-4)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_and_tokens(tmp_path, caplog, name, family, device):
    values = write_quantised(tmp_path / "small", FORMATS[name], family)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, family), device)
    warnings = [each.getMessage() for each in caplog.records if each.name == "pagedkv.models.weights"]
    assert len(warnings) == ("order" in name)  # one, not one for each weight
    assert all("14 weights (model.layers.0.self_attn.q_proj is one)" in each for each in warnings)


KINDS = {  # of the weights of layer 0's qkv, and of its gate_up
    "fp8": ([("float8_e4m3fn", (64, 128))], [("float8_e4m3fn", (32, 128))]),  # rows: what divides those of all parts
    "fp8, tensor": ([("float8_e4m3fn", (1, 64))], [("float8_e4m3fn", (1, 64))]),
    "packed, zeros": ([("uint8", (1, 32))], [("uint8", (1, 32))]),
    "awq": ([("uint8", (1, 32))], [("uint8", (1, 32))]),
    "gptq, channel": ([("uint8", (1, 64))], [("uint8", (1, 64))]),
    "gptq, order": ([("float32", None)], [("float32", None)]),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_in_memory(tmp_path, name):
    """One weight for projections that are one product; no copy in float32."""
    write_quantised(tmp_path, FORMATS[name])
    with LLM(tmp_path, **CPU) as llm:
        layer = llm._runner.model.layers[0]
        for linear, expected in zip((layer.attention.qkv, layer.mlp.gate_up), KINDS[name]):
            assert [(weight.data.dtype, weight.block) for weight in linear.weights] == expected
            assert linear.can_fold == (name == "gptq, order")
            (weight,) = linear.weights
            assert linear.nbytes == sum(x.nbytes for x in (weight.data, weight.scales, weight.zeros) if x is not None)
            assert (weight.zeros is not None) == (name in ("packed, zeros", "awq"))
        assert llm.dtype == llm.config.dtype == "float32"
        assert llm.config.quantization.stores == ("fp8" if "fp8" in name else "int4",)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["fp8", "packed, zeros", "gptq, order"])
def test_activations_of_16_bits(tmp_path, name, dtype, device):
    """The dtype is that of config.json; weights are as exact as in float32, but for those that were dequantised. A GPU
    rounds these prompts to float8 where the weights are."""
    values = write_quantised(tmp_path / "small", FORMATS[name], dtype=dtype)
    prompt = [np.random.default_rng(3).integers(97, size=40).tolist()]
    _, (expected,) = answers(write_plain(tmp_path / "plain", values), prompt, device)
    _, (logits,) = answers(tmp_path / "small", prompt, device)
    tolerance = 0.15 if dtype == "bfloat16" else 0.02
    assert_close(logits[:40], expected[:40], 0.3 if device != "cpu" and name.startswith("fp8") else tolerance)


# --- which weights are quantised

IGNORED = {  # names that are not: as lists have them; and other entries, which name no product
    "fp8": {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.k_proj", "mlp.gate", "model.layers.1.mlp", "up"]},
    "fp8, small blocks": {"modules_to_not_convert": None, "ignored_layers": ["lm_head", "model.layers.0.self_attn.k_proj", "layers.1.mlp"]},
    "packed": {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj", "re:.*layers\\.1\\.mlp.*", "k_proj", "re:up_proj"]},
    "fp8, tensor": {"ignore": ["re:lm_.*", "re:model.layers.0.self_attn.k_proj", "re:.*1.mlp.*_proj$"]},
    "awq": {"modules_to_not_convert": ["layers.0.self_attn.k_proj", "layers.1.mlp"]},
    "gptq": {"dynamic": {r"-:.*\.0\.self_attn\.k_proj$": {}, "-:model.layers.1.mlp": {}, "-:up_proj": {}}},
}
PLAIN = ("layers.0.self_attn.k_proj", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.1.mlp.down_proj")
BLOCKS = [["self_attn.q_proj", "self_attn.v_proj"], ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
FEWER = {  # other products than lists name, or all but those: loaders take an entry for any part of a name, or ask the files
    "awq, the beginning of a name": ("awq", ("layers.1.mlp.gate_proj", "self_attn.k_proj"), {"modules_to_not_convert": ["mlp.gate", "k_"]}),
    "awq, no name": ("awq", (), {"modules_to_not_convert": ["gate", "up"]}),
    "awq, another": ("awq", ("v_proj", "k_proj"), {"modules_to_not_convert": ["k_proj"]}),
    "awq, no list": ("awq", PLAIN, {}),
    "gptq, no list": ("gptq", PLAIN, {}),
    "gptq, another": ("gptq", ("v_proj", "k_proj"), {"dynamic": {"-:.*v_proj": {}}}),
    "fp8, patterns": ("fp8", ("layers.0.mlp.up_proj", "q_proj"), {
        "modules_to_not_convert": [r"model.layers.\d.self_attn.q_proj", "lm_.*", r".*0\.mlp\.up_proj", "model.layers.*.mlp.u"],
    }),
    "gptq, blocks": ("gptq", ("k_proj",), {"modules_in_block_to_quantize": BLOCKS}),
    "gptq, blocks that differ": ("gptq", ("layers.0.self_attn.k_proj",), {"modules_in_block_to_quantize": [*BLOCKS, ["self_attn.k_proj"]]}),
    "gptq, one list": ("gptq", ("k_proj",), {"modules_in_block_to_quantize": [name for each in BLOCKS for name in each]}),
}  # fmt: skip


@pytest.mark.parametrize("case", FEWER)
def test_what_the_files_hold(tmp_path, case):
    name, parts, lists = FEWER[case]
    values = write_quantised(tmp_path / "small", FORMATS[name], plain=parts, quantization=lists)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values), "cpu")


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("name", IGNORED)
def test_ignore_lists(tmp_path, name, family, device):
    """Before projections are stacked: q, k and v of layer 0 are of two kinds, and layer 1 begins with folded norms."""
    values = write_quantised(tmp_path / "small", FORMATS[name], family, plain=PLAIN, quantization=IGNORED[name])
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, family), device)
    with LLM(tmp_path / "small", **CPU) as llm:
        kinds = [[weight.is_quantised for weight in linear.weights] for layer in llm._runner.model.layers
                 for linear in (layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down)]  # fmt: skip
        assert kinds == [[True, False, True], [True], [True], [True], [False], [False]]


EXPERTS = {"fp8": {"modules_to_not_convert": ["lm_head", "mlp"]}, "packed": {"ignore": ["lm_head", "re:.*mlp.*"]}}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_are_not_quantised(tmp_path, name, device):
    """Beside an attention that is. Those that are: test_quantized_experts.py."""
    plain = [f"experts.{i}.{part}_proj" for i in range(6) for part in ("gate", "up", "down")]
    values = write_quantised(tmp_path / "small", FORMATS[name], "qwen3_moe", plain=tuple(plain), quantization=EXPERTS[name])
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, "qwen3_moe"), device)


def test_gate_and_up_of_two_kinds(tmp_path, device):
    lists = {"ignore": ["lm_head", "re:.*up_proj"]}
    values = write_quantised(tmp_path / "small", FORMATS["packed"], "llama", plain=("up_proj",), quantization=lists, mlp_bias=True)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, "llama", mlp_bias=True), device)


def test_groups_of_two_kinds(tmp_path, device):
    """A name or a pattern counts before the class; each group has its format."""
    config = compressed("int", 4, "group", "mixed-precision", group_size=32)
    other = compressed("float", 8, "channel", "")["config_groups"]["group_0"]
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = other | {"targets": ["re:.*(down|v)_proj"], "format": "float-quantized"}
    int4_of, fp8_of = FORMATS["packed"].quantise, fp8((1, 0), "weight_scale")
    with_int4 = write_quantised(tmp_path / "int4", FORMATS["packed"]._replace(config=config))
    with_fp8 = write_quantised(tmp_path / "small", FORMATS["packed"]._replace(config=config, quantise=fp8_of))
    names = [name for name in with_fp8 if name.endswith(("down_proj.weight", "v_proj.weight"))]
    plain = with_int4 | {name: with_fp8[name] for name in names}

    def mix(tensors):
        for name in [name for name in with_int4 if name.endswith("_proj.weight") and name not in names]:
            del tensors[name], tensors[f"{name}_scale"]
            value = random_weights(tiny_config(vocab_size=104))[name].astype(np.float64)
            tensors.update({f"{name.removesuffix('.weight')}.{k}": v for k, v in int4_of(value).tensors.items()})

    write_quantised(tmp_path / "small", FORMATS["packed"]._replace(config=config, quantise=fp8_of), edit=mix)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", plain), device)


def test_groups_of_two_sizes(tmp_path, device):
    """Rules of GPTQ: the first that matches a name counts."""
    rules = {"+:.*down_proj": {"bits": 4, "group_size": 16, "sym": True}, "-:.*(v|down)_proj": {}, ".*q_proj": {"group_size": 64}, ".*k_proj": {}}
    form, sizes = FORMATS["gptq"], {"down_proj": 16, "q_proj": 64}
    config = form._replace(config=form.config | {"dynamic": rules})
    values, others = write_quantised(tmp_path / "small", config, plain=("v_proj",)), {}

    def edit(tensors):
        for name, value in random_weights(tiny_config(vocab_size=104)).items():
            module = name.removesuffix(".weight")
            if (size := sizes.get(module.rpartition(".")[2])) is not None:
                matrix = quantized_checkpoints.int4("gptq", size, stored_less=1)(value.astype(np.float64))
                tensors.update({f"{module}.{last}": each for last, each in matrix.tensors.items()})
                others[name] = matrix.values.astype(np.float32)

    write_quantised(tmp_path / "small", config, plain=("v_proj",), edit=edit)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values | others), device)


@pytest.mark.parametrize("name", ["fp8, channel", "gptq, version 2"])
def test_a_tied_head(tmp_path, name, device):
    form = FORMATS[name]
    values = write_quantised(tmp_path / "small", form, "llama", tie_word_embeddings=True)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, "llama", tie_word_embeddings=True), device)


@pytest.mark.parametrize("name, lists", [
    ("fp8", {"modules_to_not_convert": ["lm_head", "layers.0.self_attn.k_proj"]}),
    ("fp8, channel", {"ignore": ["layers.0.self_attn.k_proj"]}),
    ("packed", {"ignore": [r"re:layers\.0\.self_attn\.k_proj$"]}),
    ("gptq", {"dynamic": {r"-:layers\.0\.self_attn\.k_proj": {}}}),
])  # fmt: skip
def test_lists_of_a_base_model(tmp_path, name, lists):
    """Saved without its head: neither tensors nor lists have "model." before their names."""

    def rename(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    options = {"tie_word_embeddings": True, "architectures": ["Qwen3Model"]}
    plain = ("layers.0.self_attn.k_proj",)
    values = write_quantised(tmp_path / "small", FORMATS[name], plain=plain, quantization=lists, edit=rename, **options)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, tie_word_embeddings=True), "cpu")


def test_a_scalar_and_scales_of_activations(tmp_path, device):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].reshape(())
            tensors[name.replace("weight_scale", "input_scale")] = np.ones(1, np.float32)

    form = deepcopy(FORMATS["fp8, tensor"])
    form.config["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    values = write_quantised(tmp_path / "small", form, edit=edit)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values), device)


def test_groups_of_64_bits(tmp_path):
    def edit(tensors):
        tensors.update({name: array.astype(np.int64) for name, array in tensors.items() if name.endswith("g_idx")})

    values = write_quantised(tmp_path / "small", FORMATS["gptq, order"], edit=edit)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values), "cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_biases_of_zeros(tmp_path, family):
    """AutoGPTQ wrote one for each product: Qwen2.5's GPTQ files have them, and many older ones."""

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("qweight")]:
            tensors.setdefault(name.replace("qweight", "bias"), np.zeros(tensors[name].shape[1], np.float16))

    values = write_quantised(tmp_path / "small", FORMATS["gptq"], family, edit=edit)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values, family), "cpu")


# --- weights that are quantised while they are loaded


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_loaded_as_fp8(tmp_path, family, device):
    """Beside weights that were quantised by the definition."""
    form, folder = FORMATS["fp8, block"], write_model(tmp_path / "given", family, vocab_size=104)
    values = write_quantised(tmp_path / "unused", form, family)
    assert_like(folder, write_plain(tmp_path / "plain", values, family), device, quantization="fp8")
    with LLM(folder, **CPU, quantization="fp8") as llm:
        assert "LoadedAsFp8" in repr(llm.config)
        assert [each.data.dtype for each in llm._runner.model.head.linear.weights] == ["float32"]


def test_blocks_of_zeros_and_of_tiny_numbers(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.q_proj.weight"][:] = 0
    weights["model.layers.0.self_attn.v_proj.weight"] *= np.float32(1e-43)
    folder = write_model(tmp_path)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with LLM(folder, **CPU, quantization="fp8") as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)[0].error is None
        weight = llm._runner.model.layers[0].attention.qkv.weights[0]
        assert np.isfinite(weight.scales.numpy()).all()
        assert not ops.asarray(weight.data[:128], "float32").numpy().any()


def test_what_was_asked_for_and_what_is_there(tmp_path):
    for name in ("fp8", "fp8, tensor"):
        write_quantised(tmp_path / name, FORMATS[name])
        assert read_spec(tmp_path / name, "fp8") == read_spec(tmp_path / name)
    for name in ("awq", "gptq", "packed"):
        write_quantised(tmp_path / name, FORMATS[name])
        with pytest.raises(ValueError, match="config.json: quantization is 'fp8' but the checkpoint's weights are .*: leave it None"):
            LLM(tmp_path / name, device="cpu", quantization="fp8")
    with pytest.raises(ValueError, match="quantization is 'int8' but must be None or fp8"):
        LLM(tmp_path / "fp8", device="cpu", quantization="int8")


def test_random_weights_of_every_kind(tmp_path):
    for name, form in FORMATS.items():
        write_quantised(tmp_path / name, form)
    write_model(tmp_path / "plain")
    for name, options in [*((name, {}) for name in FORMATS), ("plain", {"quantization": "fp8"})]:
        with LLM(tmp_path / name, **CPU, load_format="dummy", dtype="bfloat16", **options) as llm:
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True), use_tqdm=False)
            assert output.error is None and len({*output.token_ids}) > 3
            weights = [weight for linear in llm._runner.model.layers[0].attention.into_new for weight in linear.weights]
            assert all(weight.is_quantised for weight in weights)


# --- what a saved cache belongs to


@pytest.mark.parametrize("last", ["weight_scale_inv", "weight"])
def test_a_saved_cache_of_other_scales(tmp_path, last):
    def edit(tensors):
        tensors[f"model.layers.1.mlp.up_proj.{last}"].view(np.uint8)[0, 0] ^= 1

    write_quantised(tmp_path / "one", FORMATS["fp8"])
    write_quantised(tmp_path / "other", FORMATS["fp8"], edit=edit)
    with LLM(tmp_path / "one", **CPU) as llm:
        llm.generate([[5] * 40], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.save_cache(tmp_path / "cache") > 0
    with LLM(tmp_path / "other", **CPU) as llm, pytest.raises(CheckpointError, match="model is '[0-9a-f]+' but"):
        llm.load_cache(tmp_path / "cache")


def test_a_saved_cache_of_weights_that_were_not_quantised(tmp_path):
    folder = write_model(tmp_path / "model")
    with LLM(folder, **CPU) as llm:
        llm.generate([[5] * 40], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.save_cache(tmp_path / "cache") > 0
    with LLM(folder, **CPU, quantization="fp8") as llm, pytest.raises(CheckpointError, match="config is '[0-9a-f]+' but"):
        llm.load_cache(tmp_path / "cache")


# --- what is refused

GIVEN = "model.layers.1.mlp.up_proj"


def without(last):
    return lambda tensors: tensors.pop(f"{GIVEN}.{last}")


def changed(last, change):
    return lambda tensors: tensors.update({f"{GIVEN}.{last}": change(tensors[f"{GIVEN}.{last}"])})


def of_half(array):
    return np.ascontiguousarray(array[: len(array) // 2])


def extra(last):
    return lambda tensors: tensors.update({f"{GIVEN}.{last}": np.ones(1, np.float32)})


DAMAGED = {
    "no scale": ("fp8", without("weight_scale_inv"), "tensor '{}.weight_scale_inv' is missing"),
    "a scale of another shape": (
        "fp8", changed("weight_scale_inv", lambda x: np.ones((2, 1), np.float32)),
        r"tensor '{}.weight_scale_inv' has shape \[2, 1\] but the config says \[1, 1\]",
    ),
    "a scale of integers": (
        "fp8", changed("weight_scale_inv", lambda x: np.ones((1, 1), np.int32)),
        "tensor '{}.weight_scale_inv' has dtype I32; supported are F32, F16, BF16",
    ),
    "a weight of 16 bits": (
        "fp8", changed("weight", lambda x: np.zeros((96, 64), np.float16)), "tensor '{}.weight' has dtype F16; supported are F8_E4M3",
    ),
    "a weight of another shape": ("fp8, tensor", changed("weight", of_half), r"'{}.weight' has shape \[48, 64\] but"),
    "an old scale": ("fp8", extra("weight_scale"), "tensor '{}.weight_scale' is no part of the model"),
    "scales of blocks": (
        "fp8, channel", changed("weight_scale", lambda x: x[:1].copy()), r"'{}.weight_scale' has shape \[1, 1\] but .* \[96, 1\]",
    ),
    "zeros without asymmetry": ("packed", extra("weight_zero_point"), "tensor '{}.weight_zero_point' is no part of the model"),
    "no zeros": ("packed, zeros", without("weight_zero_point"), "tensor '{}.weight_zero_point' is missing"),
    "another shape within": (
        "packed", changed("weight_shape", lambda x: x + 1), r"tensor '{}.weight_shape' holds \[97, 65\] but the config says \[96, 64\]",
    ),
    "half of the groups": (
        "packed", changed("weight_scale", lambda x: np.ascontiguousarray(x[:, :1])), r"has shape \[96, 1\] but the config says \[96, 2\]",
    ),
    "words of floats": (
        "packed", changed("weight_packed", lambda x: x.view(np.float32)), "'{}.weight_packed' has dtype F32; supported are I32",
    ),
    "no zeros of awq": ("awq", without("qzeros"), "tensor '{}.qzeros' is missing"),
    "rows of awq": ("awq", changed("qweight", of_half), r"tensor '{}.qweight' has shape \[32, 12\] but the config says \[64, 12\]"),
    "a group too many": ("gptq", changed("g_idx", lambda x: x + 1), "tensor '{}.g_idx' holds 2 but there are 2 groups"),
    "a group below 0": ("gptq", changed("g_idx", lambda x: x - 2), "tensor '{}.g_idx' holds -2 but there are 2 groups"),
    "no groups": ("gptq, order", without("g_idx"), "tensor '{}.g_idx' is missing"),  # in an order, which nobody knows then
    "no groups of words": ("packed, order", without("weight_g_idx"), "tensor '{}.weight_g_idx' is missing"),
    "groups of other inputs": ("gptq", changed("g_idx", of_half), r"tensor '{}.g_idx' has shape \[32\] but the config says \[64\]"),
    "scales of gptq": ("gptq", changed("scales", of_half), r"tensor '{}.scales' has shape \[1, 96\] but the config says \[2, 96\]"),
    "a bias": ("gptq", extra("bias"), "tensor '{}.bias' is no part of the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(tmp_path, name):
    form, edit, message = DAMAGED[name]
    write_quantised(tmp_path, FORMATS[form], edit=edit)
    with pytest.raises((CheckpointError, NotImplementedError), match=message.format(GIVEN.replace(".", r"\."))) as caught:
        LLM(tmp_path, **CPU)
    assert str(tmp_path) in str(caught.value)


def test_lists_that_contradict_the_tensors(tmp_path):
    listed = {"modules_to_not_convert": ["lm_head", GIVEN]}
    write_quantised(tmp_path / "fp8", FORMATS["fp8"], quantization=listed)
    with pytest.raises(NotImplementedError, match=f"tensor '{GIVEN}.weight' has dtype F8_E4M3; supported are F32, F16, BF16"):
        LLM(tmp_path / "fp8", **CPU)
    write_quantised(tmp_path / "awq", FORMATS["awq"], quantization=listed)
    with pytest.raises(CheckpointError, match=f"tensor '{GIVEN}.weight' is missing"):
        LLM(tmp_path / "awq", **CPU)
    write_quantised(tmp_path / "plain", FORMATS["fp8"], plain=(GIVEN,))
    with pytest.raises(NotImplementedError, match=f"tensor '{GIVEN}.weight' has dtype F32; supported are F8_E4M3"):
        LLM(tmp_path / "plain", **CPU)


def with_group(**changes):
    config = compressed("int", 4, "group", "pack-quantized", group_size=32)
    config["config_groups"]["group_0"] |= changes
    return config


def with_weights(kind="int", bits=4, strategy="group", form="pack-quantized", **changes):
    return compressed(kind, bits, strategy, form, **({"group_size": 32} | changes))


REFUSED = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported are awq, compressed-tensors, fp8, gptq"),
    "no method": ({"bits": 4}, "quant_method is None"),
    "a list": ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]; supported are"),
    "no object": ("awq", "quantization_config is 'awq' but must be an object"),
    "static activations": (QWEN | {"activation_scheme": "static"}, "activation_scheme is 'static'; only 'dynamic' is"),
    "a huge block": (QWEN | {"weight_block_size": [2**70, 128]}, r"weight_block_size is \[1180591620717411303424, 128\] but must be two"),
    "fp8, a pattern": (QWEN | {"ignored_layers": ["mlp.*("]}, r"ignored_layers holds 'mlp.\*\(', which is no pattern"),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "activation_scheme is 'static'"),
    "no blocks": (QWEN | {"weight_block_size": None}, "weight_block_size is None but must be two positive integers"),
    "odd blocks": (QWEN | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\] but must be two positive"),
    "e5m2": (QWEN | {"fmt": "e5m2"}, "fmt is 'e5m2'; only 'e4m3' is supported"),
    "a new key": (QWEN | {"rotation_seed": 3}, "quantization_config.rotation_seed is 3, a setting that is not known"),
    "names": (QWEN | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head' but must be a list of names"),
    "awq, 8 bits": (AWQ | {"bits": 8}, "quantization_config.bits is 8; only 4 is supported"),
    "awq, gemv": (AWQ | {"version": "gemv"}, "version is 'gemv'; only 'gemm'"),
    "awq, two methods": (AWQ | {"method": "gptq"}, "quantization_config.method is 'gptq'; only 'awq' is supported"),
    "awq, activations": (AWQ | {"act_bits": 8}, "act_bits is 8; only 16 is supported"),
    "awq, group": (AWQ | {"group_size": 12}, "group_size is 12 but must be a multiple of 8, or -1"),
    "awq, no group": (AWQ | {"group_size": None}, "group_size is None but must be"),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, "quantization_config.bits is 8; only 4 is supported"),
    "gptq, marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; only 'gptq' or 'gptq_v2'"),
    "gptq, two formats": (GPTQ | {"format": "gptq_v2"}, "checkpoint_format is 'gptq' but format is 'gptq_v2'"),
    "gptq, floats": (GPTQ | {"data_type": "mx_fp"}, "data_type is 'mx_fp'; only 'int' is supported"),
    "gptq, by module": (GPTQ | {"dynamic": {"-:.*up.*": {}, "+:.*down.*": {"bits": 8}}}, r"dynamic.\+:.\*down.\*.bits is 8; only 4 is supp"),
    "gptq, a rule's key": (GPTQ | {"dynamic": {".*up": {"pairs": 1}}}, r"dynamic.\.\*up.pairs is 1, a setting that is not known"),
    "gptq, rules": (GPTQ | {"dynamic": ["-:.*down.*"]}, r"dynamic is \['-:\.\*down\.\*'\] but must be an object"),
    "gptq, a rule of text": (GPTQ | {"dynamic": {"+:.*up": "x"}}, r"dynamic.\+:.\*up is 'x' but must be an object"),
    "gptq, a pattern": (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic holds '\(', which is no pattern"),
    "gptq, some modules": (GPTQ | {"modules_in_block_to_quantize": [["q"], 1]}, r"modules_in_block_to_quantize is \[\['q'\], 1\] but must be"),
    "int8": (with_weights(bits=8), "group_0.weights.num_bits is 8; only 4 is supported"),
    "w8a8": (with_weights(bits=8, strategy="channel", form="int-quantized"), "num_bits is 8; only 4"),
    "fp4": (with_weights("float", 4, form="nvfp4-pack-quantized"), "num_bits is 4; only 8 is supported"),
    "w4a8": (with_group(input_activations={"num_bits": 8, "type": "int"}), "input_activations is .*; only None is supported"),
    "another format": (with_weights(form="marlin-24"), "quantization_config.format is 'marlin-24'; only 'pack-quantized' is"),
    "fp8 in groups": (with_weights("float", 8, form="float-quantized"), "strategy is 'group'; only 'tensor' or 'channel' or 'block'"),
    "a group of a channel": (with_weights(strategy="channel"), "weights.group_size is 32; only -1 or None is supported"),
    "int4, no group": (with_weights(strategy=None, group_size=None), "strategy is 'tensor'; only 'group' or 'channel'"),
    "no bits": (with_weights(bits=None), "num_bits is 8; only 4 is supported"),
    "int4, tensor": (with_weights(strategy="tensor"), "strategy is 'tensor'; only 'group' or 'channel'"),
    "dynamic weights": (with_weights(dynamic=True), "dynamic is True; only False is supported"),
    "outputs": (with_group(output_activations={"num_bits": 8}), "output_activations is .*; only None is supported"),
    "a key of a group": (with_group(rotation=1), "config_groups.group_0.rotation is 1, a setting that is not known"),
    "a key of weights": (with_weights(rotation=1), "group_0.weights.rotation is 1, a setting that is not known"),
    "a pattern": (with_group(targets=["re:("]), r"group_0.targets holds 're:\(', which is no pattern"),
    "no groups": (with_group() | {"config_groups": {}}, "config_groups is {} but must be an object of objects"),
    "kv scales": (with_group() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is .*; only None is supported"),
    "sparsity": (with_group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'; only 'dense'"),
    "not compressed": (with_group() | {"quantization_status": "initialized"}, "quantization_status is 'initialized'; only"),
    "transforms": (with_group() | {"transform_config": {"a": 1}}, "transform_config is {'a': 1}; only {} is supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_weights_are_read(tmp_path, name):
    quantization, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(quantization_config=quantization)))
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        read_spec(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


# What tools of 2025 and 2026 write beside what the formats need.
RECORDS = {
    "GPTQModel, gptq": ("gptq", {
        "method": "gptq", "format": "gptq", "hyb_act": False, "pack_impl": "gpu", "act_group_aware": True, "static_groups": False, "mse": 0.0,
        "meta": {"quantizer": ["gptqmodel:7.3.4"], "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None}},
    }),
    "GPTQModel, awq": ("awq", {
        "method": "awq", "format": "gemm", "checkpoint_format": "gemm", "desc_act": False, "lm_head": False,
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.3.4"]}, "zero_point": False,  # zeros of 8
    }),
    "AutoRound, gptq": ("gptq", {
        "amp": True, "autoround_version": "0.4.4", "batch_size": 8, "block_name_to_quantize": None, "data_type": "int",
        "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True,
        "gradient_accumulate_steps": 1, "iters": 200, "low_gpu_mem_usage": False, "lr": 0.005, "minmax_lr": 0.005,
        "nsamples": 128, "provider": "auto-round", "scale_dtype": "torch.float16", "seqlen": 2048, "act_bits": 16, "act_data_type": "int",
        "act_dynamic": True, "act_group_size": 32, "act_sym": True, "quant_block_list": [["model.layers.0", "model.layers.1"]],
    }),
    "AutoRound, awq": ("awq", {
        "act_bits": 16, "autoround_version": "0.9.0", "data_type": "int", "iters": 0, "provider": "auto-round", "sym": False,
        "static_attention_granularity": "tensor", "static_kv_granularity": "tensor", "supported_types": ["Linear"],
        "to_quant_block_names": "model.layers",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_tools(tmp_path, name):
    form, records = RECORDS[name]
    values = write_quantised(tmp_path / "small", FORMATS[form], quantization=records)
    assert_like(tmp_path / "small", write_plain(tmp_path / "plain", values), "cpu")


def test_what_transformers_writes():
    transformers = pytest.importorskip("transformers", reason="its own records are read")
    kinds = {
        "GPTQConfig": ({"bits": 4, "desc_act": True, "sym": False, "dataset": "c4", "tokenizer": "x"}, ("int4",)),
        "AwqConfig": ({}, ("int4",)),
        "FineGrainedFP8Config": ({}, ("fp8",)),
    }
    for name, (options, stores) in kinds.items():
        raw = getattr(transformers, name)(**options).to_dict()
        raw = json.loads(json.dumps(raw, default=lambda each: each.value))
        found = parse_quantization({"quantization_config": raw})
        assert found.stores == stores and found.covers("model.layers.0.mlp.up_proj") is not False
        assert not found.covers("lm_head")


def test_what_llm_compressor_writes():
    """Its files hold records of sparsity and observers."""
    config = with_weights(actorder="static", observer="mse", observer_kwargs={"a": 1}, scale_dtype=None, zp_dtype=None)
    config["sparsity_config"] = {"format": "dense", "global_sparsity": 0.1, "ignore": [], "sparsity_structure": "unstructured"}
    config["transform_config"] = {}
    config["provider"] = "auto-round"  # which writes its files, too
    assert parse_quantization({"quantization_config": config}).stores == ("int4",)


def test_a_strategy_that_is_not_there():
    """As compressed-tensors infers it, and its other defaults."""
    for size, expected in ((32, "group"), (-1, "channel")):
        config = with_weights(strategy=None, type=None, group_size=size)
        (scheme,) = parse_quantization({"quantization_config": config}).schemes
        assert (scheme.type, scheme.strategy, scheme.group_size) == ("int", expected, size)
    config = with_weights("float", None, strategy=None, form="float-quantized", group_size=None)
    assert parse_quantization({"quantization_config": config}).schemes[0].strategy == "tensor"


def test_a_product_that_several_groups_name():
    """As compressed-tensors orders targets: whole names, patterns by alphabet, the class; of one target the last group."""
    q, k, down, head = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.down_proj", "lm_head"
    targets = (["re:.*q_proj", "re:.*k_proj", "Linear"], ["re:.*layers.1.*", "Linear"], [k], ["re:.*[k]_proj"])
    config = compressed("int", 4, "group", "pack-quantized", group_size=32) | {"ignore": []}
    group = config["config_groups"].pop("group_0")
    for i, each in enumerate(targets):
        sized = {"weights": group["weights"] | {"group_size": 32 * 2**i}}
        config["config_groups"][f"group_{i}"] = group | {"targets": each} | sized
    found = parse_quantization({"quantization_config": config})
    assert [found._scheme(name).group_size for name in (q, k, down, head)] == [64, 128, 64, 64]


def test_groups_that_do_not_divide(tmp_path):
    write_quantised(tmp_path, FORMATS["awq"], quantization={"group_size": 40})
    with pytest.raises(NotImplementedError, match=r"q_proj: 64 inputs are no multiple of quantization_config.group_size 40"):
        LLM(tmp_path, **CPU)


# --- repacking and placing


@pytest.mark.parametrize("shape", [(8, 8), (1032, 24), (136, 2056), (2056, 1032)])
def test_repacking_in_tiles(rng, monkeypatch, shape):
    """Tiles and pieces that end anywhere, against the definition of ops.linear."""
    monkeypatch.setattr("pagedkv.models.upload.PIECE_BYTES", 7000)
    q = rng.integers(16, size=shape).astype(np.uint32)
    bits = np.array((0, 16, 4, 20, 8, 24, 12, 28), np.uint32)
    expected = (q.reshape(len(q), -1, 8) << bits).sum(-1, dtype=np.uint32)
    places = 4 * np.arange(8, dtype=np.uint32)
    along = (q.reshape(len(q), -1, 8) << places).sum(-1, dtype=np.uint32)
    across = (q.T.reshape(shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]] << places).sum(-1, dtype=np.uint32)
    scales = ops.from_dlpack(np.ones((shape[0], 1), np.float32))
    for write, step in (
        (int4.write_along_inputs(along), 1), (int4.write_along_inputs(along.T.copy().T), 1), (int4.write_along_outputs(across), 8),
    ):  # fmt: skip
        weight = Upload("cpu").place([int4.int4_part(shape, write, scales, None, step=step)])
        np.testing.assert_array_equal(weight.data.numpy().view(np.uint32), expected)


@pytest.mark.parametrize(("sizes", "rows"), [((96, 32, 200), 32), ((128, 256, 100), 128), ((7, 3), 1), ((300,), 128)])
def test_scales_of_stacked_parts(rng, sizes, rows):
    """Where parts end within a block, blocks become shorter; a scale holds for the same numbers as before."""
    block, columns = (128, 24), 100
    parts, expected = [], []
    for size in sizes:
        scales = rng.random((-(-size // block[0]), -(-columns // block[1])), np.float32)
        view = ops.empty((size, columns), "float8_e4m3fn")
        parts.append(part_of_view(view, view.dtype, Scales(ops.from_dlpack(scales), block)))
        expected.append(np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:size, :columns])
    stacked = stack_scales(parts)
    assert stacked.block == (rows, 24)
    values = np.repeat(np.repeat(stacked.values.numpy(), rows, 0), 24, 1)[: sum(sizes), :columns]
    np.testing.assert_array_equal(values, np.concatenate(expected))
    weight = Upload("cpu").place(parts)
    assert weight.scales.shape == (-(-sum(sizes) // rows), 5)
    assert weight.scales.strides == (5 if rows == 1 else 8, 1)  # rows of scales of blocks begin at multiples of 4
    np.testing.assert_array_equal(weight.scales.numpy(), stacked.values.numpy())


def test_an_error_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr("pagedkv.models.upload.PIECE_BYTES", 64)

    def write(first, last, out):
        if first == 96:
            raise ValueError("row 96")

    upload = Upload("cpu")
    with pytest.raises(ValueError, match="row 96"):
        upload.place([Part(200, 16, "float32", write)])
    upload.close()


def test_a_bar_counts_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pagedkv.models.weights.progress_bar", partial(progress_bar, is_shown=True))
    write_quantised(tmp_path, FORMATS["awq"])
    LLM(tmp_path, **CPU).close()
    last = capsys.readouterr().err.split("\r")[-1]
    size = Checkpoint(tmp_path, "float32", "cpu").files["lm_head.weight"].num_bytes
    assert "weights: 100%" in last and f"{size / 1000:.0f}k/{size / 1000:.0f}k" in last and "B/s" in last, last


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_do_not_stay_in_memory(tmp_path, dtype):
    """What was copied, or converted, is no memory of the process any more; a view is when it is read."""
    folder = write_model(tmp_path, hidden_size=256, intermediate_size=2048)
    size = (folder / "model.safetensors").stat().st_size

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(str(folder / "model.safetensors"))[1].splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

    checkpoint = Checkpoint(folder, dtype, "cpu")
    for name in [name for name in checkpoint.files if name.endswith(PROJECTIONS[-3:] + ("up_proj.weight",))]:
        checkpoint.load_stacked({name: checkpoint.files[name].entry(name).shape[0]}, checkpoint.files[name].entry(name).shape[1])
        assert resident() < size / 4
    checkpoint.close()


class LateGpu:
    """Stands in for a GPU whose copies are done when the event behind them is waited for, or at the end: staging memory
    that is written before would be copied."""

    def __init__(self) -> None:
        self.of_thread, self.events = threading.local(), []

    def empty(self, shape, dtype="float32", device="cpu", *, pinned=False):
        return LateTensor(self, ops.empty(shape, dtype)) if device == "gpu" else ops.empty(shape, dtype)

    def event(self, device):
        event = SimpleNamespace(copies=[])

        def synchronize():
            while event.copies:
                target, source = event.copies.pop()
                target.copy_(source)

        def record():
            event.copies += self.of_thread.copies
            self.of_thread.copies = []

        event.synchronize, event.record = synchronize, record
        self.events.append(event)
        return event

    def synchronize(self, device):
        for event in self.events:
            event.synchronize()


class LateTensor:
    def __init__(self, gpu, tensor) -> None:
        self.gpu, self.tensor = gpu, tensor
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, key):
        return LateTensor(self.gpu, self.tensor[key])

    def view(self, *args):
        return LateTensor(self.gpu, self.tensor.view(*args))

    def copy_(self, source):
        copies = vars(self.gpu.of_thread).setdefault("copies", [])
        copies.append((self.tensor, source))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_staging_memory_is_not_written_too_soon(rng, monkeypatch, num_threads):
    gpu = LateGpu()
    fake = {"empty": gpu.empty, "synchronize": gpu.synchronize, "get_num_threads": lambda: num_threads, "from_dlpack": ops.from_dlpack}
    monkeypatch.setattr("pagedkv.models.upload.ops", SimpleNamespace(**fake))
    monkeypatch.setattr("pagedkv.models.upload.Event", gpu.event)
    monkeypatch.setattr("pagedkv.models.upload.PIECE_BYTES", 1000)
    upload, sizes, parts = Upload("gpu"), (96, 256, 40), []
    values = [rng.integers(256, size=(size, 112), dtype=np.uint8) for size in sizes]
    for each in values:
        scales = Scales(ops.from_dlpack(rng.random((-(-len(each) // 32), 14), np.float32)), (32, 8))
        parts.append(Part(*each.shape, "uint8", lambda first, last, out, each=each: out.copy_(each[first:last]), step=8, scales=scales))
    row = ops.from_dlpack(rng.random((1, 3000), np.float32))  # rows that are longer than a piece
    weight, whole = upload.place(parts), upload.copy(gpu.empty((1, 3000), device="gpu"), row)
    long = upload.place([part_of_view(row, "float32")])
    upload.close()
    np.testing.assert_array_equal(weight.data.tensor.numpy(), np.concatenate(values))
    expected = np.concatenate([part.scales.values.numpy() for part in parts])
    np.testing.assert_array_equal(weight.scales.tensor.numpy()[: len(expected)], expected)
    np.testing.assert_array_equal(whole.tensor.numpy(), row.numpy())
    np.testing.assert_array_equal(long.data.tensor.numpy(), row.numpy())
    assert len(gpu.events) == 2 * num_threads


def test_one_weight_is_not_copied(tmp_path):
    """On the CPU what needs no work stays in the file's memory."""
    write_quantised(tmp_path, FORMATS["fp8"])
    checkpoint = Checkpoint(tmp_path, "float32", "cpu", read_spec(tmp_path).quantization)
    (weight,) = checkpoint.linear({f"{GIVEN}": 96}, 64).weights
    assert weight.data.data_ptr() == checkpoint.view(f"{GIVEN}.weight", (96, 64), ("float8_e4m3fn",)).data_ptr()
