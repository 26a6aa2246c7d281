"""The weights of a rank's runner while it runs: given back to the device and taken again, and written anew."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from pagedkv import Tensor, ops
from pagedkv.models.nccl import BroadcastTensor, WeightGroup
from pagedkv.models.places import Places
from pagedkv.models.update import Gathered, Packed, expect_all, plan_update, read_files, unpacked
from pagedkv.models.upload import Upload
from pagedkv.ops import Communicator


class RunnerWeights:
    """places: where they lie; stream: of the steps; comm: of the ranks, if any. All calls come between two steps.

    What may fail on one rank alone is tried: an error there would end all ranks.
    """

    def __init__(self, places: Places, device: str, stream: Any, comm: Communicator | None) -> None:
        self._places, self._device, self._stream, self._comm = places, device, stream, comm
        self._group: WeightGroup | None = None  # that sends new weights
        self.received: dict[str, Tensor] = {}  # by it, and not yet written
        self._kept: Tensor | None = None  # their bytes, on the host
        self._are_here = True
        self.gathered: Gathered | None = None  # of an update in several calls, on the first rank

    @property
    def num_missing(self) -> int:
        """Of tensors that have no content: see give_back()."""
        return sum(len(place.names) for place in self._places.missing)

    def give_back(self, keeps: bool) -> None:
        """Gives their memory back to the device. keeps: the host keeps their content (that of the CPU is there anyway);
        else they are missing until update() has written all of them. MemoryError, and no change: the host has too
        little memory."""
        memory = self._places.memory
        if not keeps:
            self._kept = None
            self._places.drop()
        elif self._device == "cpu" or not self._are_here:
            return
        else:
            kept = ops.empty(len(memory.content), "uint8")
            with closing(Upload(self._device)) as upload:
                upload.fetch(kept, memory.content)
            memory.give_back()
            self._kept = kept
        self._are_here = False

    def try_to_take(self) -> bool:
        """False, and no change: the device has too little memory."""
        if self._are_here:
            return True
        memory = self._places.memory
        try:
            memory.take()
        except MemoryError:
            return False
        self._are_here = True
        if self._kept is not None:
            with closing(Upload(self._device)) as upload:
                upload.copy(memory.content, self._kept)
            self._kept = None
        return True

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of an update in several calls: those that can be written now."""
        assert self.gathered is not None, "it has begun"
        with self._stream:
            return self.gathered.add(self._places, tensors)

    # --- a group that sends new ones

    def try_to_join(self, unique_id: bytes, world_size: int, rank_offset: int, timeout: float) -> str | None:
        """The problem, if there is one."""
        self.leave()
        rank = rank_offset + (0 if self._comm is None else self._comm.rank)
        try:
            self._group = WeightGroup(unique_id, world_size, rank, self._device, timeout=timeout)
        except (ImportError, RuntimeError, TimeoutError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self.received = None, {}

    def try_to_receive(self, tensors: Mapping[str, BroadcastTensor]) -> str | None:
        """The problem, if there is one."""
        assert self._group is not None, "it has joined"
        try:
            self.received = {name: tensor.empty(self._device) for name, tensor in tensors.items()}
            self._group.broadcast(self.received.values())
        except (RuntimeError, TimeoutError, MemoryError) as error:
            self.received = {}
            return f"{type(error).__name__}: {error}"
        return None

    def drop_received(self) -> None:
        self.received = {}

    @property
    def has_group(self) -> bool:
        return self._group is not None

    # --- new ones

    def expect_all(self, tensors: Mapping[str, Tensor]) -> None:
        expect_all(self._places, tensors)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises where update() would."""
        plan_update(self._places, tensors)

    def update(self, given: str | Packed | Mapping[str, Tensor] | None) -> None:
        """given: the path of a checkpoint, tensors of another process, or tensors; None: those that were received."""
        tensors: Mapping[str, Tensor]
        if given is None:
            tensors = self.received
        elif isinstance(given, str):
            tensors = read_files(given)
        else:
            tensors = unpacked(given) if isinstance(given, list) else given
        plan = plan_update(self._places, tensors)
        self._places.missing.update(plan)  # should anything fail now, they have no content
        with self._stream, closing(Upload(self._device)) as upload:  # which waits for the device in the end
            for place, write in plan.items():
                if self._comm is not None:
                    self._comm.check()  # to go on may take long, and be in vain
                write(upload)
                self._places.missing.discard(place)
