"""Checkpoints of a mixture of experts in every format beside a model of the same weights in float32, and what is refused."""

from __future__ import annotations

import re
from copy import deepcopy

import numpy as np
import pytest
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_model
from model_oracle import assert_close
from quantized_checkpoints import FORMATS, fp8, write_plain, write_quantised
from test_quantized_checkpoints import CPU, answers, assert_like

from pagedkv import LLM, SamplingParams
from pagedkv.models.files import CheckpointError

MOE, COUNT = "qwen3_moe", 6
SIZES = {"moe_intermediate_size": 96}  # of which int4 has whole groups
ROUTER = {"awq": {"modules_to_not_convert": ["gate"]}, "packed": {"ignore": ["lm_head", "re:.*mlp.gate$"]}}
ROUTER |= {"packed, zeros": ROUTER["packed"], "packed, order": ROUTER["packed"]}  # fp8's list has it, gptq knows it
ROUTER |= {name: ROUTER["packed"] for name in FORMATS if name.startswith("fp8, ") and name != "fp8, small blocks"}
NAMES = ["fp8", "fp8, small blocks", "fp8, tensor", "fp8, channel", "fp8, block", "packed", "packed, zeros", "packed, order", "awq",
         "gptq", "gptq, zeros", "gptq, order", "gptq, channel"]  # fmt: skip


def write(folder, name, **options):
    """A folder whose router is not quantised, and its weights in float32."""
    quantization = ROUTER.get(name, {}) | options.pop("quantization", {})
    return write_quantised(folder, FORMATS[name], MOE, quantization=quantization, **SIZES | options)


def plain(folder, values, **options):
    return write_plain(folder, values, MOE, **SIZES | options)


def experts_of(llm, layer=0):
    mlp = llm._runner.model.layers[layer].mlp
    return mlp.router.weights[0], mlp.gate_up.weight, mlp.down.weight


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens(tmp_path, name, device):
    values = write(tmp_path / "small", name)
    assert_like(tmp_path / "small", plain(tmp_path / "plain", values), device)


KINDS = {  # of gate_up and of down: dtype, shape of the scales, block
    "fp8": (("float8_e4m3fn", (6, 6, 1), (32, 128)), ("float8_e4m3fn", (6, 1, 1), (128, 128))),  # 32 divides a gate's 96
    "fp8, channel": (("float8_e4m3fn", (6, 192, 1), (1, 64)), ("float8_e4m3fn", (6, 64, 1), (1, 96))),
    "packed, zeros": (("uint8", (6, 192, 2), (1, 32)), ("uint8", (6, 64, 3), (1, 32))),
    "awq": (("uint8", (6, 192, 2), (1, 32)), ("uint8", (6, 64, 3), (1, 32))),
    "gptq, channel": (("uint8", (6, 192, 1), (1, 64)), ("uint8", (6, 64, 1), (1, 96))),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_in_memory(tmp_path, name):
    write(tmp_path, name)
    with LLM(tmp_path, **CPU) as llm:
        router, *products = experts_of(llm)
        assert not router.is_quantised and router.data.dtype == "float32"
        for weight, expected in zip(products, KINDS[name], strict=True):
            assert (weight.data.dtype, weight.scales.shape, weight.block) == expected
            assert weight.zeros is None or weight.zeros.shape == weight.scales.shape
            assert (weight.zeros is not None) == (name in ("packed, zeros", "awq"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["fp8", "packed, zeros", "gptq, order"])
def test_activations_of_16_bits(tmp_path, name, dtype, device):
    """A token has all experts: rounding cannot choose others. The experts' products do not round x to float8."""
    options = {"num_experts_per_tok": COUNT}
    values = write(tmp_path / "small", name, dtype=dtype, **options)
    prompt = [np.random.default_rng(3).integers(97, size=40).tolist()]
    _, (expected,) = answers(plain(tmp_path / "plain", values, **options), prompt, device)
    _, (logits,) = answers(tmp_path / "small", prompt, device)
    tolerance = 0.15 if dtype == "bfloat16" else 0.02
    assert_close(logits[:40], expected[:40], 0.3 if device != "cpu" and name.startswith("fp8") else tolerance)


# --- a tensor of all experts


def joined(weights):
    """As transformers 5 holds experts in memory."""
    weights = dict(weights)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (np.stack([weights.pop(f"{name}.{i}.{part}_proj.weight") for i in range(COUNT)])
                          for part in ("gate", "up", "down"))  # fmt: skip
        weights |= {f"{name}.gate_up_proj": np.concatenate([gate, up], 1), f"{name}.down_proj": down}
    return weights


@pytest.mark.parametrize("name", ["fp8", "fp8, small blocks"])
def test_experts_in_one_tensor(tmp_path, name, device):
    """Blocks may have rows of a gate and of its up."""
    form, values = FORMATS[name], write(tmp_path / "small", name)
    whole = joined(random_weights(tiny_config(MOE, vocab_size=104, **SIZES)))
    plain_values = joined(values)

    def edit(tensors):
        for each in [each for each in tensors if ".mlp.experts." in each]:
            del tensors[each]
        for each in [each for each in whole if each.endswith("_proj")]:
            matrices = [form.quantise(one.astype(np.float64)) for one in whole[each]]
            tensors[each] = np.stack([one.tensors["weight"] for one in matrices])
            tensors[f"{each}_scale_inv"] = np.stack([one.tensors["weight_scale_inv"] for one in matrices])
            plain_values[each] = np.stack([one.values for one in matrices]).astype(np.float32)

    write(tmp_path / "small", name, edit=edit)
    assert_like(tmp_path / "small", plain(tmp_path / "plain", plain_values), device)


@pytest.mark.parametrize("name", ["packed", "fp8, channel"])
def test_one_tensor_of_a_format_without_them(tmp_path, name):
    write(tmp_path, name, edit=lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": np.zeros((6, 64, 96), np.int32)}))
    with pytest.raises(NotImplementedError, match=r"model.layers.1.mlp.experts.down_proj: experts in one tensor, quantised \("):
        LLM(tmp_path, **CPU)


def test_one_tensor_that_is_not_quantised(tmp_path, device):
    """Beside projections that are."""
    quantization = {"modules_to_not_convert": ["lm_head", "mlp.experts", "mlp.gate"]}
    parts = tuple(f"experts.{i}.{part}_proj" for i in range(COUNT) for part in ("gate", "up", "down"))
    values = write(tmp_path / "apart", "fp8", plain=parts, quantization=quantization)

    def edit(tensors):
        together = joined(tensors)
        tensors.clear()
        tensors.update(together)

    write(tmp_path / "small", "fp8", plain=parts, quantization=quantization, edit=edit)
    for folder in ("small", "apart"):
        assert_like(tmp_path / folder, plain(tmp_path / "plain", values), device)
    with LLM(tmp_path / "small", **CPU) as llm:
        assert [weight.is_quantised for weight in experts_of(llm)] == [False] * 3
        assert llm._runner.model.layers[0].attention.qkv.weights[0].is_quantised


# --- weights that are quantised while they are loaded


@pytest.mark.parametrize("form", ["apart", "in one tensor"])
def test_loaded_as_fp8(tmp_path, form, device):
    """Beside weights that were quantised by the definition; the router's stay as they are."""
    folder = write_model(tmp_path / "given", MOE, vocab_size=104, **SIZES)
    values, given = write(tmp_path / "unused", "fp8, block"), random_weights(tiny_config(MOE, vocab_size=104, **SIZES))
    if form != "apart":
        values, given = joined(values), joined(given)
        (folder / "model.safetensors").write_bytes(safetensors_bytes(given))
        for name in [name for name in given if name.endswith("experts.gate_up_proj")]:  # blocks of gates and ups
            values[name] = np.stack([FORMATS["fp8, block"].quantise(one.astype(np.float64)).values for one in given[name]]).astype(np.float32)
    assert_like(folder, plain(tmp_path / "plain", values), device, quantization="fp8")
    with LLM(folder, **CPU, quantization="fp8") as llm:
        assert [weight.data.dtype for weight in experts_of(llm)] == ["float32", "float8_e4m3fn", "float8_e4m3fn"]


# --- which weights are quantised


@pytest.mark.parametrize("name, lists", [
    ("fp8", {"modules_to_not_convert": ["lm_head", "mlp.gate", "layers.1.mlp.experts"]}),
    ("packed", {"ignore": ["lm_head", "re:.*mlp.gate$", r"re:.*layers\.1\.mlp\.experts.*"]}),
    ("awq", {"modules_to_not_convert": ["gate", *(f"model.layers.1.mlp.experts.{i}" for i in range(COUNT))]}),
])  # fmt: skip
def test_layers_that_are_not_quantised(tmp_path, name, lists, device):
    parts = tuple(f"layers.1.mlp.experts.{i}.{part}_proj" for i in range(COUNT) for part in ("gate", "up", "down"))
    values = write(tmp_path / "small", name, plain=parts, quantization=lists)
    assert_like(tmp_path / "small", plain(tmp_path / "plain", values), device)
    with LLM(tmp_path / "small", **CPU) as llm:
        assert [[weight.is_quantised for weight in experts_of(llm, layer)] for layer in range(2)] == [[False, True, True], [False] * 3]


def test_a_router_that_is_quantised(tmp_path, device):
    """Lists say what is, of a router, too."""
    quantise, routers = FORMATS["fp8"].quantise, [f"model.layers.{i}.mlp.gate" for i in range(2)]

    def edit(tensors):
        for name in routers:
            matrix = quantise(tensors.pop(f"{name}.weight").astype(np.float64))
            tensors.update({f"{name}.{last}": each for last, each in matrix.tensors.items()})
            of_routers[f"{name}.weight"] = matrix.values.astype(np.float32)

    of_routers: dict[str, np.ndarray] = {}
    values = write(tmp_path / "small", "fp8", edit=edit, quantization={"modules_to_not_convert": ["lm_head"]})
    assert_like(tmp_path / "small", plain(tmp_path / "plain", values | of_routers), device)


def test_experts_of_two_kinds(tmp_path):
    lists = {"modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.1.mlp.experts.4"]}
    parts = tuple(f"layers.1.mlp.experts.4.{part}_proj" for part in ("gate", "up", "down"))
    write(tmp_path, "fp8", plain=parts, quantization=lists)
    message = "model.layers.1.mlp.experts.4.gate_proj is quantised in another way than model.layers.1.mlp.experts.0.gate_proj"
    with pytest.raises(NotImplementedError, match=message):
        LLM(tmp_path, **CPU)


def test_random_weights_of_every_kind(tmp_path):
    for name in ("fp8", "fp8, channel", "awq", "gptq, order"):
        write(tmp_path / name, name)
        with LLM(tmp_path / name, **CPU, load_format="dummy", dtype="bfloat16") as llm:
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True), use_tqdm=False)
            assert output.error is None and len({*output.token_ids}) > 3


# --- what is refused

GIVEN = "model.layers.1.mlp.experts.3.up_proj"


def without(last):
    return lambda tensors: tensors.pop(f"{GIVEN}.{last}")


def changed(last, change):
    return lambda tensors: tensors.update({f"{GIVEN}.{last}": change(tensors[f"{GIVEN}.{last}"])})


DAMAGED = {
    "no scale": ("fp8", without("weight_scale_inv"), "tensor '{}.weight_scale_inv' is missing"),
    "no weight": ("fp8, channel", without("weight"), "tensor '{}.weight' is missing"),
    "a scale of another shape": (
        "fp8", changed("weight_scale_inv", lambda x: np.ones((2, 1), np.float32)), r"'{}.weight_scale_inv' has shape \[2, 1\] but .* \[1, 1\]",
    ),
    "a weight of another shape": ("fp8", changed("weight", lambda x: x[:48].copy()), r"'{}.weight' has shape \[48, 64\] but .* \[96, 64\]"),
    "a weight of 16 bits": ("fp8", changed("weight", lambda x: x.astype(np.float16)), "'{}.weight' has dtype F16; supported are F8_E4M3"),
    "an expert too many": (
        "awq", lambda tensors: tensors.update({GIVEN.replace("3", "6") + ".scales": tensors[f"{GIVEN}.scales"]}),
        "tensor 'model.layers.1.mlp.experts.6.up_proj.scales' is no part of the model",
    ),
    "no zeros": ("packed, zeros", without("weight_zero_point"), "tensor '{}.weight_zero_point' is missing"),
    "words": ("awq", changed("qweight", lambda x: x[:32].copy()), r"tensor '{}.qweight' has shape \[32, 12\] but the config says \[64, 12\]"),
    "groups": ("gptq", changed("g_idx", lambda x: x + 1), "tensor '{}.g_idx' holds 2 but there are 2 groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(tmp_path, name):
    form, edit, message = DAMAGED[name]
    write(tmp_path, form, edit=edit)
    with pytest.raises((CheckpointError, NotImplementedError), match=message.format(re.escape(GIVEN))) as caught:
        LLM(tmp_path, **CPU)
    assert str(tmp_path) in str(caught.value)


def test_one_tensor_without_scales(tmp_path):
    values = joined(write(tmp_path / "unused", "fp8"))
    form, tensors = deepcopy(FORMATS["fp8"]), {}
    write_quantised(tmp_path / "small", form, MOE, edit=tensors.update, **SIZES)
    whole = values["model.layers.0.mlp.experts.gate_up_proj"]
    each = [fp8((128, 128), "weight_scale_inv")(one.astype(np.float64)).tensors["weight"] for one in whole]
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = np.stack(each)
    (tmp_path / "small" / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(CheckpointError, match="tensor 'model.layers.0.mlp.experts.gate_up_proj_scale_inv' is missing"):
        LLM(tmp_path / "small", **CPU)
