"""The cards of the release's architectures: what NVIDIA's programming guide says of each, in a table of the tests' own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    name: str
    num_sms: int
    compute_capability: int
    smem_per_cta: int  # bytes that a CTA may have, declared and asked for
    smem_per_sm: int  # bytes, of which CUDA keeps 1 KB for each CTA

    def __str__(self) -> str:
        return self.name

    @property
    def arch(self) -> str:
        return f"{self.compute_capability // 10}.{self.compute_capability % 10}"


CARDS = [
    Card("A100", 108, 80, 163 << 10, 164 << 10),
    Card("RTX_3090", 82, 86, 99 << 10, 100 << 10),
    Card("RTX_4090", 128, 89, 99 << 10, 100 << 10),
    Card("H200", 132, 90, 227 << 10, 228 << 10),
    Card("B200", 148, 100, 227 << 10, 228 << 10),
    Card("RTX_5090", 170, 120, 99 << 10, 100 << 10),
]
