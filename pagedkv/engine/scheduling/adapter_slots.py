"""Which adapters are on the device: a slot each. A running sequence pins the slot of its adapter; of the others, the
one that was used least recently gives way."""

from __future__ import annotations

from collections import OrderedDict

from pagedkv.models.adapter import Adapter


class AdapterSlots:
    """Adapters count by their content. A slot is written by the step in which the first sequence with its adapter
    starts: steps run in order, so those before have read what it held."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, the one used least recently first
        self._num_running: dict[bytes, int] = {}  # sequences that pin it
        self._writes: list[tuple[int, Adapter]] = []

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a sequence with this adapter may start: it has a slot, or one is free or not pinned."""
        return adapter is None or adapter.digest in self._slots or len(self._num_running) < self.num_slots

    def slots_of(self, adapters: list[Adapter | None]) -> list[int] | None:
        """Of running sequences, -1 of those without an adapter. None: none has one."""
        if not any(adapters):
            return None
        return [-1 if adapter is None else self._slots[adapter.digest] for adapter in adapters]

    def pin(self, adapter: Adapter) -> None:
        """A sequence starts. There must be room."""
        if adapter.digest not in self._slots:
            slot = self._take_slot()
            self._slots[adapter.digest] = slot
            self._writes.append((slot, adapter))
        self._slots.move_to_end(adapter.digest)
        self._num_running[adapter.digest] = self._num_running.get(adapter.digest, 0) + 1

    def _take_slot(self) -> int:
        if len(self._slots) < self.num_slots:
            return len(self._slots)
        oldest = next(digest for digest in self._slots if digest not in self._num_running)
        return self._slots.pop(oldest)

    def unpin(self, adapter: Adapter) -> None:
        """It stops."""
        self._slots.move_to_end(adapter.digest)
        self._num_running[adapter.digest] -= 1
        if not self._num_running[adapter.digest]:
            del self._num_running[adapter.digest]

    def take_writes(self) -> list[tuple[int, Adapter]]:
        """Those to be done ahead of the step that is being planned."""
        writes, self._writes = self._writes, []
        return writes

    def clear(self) -> None:
        """After an error: what was to be written may not have been."""
        self._slots.clear()
        self._num_running.clear()
        self._writes = []
