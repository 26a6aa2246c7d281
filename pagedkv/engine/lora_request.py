"""LoRARequest: which adapter a request is computed with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pagedkv.checks import check_int


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of low rank by vLLM's names, for engines with enable_lora.

    Args:
        lora_name: what messages call it
        lora_int_id: a number of 1 or more. vLLM knows adapters by it; here the content of the files counts
        lora_path: folder with adapter_config.json and adapter_model.safetensors. They are read when a request names
            them, and again when they have changed
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise TypeError(f"lora_name is {self.lora_name!r} but must be a name")
        check_int("lora_int_id", self.lora_int_id, 1)
        if not isinstance(self.lora_path, (str, os.PathLike)):
            raise TypeError(f"lora_path is {self.lora_path!r} but must be a folder")
