"""Families of models that other distributions bring, and when a family's module is imported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_model

from pagedkv import LLM, SamplingParams
from pagedkv.models import registry

MODULE = '''
"""As Llama, with names of its own."""
from pagedkv.models.decoder import Decoder, Layer
from pagedkv.models.layers import Attention, GatedMLP
from pagedkv.models.llama import parse
from pagedkv.models.spec import Family


class Mine(Decoder):
    def make_layer(self, index, source, cos_sin):
        name, kept = f"model.blocks.{index}", self.config.kv_layers[index]
        attention = Attention(self.config, source, cos_sin, kept, name=f"{name}.mixer", norm=f"{name}.norm_1")
        return Layer(attention, GatedMLP(self.config, source, name=f"{name}.ffn", norm=f"{name}.norm_2"))


FAMILY = Family(parse, Mine)
NOTHING = "no family"
'''
NAMES = {"layers": "blocks", "self_attn": "mixer", "mlp": "ffn", "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}


def install(folder: Path, name: str, entry: str, module: str = "") -> None:
    """A distribution, as pip would leave it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{entry}\n")
    if module:
        (folder / f"{module}.py").write_text(MODULE)
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    sys.modules.pop("my_family", None)


def write_mine(folder: Path) -> Path:
    """Llama's weights under other names."""
    write_model(folder, "llama", model_type="mine", architectures=["MineForCausalLM"])
    weights = random_weights(tiny_config("llama"))
    renamed = {".".join(NAMES.get(part, part) for part in name.split(".")): each for name, each in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(renamed))
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]  # Llama's parse() would refuse it
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answer(folder: Path) -> list[int]:
    with LLM(folder, device="cpu", block_size=4, num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)[0].token_ids


def test_a_family_of_another_distribution(tmp_path, site):
    folder = write_mine(tmp_path / "mine")
    with pytest.raises(NotImplementedError, match=r"model_type is 'mine'; supported are llama, mistral, qwen2, qwen3, qwen3_moe$"):
        LLM(folder, device="cpu")
    install(site, "my-models", "mine = my_family:FAMILY", "my_family")
    assert answer(folder) == answer(write_model(tmp_path / "llama", "llama"))
    with pytest.raises(NotImplementedError, match=r"model_type is 'yours'; supported are llama, mine, mistral, qwen2, qwen3"):
        registry.find_family("yours")


def test_what_is_wrong_with_a_distribution_is_named(tmp_path, site):
    folder = write_mine(tmp_path / "mine")
    install(site, "my-models", "mine = my_family:NOTHING", "my_family")
    with pytest.raises(ValueError, match="config.json: the entry point my_family:NOTHING of pagedkv.models is 'no family' but must"):
        LLM(folder, device="cpu")
    install(site, "your-models", "mine = your_family:FAMILY")
    with pytest.raises(ValueError, match="'mine', for which two families are installed: my_family:NOTHING and your_family:FAMILY"):
        LLM(folder, device="cpu")


def test_ours_count_first(site):
    install(site, "my-models", "llama = my_family:FAMILY", "my_family")
    assert registry.find_family("llama").model.__name__ == "Decoder" and "my_family" not in sys.modules


@pytest.mark.parametrize("kind", [None, 3, "mixtral", "", "pagedkv.models.llama"])
def test_what_is_no_family(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(NotImplementedError, match="config.json: model_type is"):
        registry.read_spec(tmp_path)


def test_a_family_is_imported_on_use(tmp_path, environment):
    folder = write_model(tmp_path, "llama")
    code = f"""
import sys
from pagedkv import LLM, SamplingParams
from pagedkv.models.registry import FAMILIES
LLM
there = lambda: [kind for kind in FAMILIES if "pagedkv.models." + kind in sys.modules]
assert not there()
with LLM({str(folder)!r}, device="cpu", num_blocks=8) as llm:
    assert there() == ["llama"] and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
