"""Engines with batch_invariant=True: the bits of a request's log probabilities, and so its tokens, are those of the request
alone, whatever else runs and however it was cut, cached, preempted or swapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import write_model
from lora_adapters import write_adapter
from quantized_checkpoints import FORMATS, write_quantised
from rank_engine import OPTIONS, SIZES, generate, traffic

from pagedkv import LLM
from pagedkv.engine import LoRARequest

ALONE = {"num_blocks": 200, "max_num_seqs": 1, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


def scored(rng, count: int) -> list:
    """Traffic of which every token has log probabilities. Half of the prompts begin as others do."""
    common = rng.integers(0, 97, 40).tolist()
    requests = []
    for prompt, params in traffic(rng, count):
        start = common[: rng.integers(0, 41)] if rng.random() < 0.5 else []
        prompt_logprobs = 1 if rng.random() < 0.3 else None
        requests.append((start + prompt, replace(params, logprobs=2, prompt_logprobs=prompt_logprobs)))
    return requests


def bits(outputs) -> list:
    """All that was computed of each request, exactly."""
    assert not [output.error for output in outputs if output.error]
    return [
        (output.prompt_logprobs, [(each.token_ids, each.logprobs) for each in output.outputs]) for output in outputs
    ]


def alone(folder, requests, **options) -> list:
    with LLM(folder, **OPTIONS | ALONE | options, batch_invariant=True) as llm:
        return [bits(generate(llm, [request]))[0] for request in requests]


def check(folder, rng, requests, schedules: int, behind: int = 0, **options) -> tuple[int, int]:
    """Several engines of small steps give each request what it gets alone: the first one has room for all that it has
    computed, the others preempt. Returns how many preemptions there were, and tokens from the cache."""
    expected, preemptions, cached = alone(folder, requests, **options), 0, 0
    for schedule in range(schedules):
        sizes = {
            "num_blocks": int(rng.integers(28, 36)) if schedule else 1000, "swap_space": schedule % 2 << 20,
            "max_num_batched_tokens": int(rng.integers(8, 60)), "max_num_seqs": int(rng.integers(6, 9)),
        }  # fmt: skip
        with LLM(folder, **OPTIONS | sizes | options, batch_invariant=True) as llm:
            llm._runner.num_behind = behind
            order = rng.permutation(len(requests))
            order = [*order, *order[::-1]]  # the second time some prompts are in the cache
            outputs = generate(llm, [requests[i] for i in order])
            preemptions += llm.stats().num_preemptions
        cached += sum(output.num_cached_tokens for output in outputs)
        for i, got in zip(order, bits(outputs), strict=True):
            assert got == expected[i], f"schedule {schedule} {sizes}, request {i}: {requests[i]}"
    return preemptions, cached


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_schedules(folder, rng, device, dtype):
    behind = 1 if device != "cpu" else int(rng.integers(0, 2))
    preemptions, cached = check(folder, rng, scored(rng, 18), 3, behind, device=device, dtype=dtype)
    assert preemptions and cached


def test_an_fp8_cache(folder, rng, device):
    check(folder, rng, scored(rng, 12), 2, device=device, kv_cache_dtype="fp8")


def test_windows(tmp_path, rng, device):
    folder = write_model(tmp_path, family="mistral", sliding_window=9, **SIZES)
    check(folder, rng, scored(rng, 12), 2, device=device)


def test_experts(tmp_path, rng, device):
    check(write_model(tmp_path, family="qwen3_moe", **SIZES), rng, scored(rng, 12), 2, device=device)


@pytest.mark.parametrize("name", ["fp8, small blocks", "awq"])
def test_quantised_weights(tmp_path, rng, device, name):
    write_quantised(tmp_path, FORMATS[name], **SIZES)
    check(tmp_path, rng, scored(rng, 12), 2, device=device)


def test_two_ranks(folder, rng):
    check(folder, rng, scored(rng, 12), 2, tensor_parallel_size=2)


def test_adapters(tmp_path, rng, device):
    """Requests with two adapters and without, beside each other and alone."""
    write_model(tmp_path / "base")
    adapters = [None]
    for number in (1, 2):
        write_adapter(tmp_path / str(number), seed=number)
        adapters.append(LoRARequest(str(number), number, tmp_path / str(number)))
    requests = [(prompt, params) for prompt, params in scored(rng, 12) if params.mask is None]
    wanted = [adapters[int(i)] for i in rng.integers(0, 3, len(requests))]
    found, options = [], OPTIONS | {"device": device, "enable_lora": True, "max_loras": 2, "batch_invariant": True}
    for sizes, together in ((ALONE, 1), ({"num_blocks": 30, "max_num_batched_tokens": 32}, len(requests))):
        with LLM(tmp_path / "base", **options | sizes) as llm:
            outputs = []
            for i in range(0, len(requests), together):
                prompts, params = zip(*requests[i : i + together], strict=True)
                given = {"lora_request": wanted[i : i + together], "use_tqdm": False}
                outputs += llm.generate(list(prompts), list(params), **given)
            found.append(bits(outputs))
    assert found[0] == found[1]


def test_a_saved_cache_of_another_engine_is_refused(folder, tmp_path):
    """What was computed in any company. An engine that promises nothing takes what one has saved that does."""
    options = OPTIONS | {"num_blocks": 60}
    for is_invariant in (False, True):
        with LLM(folder, **options, batch_invariant=is_invariant) as llm:
            llm.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], use_tqdm=False)
            llm.save_cache(tmp_path / str(is_invariant))
    with LLM(folder, **options, batch_invariant=True) as llm:
        with pytest.raises(ValueError, match="batch_invariant"):
            llm.load_cache(tmp_path / "False")
        llm.load_cache(tmp_path / "True")
    with LLM(folder, **options) as llm:
        llm.load_cache(tmp_path / "True")
