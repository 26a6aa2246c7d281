"""Defects seen in other engines, each with the tests that keep it out of this one.

A defect that belongs to a topic is tested there; this file says where, and that the test still exists. What belongs to
none is tested here. Only one defect is missing: ranks of a multi-GPU engine that disagree on the pool size, and a
control buffer of fixed size between them. It needs several ranks, which this engine does not have.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, write_model

import pagedkv
from pagedkv import LLM, SamplingParams

DEFECTS = {
    "a prefix hit serves another prompt's KV, because only a page's own tokens are compared": [
        "test_defects.py::test_equal_pages_after_different_ones",
        "test_scheduler.py::test_random_traffic",
    ],
    "max_num_seqs bounds a step and not the running set; the tail starves": [
        "test_scheduler.py::test_max_num_seqs_bounds_the_running_set",
    ],
    "a request larger than the pool or the model's length kills the others": [
        "test_engine.py::test_bad_requests_fail_alone",
        "test_engine.py::test_a_request_larger_than_the_pool_fails_alone",
    ],
    "batch sizes between two buckets crash": ["test_engine.py::test_any_batch_size"],
    "lengths past max_model_len run off the rotary table": [
        "test_engine.py::test_a_prompt_to_the_very_end_of_the_model",
        "test_engine.py::test_bad_requests_fail_alone",
    ],
    "equal prompts in one step are all computed; the index loses the copy that still lives": [
        "test_scheduler.py::test_equal_prompts_of_one_step_are_computed_once",
        "test_defects.py::test_the_cache_keeps_what_a_twin_leaves",
    ],
    "max_tokens=0 never stops": ["test_engine_arguments.py::test_max_tokens_zero"],
    "an empty prompt crashes": ["test_engine.py::test_bad_requests_fail_alone"],
    "greedy is refused": ["test_qwen3.py::test_greedy_tokens"],
    "generate('text') iterates over characters": ["test_engine_arguments.py::test_a_string_is_one_prompt"],
    "unknown options are ignored": ["test_engine_arguments.py::test_unknown_options"],
    "a shorter list of sampling parameters drops prompts": [
        "test_engine_arguments.py::test_parameters_for_each_prompt",
    ],
    "a folder without weights gives uninitialised weights": [
        "test_weights.py::test_a_folder_without_weights",
        "test_weights.py::test_missing_tensor",
    ],
    "closing twice raises": ["test_engine.py::test_closing"],
    "two engines on a host collide": ["test_engine.py::test_two_engines_side_by_side"],
    "only one EOS id is known": [
        "test_engine.py::test_stops_at_every_eos_id",
        "test_weights.py::test_eos_ids_of_both_files",
    ],
    "rope_scaling is ignored": [
        "test_qwen3.py::test_logits_at_every_position",
        "test_qwen3.py::test_rotary_table",
        "test_weights.py::test_refused_config",
    ],
    "a norm changes its input": ["test_defects.py::test_a_norm_leaves_its_input_alone"],
    "preemption thrashes without a watermark": [
        "test_scheduler.py::test_the_watermark_keeps_room_to_grow",
        "test_scheduler.py::test_preemption_does_not_thrash",
    ],
    "a prompt is hashed again at every attempt": [
        "test_scheduler.py::test_a_prompt_is_not_hashed_again_at_every_attempt",
    ],
    "removing from the free list is O(n)": ["test_defects.py::test_freeing_does_not_depend_on_the_pool"],
    "chunks of a prompt consume random numbers": [
        "test_engine.py::test_a_seed_gives_the_same_tokens_whatever_surrounds_it",
    ],
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_has_its_test(defect):
    for pointer in DEFECTS[defect]:
        file, name = pointer.split("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parent / file).read_text(), re.M), f"{pointer} is gone"


def test_equal_pages_after_different_ones(tmp_path, device):
    """The second page of both prompts holds the same tokens, after different ones: its KV differs."""
    rng = np.random.default_rng(4)
    starts = rng.integers(VOCAB_SIZE, size=(2, 8)).tolist()
    common = rng.integers(VOCAB_SIZE, size=9).tolist()
    prompts = [start + common for start in starts] + [common + starts[0], common]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    folder = write_model(tmp_path)
    tokens = []
    for caching in (True, False):
        with LLM(folder, device=device, block_size=8, num_blocks=32, enable_prefix_caching=caching) as llm:
            tokens.append([llm.generate([p], params, use_tqdm=False)[0].token_ids for p in prompts * 2])
            assert (llm.manager.stats()["hit_tokens"] > 0) == caching
    assert tokens[0] == tokens[1]


def test_the_cache_keeps_what_a_twin_leaves():
    """Two sequences compute the same prompt; the pages of one are evicted, those of the other must stay findable."""
    manager = pagedkv.BlockManager(4, 4)
    prompt = list(range(8))
    for seq_id in (1, 2):
        assert manager.allocate(seq_id, prompt) == 0  # nothing is committed yet, so the second computes it again
    manager.commit(1, 8)
    manager.commit(2, 8)
    manager.free(1)
    manager.allocate(3, [50] * 8)  # evicts both pages of 1
    assert manager.match(prompt)[0] == 8
    manager.check()


def test_freeing_does_not_depend_on_the_pool():
    """The free list of a pool of a million pages; 200,000 frees with O(n) each would take minutes."""
    manager = pagedkv.BlockManager(1_000_000, 1)
    for seq_id in range(2):
        manager.allocate(seq_id, np.arange(100_000, dtype=np.int32) + 200_000 * seq_id)
    for _ in range(20):
        manager.free(0)
        manager.allocate(0, np.arange(100_000, dtype=np.int32))
    assert manager.num_free_blocks == 800_000


def test_a_norm_leaves_its_input_alone(rng, device):
    values = rng.standard_normal((3, 64)).astype(np.float32)
    given = np.ones(64, np.float32), values.copy(), values.copy()
    weight, x, residual = (pagedkv.asarray(each, device=device) for each in given)

    def on_the_host(tensor):
        return pagedkv.asarray(tensor, device="cpu").numpy()

    pagedkv.rms_norm(x, weight)
    np.testing.assert_array_equal(on_the_host(x), values)
    pagedkv.rms_norm(x, weight, residual=residual)
    np.testing.assert_array_equal(on_the_host(x), values)
    np.testing.assert_array_equal(on_the_host(residual), values + values)
