"""Which family of models a folder is of, by the model_type of config.json. A family's module is imported on use.

Other distributions bring families under the entry point group `pagedkv.models`: the name is a model_type, the object a
spec.Family. Those that are listed here count first.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from .files import read_json
from .quantized import asked_for
from .spec import Family, Model, Spec

FAMILIES = {  # by model_type
    "llama": ".llama",
    "mistral": ".mistral",
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
    "qwen3_moe": ".qwen3_moe",
}
GROUP = "pagedkv.models"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def find_family(model_type: Any) -> Family:
    if model_type in FAMILIES:
        return cast(Family, import_module(FAMILIES[model_type], __package__).FAMILY)
    others = entry_points(group=GROUP)
    found = [each for each in others if each.name == model_type]
    if len({each.value for each in found}) > 1:
        both = " and ".join(sorted(each.value for each in found))
        raise ValueError(f"model_type is {model_type!r}, for which two families are installed: {both}")
    if not found:
        known = ", ".join(sorted({*FAMILIES, *others.names}))
        raise NotImplementedError(f"model_type is {model_type!r}; supported are {known}")
    family = found[0].load()
    if not isinstance(family, Family):
        raise TypeError(f"the entry point {found[0].value} of {GROUP} is {family!r} but must be a Family")
    return family


def read_spec(folder: Path, quantization: str | None = None) -> Spec:
    """Of config.json, and the EOS ids of generation_config.json where there is one; quantization: an option."""
    path = folder / "config.json"
    for name in ADAPTERS:
        if (folder / name).exists():
            raise NotImplementedError(
                f"{folder / name}: adapters (LoRA) are not read from a model's folder: move it to a folder of its own, "
                "for LoRARequest, or merge it into the weights"
            )
    if not path.exists():
        raise FileNotFoundError(f"{folder}: no config.json: not the folder of a model")
    raw, generation = read_json(path), read_json(folder / "generation_config.json", missing={})
    try:
        spec = find_family(raw.get("model_type")).parse(raw, generation)
        return replace(spec, quantization=asked_for(quantization, spec.quantization))
    except KeyError as error:
        raise ValueError(f"{path}: no {error.args[0]!r}") from None
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:  # an entry of another type than the code above reads
        raise ValueError(f"{path}: {error}") from None


def load_model(spec: Spec, source: Any, max_model_len: int) -> Model:
    """With the tensors of a linear.TensorSource, for positions below max_model_len."""
    return find_family(spec.family).model(spec, source, max_model_len)


def buffer_bytes(spec: Spec, dtype: str) -> int:
    """Of what a step keeps of each of its tokens while it is computed."""
    return find_family(spec.family).model.buffer_bytes(spec, dtype)
