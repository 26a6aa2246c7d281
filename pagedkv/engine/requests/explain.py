"""What an unfinished request is doing or, if it waits, why."""

from __future__ import annotations

from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence


def explain(scheduler: Scheduler, sequences: list[Sequence]) -> str:
    """One line for each answer of a request, of which some may have ended."""
    lines = []
    for seq in sequences:
        line = _state(scheduler, seq)
        if seq.num_preemptions:
            line += f"; preempted {seq.num_preemptions} times, the last time because {seq.preempted_for}"
        lines.append(f"answer {seq.index}: {line}")
    return "\n".join(lines)


def _state(scheduler: Scheduler, seq: Sequence) -> str:
    if seq.finish_reason is not None:
        return f"ended ({seq.finish_reason}) with {len(seq.new_tokens)} tokens"
    if seq.num_in_pages:
        if seq.num_computed < seq.num_prompt_tokens:
            return f"runs: {seq.num_computed} of {seq.num_prompt_tokens} prompt tokens are computed"
        return f"runs: {len(seq.new_tokens)} of at most {seq.max_tokens} tokens are sampled"
    if any(seq in parent.siblings for parent in seq.request.sequences):
        return "waits until the prompt is computed, which it shares with answer 0"
    if seq.num_tokens == seq.max_num_tokens:
        return "ends: its last token is being sampled"
    before = len(_waiting_before(scheduler, seq))
    return f"waits behind {before} others: {_obstacle(scheduler, seq)}"


def _waiting_before(scheduler: Scheduler, seq: Sequence) -> list[Sequence]:
    waiting = list(scheduler.queues.waiting())
    return waiting[: waiting.index(seq)]


def _obstacle(scheduler: Scheduler, seq: Sequence) -> str:
    manager, adapters = scheduler.manager, scheduler.queues.adapters
    if len(scheduler.queues.running) >= scheduler.max_num_seqs:
        return f"all {scheduler.max_num_seqs} places (max_num_seqs) are taken"
    if seq.retry_step > scheduler.step_number:
        return "another request computes the beginning of its prompt, which it will find in the cache"
    not_after = [each.adapter for each in (*_waiting_before(scheduler, seq), seq) if each.adapter is not None]
    if seq.adapter is not None and not all(map(adapters.has_room, not_after)):
        return (
            "its adapter, or that of one before it, finds no slot: sequences that run have other adapters in all "
            f"{adapters.num_slots} (max_loras)"
        )
    if scheduler.queues.refused is seq:
        num_pages = -(-seq.num_tokens // manager.block_size)
        return (
            f"it needs up to {num_pages} pages, of which {manager.num_free_blocks} are free or cached, and "
            f"{len(scheduler.queues.running)} must stay free for the sequences that run"
        )
    return f"the next step starts what its {scheduler.max_num_batched_tokens} tokens (max_num_batched_tokens) hold"
