"""The adapters that requests name: read, checked against the model, and kept as long as their files stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from pagedkv.models.adapter import Adapter, Stamps, folder_of, read_adapter, stamps

from ..lora_request import LoRARequest


class AdapterStore:
    """For any thread. It keeps as many adapters in host memory as the device has slots, those that were asked for last.

    Args:
        shapes: see spec.AdaptedModel.adapter_shapes
        dtype: of the matrices
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], dtype: str, *, max_loras: int, max_rank: int) -> None:
        self._shapes, self._dtype, self._max_loras, self._max_rank = shapes, dtype, max_loras, max_rank
        # Replaced as a whole: two threads at once may read an adapter twice, and nothing worse.
        self._kept: tuple[tuple[Path, Stamps, Adapter], ...] = ()

    def find(self, request: LoRARequest) -> Adapter:
        """The error of an adapter that cannot be used names it."""
        try:
            return self._find(folder_of(request.lora_path))
        except (OSError, ValueError, NotImplementedError) as error:
            kind = next(kind for kind in (OSError, NotImplementedError, ValueError) if isinstance(error, kind))
            raise kind(f"adapter {request.lora_name!r}: {error}") from error

    def _find(self, folder: Path) -> Adapter:
        now = stamps(folder)
        kept = [each for each in self._kept if each[0] != folder]
        found = next((each for each in self._kept if each[:2] == (folder, now)), None)
        if found is None:
            found = folder, now, read_adapter(folder, self._shapes, self._max_rank, self._dtype)
            if stamps(folder) != now:
                raise ValueError(f"{folder}: the files changed while they were read")
        self._kept = (found, *kept)[: self._max_loras]
        return found[2]


def check_lora(value: Any, store: AdapterStore | None) -> None:
    """Raises for what is no LoRARequest or None, and where the engine takes none."""
    if value is not None and not isinstance(value, LoRARequest):
        raise TypeError(f"lora_request is {value!r} but must be a LoRARequest")
    if value is not None and store is None:
        raise ValueError(f"lora_request is {value!r} but the engine has no enable_lora=True")


def lora_of_each(given: LoRARequest | SequenceOf[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, SequenceOf) or isinstance(given, str):
        raise TypeError(f"lora_request is {given!r} but must be a LoRARequest, or a list of one for each prompt")
    if len(given) != count:
        raise ValueError(f"{len(given)} lora_requests for {count} prompts")
    return list(given)
