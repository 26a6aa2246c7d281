"""Safetensors files and config.json: what is right is mapped, what is wrong is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import TINY, random_weights, safetensors_bytes, tensor_shapes, write_model

from pagedkv import LLM
from pagedkv.models.config import Qwen3Config
from pagedkv.models.weights import Checkpoint, CheckpointError, SafetensorsFile


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 holds exactly -> their uint16 bits."""
    bits = array.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def exact(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-8, 8, shape).astype(np.float32)


def test_tensors_are_views_of_the_file(tmp_path, rng):
    values = {"a": exact(rng, (3, 5)), "b": exact(rng, (7,)), "c": exact(rng, (2, 2, 2)), "empty": exact(rng, (0, 4))}
    path = tmp_path / "model.safetensors"
    stored = {"a": values["a"], "b": bfloat16_bits(values["b"]), "c": values["c"].astype(np.float16)}
    path.write_bytes(safetensors_bytes(stored | {"empty": values["empty"]}))
    file = SafetensorsFile(path)
    for name, dtype in (("a", "float32"), ("b", "bfloat16"), ("c", "float16"), ("empty", "float32")):
        tensor = file.tensor(name)
        assert tensor.dtype == dtype and tuple(tensor.shape) == values[name].shape
        np.testing.assert_array_equal(np.array(tensor.tolist(), np.float32).reshape(values[name].shape), values[name])
    assert file.tensor("a").data_ptr() == file.tensor("a").data_ptr()  # no copy
    kept = file.tensor("b")
    del file, tensor  # the view keeps the mapping
    assert kept.tolist() == values["b"].tolist()


def test_load_converts_and_stacks(tmp_path, rng):
    values = {"q": exact(rng, (4, 6)), "k": exact(rng, (2, 6)), "bias": exact(rng, (4,)), "half": exact(rng, (3, 3))}
    stored = values | {"half": bfloat16_bits(values["half"])}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    for dtype in ("float32", "bfloat16", "float16"):
        checkpoint = Checkpoint(tmp_path, dtype, "cpu")
        stacked = checkpoint.load_stacked({"q": 4, "k": 2}, 6)
        assert stacked.dtype == dtype
        assert stacked.tolist() == np.concatenate([values["q"], values["k"]]).tolist()
        assert checkpoint.load("half", 3, 3).tolist() == values["half"].tolist()
        with pytest.raises(CheckpointError, match="tensor 'bias' is no part of the model"):
            checkpoint.check_all_used()
        assert checkpoint.load("bias", 4).tolist() == values["bias"].tolist()
        checkpoint.check_all_used()


def test_a_model_without_a_head(tmp_path, rng):
    """Its tensors are saved without the prefix "model."."""
    values = {"embed_tokens.weight": exact(rng, (4, 6)), "norm.weight": exact(rng, (6,))}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(values))
    checkpoint = Checkpoint(tmp_path, "float32", "cpu")
    assert checkpoint.load("model.embed_tokens.weight", 4, 6).tolist() == values["embed_tokens.weight"].tolist()
    with pytest.raises(CheckpointError, match="tensor 'model.norm.weight' has shape"):
        checkpoint.load("model.norm.weight", 5)
    checkpoint.load("model.norm.weight", 6)
    checkpoint.check_all_used()


def test_unaligned_data_is_copied(tmp_path):
    """The format allows any header length."""
    data = safetensors_bytes({"a": np.arange(6, dtype=np.float32)})
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length] + b" ", data[8 + length :]
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    assert SafetensorsFile(tmp_path / "x.safetensors").tensor("a").tolist() == [0, 1, 2, 3, 4, 5]


def split_in_shards(folder, count: int) -> None:
    """Replaces model.safetensors by shards and their index."""
    weights = random_weights(TINY)
    names = sorted(weights)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in names[i::count]}
        (folder / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_checkpoint(tmp_path):
    whole, shards = write_model(tmp_path / "whole"), write_model(tmp_path / "shards")
    split_in_shards(shards, 3)
    prompts = [[1, 2, 3], [5] * 20]
    with LLM(whole, device="cpu", seed=0) as a, LLM(shards, device="cpu", seed=0) as b:
        tokens = [[output.token_ids for output in llm.generate(prompts, use_tqdm=False)] for llm in (a, b)]
    assert tokens[0] == tokens[1]
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names 'model-00002-of-00003.safetensors', which is not in the folder"):
        LLM(shards, device="cpu")


def test_one_file_of_another_name(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    LLM(folder, device="cpu").close()
    (folder / "more.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(FileNotFoundError, match="several .safetensors files but no model.safetensors.index.json"):
        LLM(folder, device="cpu")


def test_a_folder_without_weights(tmp_path):
    """Other engines serve uninitialised weights without an error."""
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no model.safetensors: no weights to load"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("name", sorted(tensor_shapes(TINY)))
def test_missing_tensor(tmp_path, name):
    folder = write_model(tmp_path)
    weights = random_weights(TINY)
    del weights[name]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
        LLM(folder, device="cpu")


def test_extra_tensor(tmp_path):
    folder = write_model(tmp_path)
    extra = {"model.layers.7.mlp.up_proj.weight": np.zeros((96, 64), np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(random_weights(TINY) | extra))
    with pytest.raises(CheckpointError, match=r"safetensors: tensor 'model.layers.7.mlp.up_proj.weight' is no part"):
        LLM(folder, device="cpu")


def test_a_tied_model_may_hold_its_head_twice(tmp_path):
    folder = write_model(tmp_path, tie_word_embeddings=True)
    weights = random_weights(TINY | {"tie_word_embeddings": True})
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    LLM(folder, device="cpu").close()


def test_mis_shaped_tensor(tmp_path):
    folder = write_model(tmp_path)
    weights = random_weights(TINY)
    weights["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 65), np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    message = r"safetensors: tensor 'model.layers.1.self_attn.k_proj.weight' has shape \[64, 65\] but .* \[64, 64\]"
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, device="cpu")


def corrupt_header(data: bytes, change) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


BAD_FILES = {
    "empty": (lambda data: b"", "empty file"),
    "short": (lambda data: data[:5], r"truncated, or no safetensors file \(5 bytes\)"),
    "header cut": (lambda data: data[:100], r"truncated, or no safetensors file \(100 bytes\)"),
    "data cut": (lambda data: data[:-1], r"tensor 'a' ends at byte \d+ but the file is truncated at \d+"),
    "huge header": (lambda data: b"\xff" * 8 + data[8:], "truncated, or no safetensors file"),
    "no JSON": (lambda data: (4).to_bytes(8, "little") + b"{]{]" + data, "the header is no JSON"),
    "no object": (lambda data: (4).to_bytes(8, "little") + b"[1] " + data, "the header is no JSON object"),
    "nested": (lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000, "the header is no JSON"),
    "dtype": (lambda data: corrupt_header(data, lambda h: h["a"].update(dtype=["F32"])), "tensor 'a': bad header"),
    "no dtype": (lambda data: corrupt_header(data, lambda h: h["a"].pop("dtype")), "tensor 'a': bad header"),
    "text as shape": (lambda data: corrupt_header(data, lambda h: h["a"].update(shape="66")), "tensor 'a': bad header"),
    "negative": (lambda data: corrupt_header(data, lambda h: h["a"].update(shape=[-1, -6])), "tensor 'a': bad header"),
    "offsets": (
        lambda data: corrupt_header(data, lambda h: h["a"].update(data_offsets=[0, 20])),
        r"tensor 'a': offsets 0..20 do not fit F32 \[6\]",
    ),
    "offsets below": (
        lambda data: corrupt_header(data, lambda h: h["a"].update(data_offsets=[-24, 0])),
        "tensor 'a': bad header entry",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path, case):
    change, message = BAD_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(safetensors_bytes({"a": np.arange(6, dtype=np.float32)})))
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{message}|model.safetensors: {message}"):
        SafetensorsFile(path).tensor("a")


@pytest.mark.parametrize("offsets", [[0, 24], [20, 44], [12, 36]])
def test_tensors_that_share_bytes(tmp_path, offsets):
    path = tmp_path / "model.safetensors"
    a, b = np.arange(12, dtype=np.float32).reshape(2, 6)
    data = safetensors_bytes({"a": a, "b": b, "none": np.zeros((0, 3), np.float32)})
    path.write_bytes(data)
    assert SafetensorsFile(path).tensor("b").tolist() == list(range(6, 12))
    path.write_bytes(corrupt_header(data, lambda h: h["b"].update(data_offsets=offsets)))
    with pytest.raises(CheckpointError, match="model.safetensors: tensors 'a' and 'b' share byte"):
        SafetensorsFile(path)


# --- what the format allows, beside its reference

A = '"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}'
B = '"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[24,36]}'


def empty(name: str, at: int) -> str:
    return f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[{at},{at}]}}'


def table(*entries: str) -> str:
    return "{" + ",".join(entries) + "}"


def in_file(header: str | bytes, num_bytes: int = 36, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else header.encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes)


def one(old: str, new: str) -> bytes:
    """The only tensor's entry with a change."""
    assert old in A
    return in_file(table(A.replace(old, new)), 24)


ALLOWED = {
    "two": in_file(table(A, B)),
    "the other order": in_file(table(B, A)),
    "padded": in_file(table(A, B) + "  \n"),
    "none": in_file("{}", 0),
    "metadata": in_file(table('"__metadata__":{"format":"pt"}', A, B)),
    "no metadata": in_file(table('"__metadata__":null', A, B)),
    "another field": one('"shape"', '"x":[1.5,{}],"shape"'),
    "empty tensors": in_file(table(empty("x", 24), A, empty("y", 0)), 24),
    "4 bits": one('"F32","shape":[6]', '"F4","shape":[48]'),
    "no dimension": in_file('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4),
}
FORBIDDEN = {
    "the length one too small": (in_file(table(A, B) + " ", length=len(A) + len(B) + 3), "bytes 36..37 .* after"),
    "bytes after the last": (in_file(table(A, B), 40), r"bytes 36\.\.40 of the data, after the last tensor, are no"),
    "bytes and no tensor": (in_file("{}", 1), r"bytes 0\.\.1 of the data, after the last tensor"),
    "bytes before the first": (in_file(table(B)), r"bytes 0\.\.24 of the data, before tensor 'b', are no tensor's"),
    "a gap": (in_file(table(A, B).replace("24,36", "28,40"), 40), r"bytes 24\.\.28 of the data, before tensor 'b'"),
    "one byte short": (in_file(table(A, B), 35), r"tensor 'b' ends at byte \d+ but the file is truncated at \d+"),
    "empty inside": (in_file(table(A, empty("x", 12)), 24), "tensors 'a' and 'x' share byte 12"),
    "empty after a gap": (in_file(table(A, empty("x", 28)), 28), r"bytes 24\.\.28 .* before tensor 'x'"),
    "backwards": (one("[0,24]", "[24,0]"), r"offsets 24\.\.0 do not fit"),
    "huge header": (in_file(b"{}" + b" " * 99_999_999, 0), "the header has 100000001 bytes but may have 100000000"),
    "no header": (in_file("", 0), "the header is no JSON"),
    "mark": (in_file("\ufeff" + table(A), 24), "the header is no JSON"),
    "UTF-16": (in_file(table(A).encode("utf-16"), 24), "the header is no JSON"),
    "NaN": (one('"shape"', '"x":NaN,"shape"'), "the header is no JSON"),
    "infinite": (one('"shape"', '"x":1e999,"shape"'), "the header is no JSON"),
    "0 byte": (in_file(table(A) + "\0", 24), "the header is no JSON"),
    "a field twice": (one('"shape":[6]', '"shape":[6],"shape":[6]'), "a name is there twice"),
    "metadata of ints": (in_file(table('"__metadata__":{"x":1}', A), 24), "__metadata__ must map names to texts"),
    "metadata as a list": (in_file(table('"__metadata__":[]', A), 24), "__metadata__ must map names to texts"),
    "null": (in_file(table('"b":null', A), 24), "tensor 'b': bad header entry None"),
    "a float": (one("[6]", "[6.0]"), "tensor 'a': bad header entry"),
    "minus 0": (one("[0,", "[-0,"), "tensor 'a': bad header entry"),
    "a bool": (one("[6]", "[6,true]"), "tensor 'a': bad header entry"),
    "above 64 bits": (one("[6]", "[6,0,18446744073709551616]"), "tensor 'a': bad header entry"),
    "overflow": (in_file(table(empty("a", 0).replace("[0]", "[9223372036854775808,4,0]")), 0), "do not fit"),
    "three offsets": (one("[0,24]", "[0,24,24]"), "tensor 'a': bad header entry"),
    "no such dtype": (one("F32", "F33"), "tensor 'a': the format has no dtype 'F33'"),
    "half a byte": (one('"F32","shape":[6]', '"F4","shape":[47]'), r"offsets 0\.\.24 do not fit F4 \[47\]"),
}
# The format's text forbids these; its reference takes them.
TOLERATED = {
    "a tensor twice": (in_file(table(A, A), 24), "a name is there twice"),
    "a space first": (in_file(" " + table(A), 24), "the header is no JSON object"),
    "a list as an entry": (in_file('{"a":["F32",[6],[0,24]]}', 24), "tensor 'a': bad header entry"),
}


def reads(path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return False
    return True


def reference_reads(data: bytes) -> bool:
    safetensors = pytest.importorskip("safetensors")
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("case", ALLOWED)
def test_the_format_allows(tmp_path, case):
    assert reads(tmp_path / "x.safetensors", ALLOWED[case])
    assert reference_reads(ALLOWED[case])


@pytest.mark.parametrize("case", FORBIDDEN | TOLERATED)
def test_the_format_forbids(tmp_path, case):
    data, message = (FORBIDDEN | TOLERATED)[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{message}|x.safetensors: {message}"):
        SafetensorsFile(tmp_path / "x.safetensors")
    assert reference_reads(data) == (case in TOLERATED)


def test_damaged_files_beside_the_reference(tmp_path, rng):
    """One to three bytes of a header or its length are changed, added or lost: both read it, or neither."""
    start = ALLOWED["metadata"]
    length = int.from_bytes(start[:8], "little")
    digits = [i for i in range(length + 8) if start[i : i + 1].isdigit() or i == 0]
    num_read = 0
    for _ in range(4000):
        data = bytearray(start)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.choice(digits)) if rng.random() < 0.7 else int(rng.integers(9, length + 8))
            change, byte = rng.integers(4), int(rng.choice(bytearray(b'0123456789 ,:"{}[]-.eF')))
            if at == 0:
                data[0] = (data[0] + int(rng.integers(-3, 4))) % 256
            elif change == 0:
                data[at:at] = bytes([byte])
            elif change == 1:
                del data[at]
            else:
                data[at] = byte
            if change < 2 and rng.random() < 0.9 and at:
                data[0] = (data[0] + (1 if change == 0 else -1)) % 256
        expected = reference_reads(bytes(data))
        num_read += expected
        assert reads(tmp_path / "x.safetensors", bytes(data)) == expected, bytes(data)
    assert num_read > 20


def test_quantised_dtype_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.zeros(4, np.uint8)}, {"a": "F8_E4M3"}))
    with pytest.raises(NotImplementedError, match="tensor 'a' has dtype F8_E4M3; supported are F32, F16, BF16"):
        SafetensorsFile(path).tensor("a")


# --- config.json


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
