"""Weights of a folder: tensors are mapped, converted and stacked; what is missing, extra or of another shape is named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from checkpoints import (
    TINY,
    random_weights,
    safetensors_bytes,
    split_in_shards,
    tensor_shapes,
    tiny_config,
    write_model,
)

from pagedkv import LLM, SamplingParams, ops
from pagedkv.models.files import CheckpointError
from pagedkv.models.safetensors import SafetensorsFile
from pagedkv.models.weights import Checkpoint


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
            checkpoint.check_all_used({})
        assert checkpoint.load("bias", 4).tolist() == values["bias"].tolist()
        checkpoint.check_all_used({})


def test_a_model_without_a_head(tmp_path, rng):
    """Its tensors are saved without the prefix "model."."""
    values = {"embed_tokens.weight": exact(rng, (4, 6)), "norm.weight": exact(rng, (6,))}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(values))
    checkpoint = Checkpoint(tmp_path, "float32", "cpu")
    assert checkpoint.load("model.embed_tokens.weight", 4, 6).tolist() == values["embed_tokens.weight"].tolist()
    with pytest.raises(CheckpointError, match="tensor 'model.norm.weight' has shape"):
        checkpoint.load("model.norm.weight", 5)
    checkpoint.load("model.norm.weight", 6)
    checkpoint.check_all_used({})


def test_unaligned_data_is_copied(tmp_path):
    """The format allows any header length."""
    data = safetensors_bytes({"a": np.arange(6, dtype=np.float32)})
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length] + b" ", data[8 + length :]
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    assert SafetensorsFile(tmp_path / "x.safetensors").tensor("a").tolist() == [0, 1, 2, 3, 4, 5]


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


def tokens_of(folder) -> list[int]:
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].token_ids


@pytest.mark.parametrize("stale", ["index", "index and shards", "an other file", "a consolidated file"])
def test_model_safetensors_counts_before_all_others(tmp_path, stale):
    """A model that is saved again as one file leaves the old shards in its folder. transformers reads the one file."""
    folder = write_model(tmp_path / "new")
    expected = tokens_of(folder)
    old = write_model(tmp_path / "old", seed=5)
    assert tokens_of(old) != expected
    split_in_shards(old, 2, seed=5)
    for path in old.glob("model*.safetensors*"):
        if stale == "index and shards" or (stale == "index" and path.suffix == ".json"):
            shutil.copy(path, folder)
    if stale in ("an other file", "a consolidated file"):
        shutil.copy(old / "model-00001-of-00002.safetensors", folder / f"{stale.split()[1]}.safetensors")
    assert tokens_of(folder) == expected


def test_what_stands_in_place_of_weights(tmp_path):
    folder = write_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n")
    with pytest.raises(ValueError, match="model.safetensors: a git-lfs pointer stands in place of the file: run `git lfs"):
        LLM(folder, device="cpu")
    weights.rename(folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model-00001-of-00002.bin but no model.safetensors: convert it"):
        LLM(folder, device="cpu")


def test_one_file_of_another_name(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    LLM(folder, device="cpu").close()
    (folder / "more.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(FileNotFoundError, match="several .safetensors files but neither model.safe.* nor model.safetensors.index.json"):
        LLM(folder, device="cpu")


def test_the_format_of_mistral_alone(tmp_path):
    """Beside other weights it is left alone, shards without an index included; alone it is refused by name."""
    folder = write_model(tmp_path, "mistral")
    expected = tokens_of(folder)
    (folder / "params.json").write_text('{"dim": 64}')
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes({"tok_embeddings.weight": np.zeros((97, 64), np.float32)}))
    assert tokens_of(folder) == expected
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert tokens_of(folder) == expected
    (folder / "weights.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"consolidated.safetensors but no model.safetensors: convert it"):
        LLM(folder, device="cpu")


def test_a_shard_without_its_index(tmp_path):
    folder = write_model(tmp_path)
    split_in_shards(folder, 2)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002.safetensors is one of several files, whose model.*"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "consolidated.00.pth", "weights.npz"])
def test_weights_of_another_format(tmp_path, name):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(FileNotFoundError, match=f"{name} but no model.safetensors: convert it"):
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


def test_old_files_hold_what_the_rotary_table_is_made_from(tmp_path):
    folder, old = write_model(tmp_path, "llama"), "model.layers.1.self_attn.rotary_emb.inv_freq"
    weights = random_weights(tiny_config("llama")) | {old: np.zeros(8, np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    LLM(folder, device="cpu").close()


def test_a_tied_model_may_hold_its_head_twice(tmp_path):
    folder = write_model(tmp_path, tie_word_embeddings=True)
    weights = random_weights(TINY | {"tie_word_embeddings": True})
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    LLM(folder, device="cpu").close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_is_folded_into_a_single_projection(tmp_path, dtype):
    """Families of others have one tensor for q, k and v: in float32 it is the file's own memory, which nobody writes."""
    name, norm = "model.layers.0.self_attn.q_proj", np.linspace(-2, 2, 64).astype(np.float32)
    checkpoint = Checkpoint(write_model(tmp_path), dtype, "cpu")
    linear = checkpoint.linear({name: 128}, 64)
    before = ops.asarray(linear.weights[0].data, "float32").numpy().copy()
    assert linear.fold(ops.asarray(norm, dtype)) is None
    folded = ops.asarray(linear.weights[0].data, "float32").numpy()
    np.testing.assert_allclose(folded, before * norm, rtol=2**-6 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_array_equal(ops.asarray(checkpoint.load(f"{name}.weight", 128, 64), "float32").numpy(), before)


def test_a_tied_model_with_another_head(tmp_path):
    """transformers does not tie them then, vLLM passes over the head: two truths."""
    folder = write_model(tmp_path, tie_word_embeddings=True)
    weights = random_weights(TINY)
    message = "tensor 'lm_head.weight' is not 'model.embed_tokens.weight' but config.json says tie_word_embeddings"
    for head in (weights["lm_head.weight"], weights["model.embed_tokens.weight"][:-1].copy()):
        (folder / "model.safetensors").write_bytes(safetensors_bytes(weights | {"lm_head.weight": head}))
        with pytest.raises(CheckpointError, match=message):
            LLM(folder, device="cpu")


@pytest.mark.parametrize("name", [5, None, ["model.safetensors"]])
def test_an_index_whose_files_are_no_names(tmp_path, name):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weight_map = dict.fromkeys(tensor_shapes(TINY), "a.safetensors") | {"model.norm.weight": name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index.json: tensor 'model.norm.weight' is in .*, which is no name of a file"):
        LLM(folder, device="cpu")


def test_an_index_names_nothing_outside_of_its_folder(tmp_path):
    write_model(tmp_path / "other")
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    for name in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors")):
        weight_map = dict.fromkeys(tensor_shapes(TINY), "a.safetensors") | {"model.norm.weight": name}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=f"names '{name}', which is not in the folder"):
            LLM(folder, device="cpu")


def test_an_index_of_files_in_a_folder(tmp_path):
    whole, split = write_model(tmp_path / "whole"), write_model(tmp_path / "split")
    split_in_shards(split, 2)
    index = split / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    (split / "parts").mkdir()
    for name in set(weight_map.values()):
        (split / name).rename(split / "parts" / name)
    index.write_text(json.dumps({"weight_map": {tensor: f"./parts/{name}" for tensor, name in weight_map.items()}}))
    assert tokens_of(split) == tokens_of(whole)


def test_an_index_that_names_the_wrong_file(tmp_path):
    folder = write_model(tmp_path)
    split_in_shards(folder, 2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    (other,) = set(weight_map.values()) - {weight_map["model.embed_tokens.weight"]}
    index.write_text(json.dumps({"weight_map": weight_map | {"model.embed_tokens.weight": other}}))
    with pytest.raises(CheckpointError, match=f"{other}: tensor 'model.embed_tokens.weight' is missing"):
        LLM(folder, device="cpu")


def test_mis_shaped_tensor(tmp_path):
    folder = write_model(tmp_path)
    weights = random_weights(TINY)
    weights["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 65), np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    message = r"safetensors: tensor 'model.layers.1.self_attn.k_proj.weight' has shape \[64, 65\] but .* \[64, 64\]"
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, device="cpu")


def test_quantised_dtype_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.zeros(4, np.uint8)}, {"a": "F8_E4M3"}))
    with pytest.raises(NotImplementedError, match="tensor 'a' has dtype F8_E4M3; supported are F32, F16, BF16"):
        SafetensorsFile(path).tensor("a")
