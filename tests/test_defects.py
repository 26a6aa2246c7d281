"""Defects seen in other engines, each with the tests that keep it out of this one.

A defect that belongs to a topic is tested there; this file says where, and that the test still exists. What belongs to
none is tested here. Defects of what this engine does not have are named in NOT_HERE: with the word that would be in the
sources if it had, so that who adds it finds them.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, write_model

import pagedkv
from pagedkv import LLM, SamplingParams, ops

TESTS = Path(__file__).parent
DEFECTS = {
    "a prefix hit serves another prompt's KV, because only a page's own tokens are compared": [
        "test_defects.py::test_equal_pages_after_different_ones",
        "test_scheduler.py::test_random_traffic",
    ],
    "max_num_seqs bounds a step and not the running set; the tail starves": [
        "test_scheduler.py::test_max_num_seqs_bounds_the_running_set",
    ],
    "a request larger than the pool or the model's length kills the others": [
        "test_engine_errors.py::test_bad_requests_fail_alone",
        "test_engine_errors.py::test_a_request_larger_than_the_pool_fails_alone",
    ],
    "batch sizes between two buckets crash": ["test_engine.py::test_any_batch_size"],
    "lengths past max_model_len run off the rotary table": [
        "test_engine_errors.py::test_a_prompt_to_the_very_end_of_the_model",
        "test_engine_errors.py::test_bad_requests_fail_alone",
    ],
    "equal prompts in one step are all computed; the index loses the copy that still lives": [
        "test_scheduler.py::test_equal_prompts_of_one_step_are_computed_once",
        "test_defects.py::test_the_cache_keeps_what_a_twin_leaves",
    ],
    "max_tokens=0 never stops": ["test_engine_arguments.py::test_max_tokens_zero"],
    "an empty prompt crashes": ["test_engine_errors.py::test_bad_requests_fail_alone"],
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
    "closing twice raises": ["test_engine_life.py::test_closing"],
    "two engines on a host collide": ["test_engine_life.py::test_two_engines_side_by_side"],
    "only one EOS id is known": [
        "test_engine.py::test_stops_at_every_eos_id",
        "test_model_config.py::test_eos_ids_of_both_files",
    ],
    "rope_scaling is ignored": [
        "test_qwen3.py::test_logits_at_every_position",
        "test_qwen3.py::test_rotary_table",
        "test_model_config.py::test_refused_config",
    ],
    "a norm changes its input": ["test_defects.py::test_a_norm_leaves_its_input_alone"],
    "preemption thrashes without a watermark": [
        "test_scheduler_full_pool.py::test_the_watermark_keeps_room_to_grow",
        "test_scheduler_full_pool.py::test_preemption_does_not_thrash",
    ],
    "a prompt is hashed again at every attempt": [
        "test_scheduler.py::test_a_prompt_is_not_hashed_again_at_every_attempt",
    ],
    "removing from the free list is O(n)": ["test_defects.py::test_freeing_does_not_depend_on_the_pool"],
    "chunks of a prompt consume random numbers": [
        "test_engine.py::test_a_seed_gives_the_same_tokens_whatever_surrounds_it",
    ],
    # --- steps that are on their way, and memory that they use
    "pages of a request that ended or was preempted are given away while a step that uses them runs": [
        "test_delayed_device.py::test_no_step_reads_a_page_that_is_given_away",
        "test_delayed_device.py::test_mistakes_are_found",
    ],
    "pages that are freed late make preemption evict everybody": [
        "test_delayed_device.py::test_no_step_reads_a_page_that_is_given_away",
        "test_scheduler_full_pool.py::test_preemption_does_not_thrash",
    ],
    "a pinned table is overwritten while its upload is pending": [
        "test_delayed_device.py::test_mistakes_are_found",
        "test_delayed_device.py::test_a_launch_that_was_interrupted_anywhere",
    ],
    "pages are swapped out after they were given away, or before their KV is written": [
        "test_delayed_device.py::test_mistakes_are_found",
        "test_blocks.py::test_swap_with_pinned_memory_waits_for_nothing",
    ],
    "pages that nobody has written yet, or ever will, are served as a prefix": [
        "test_delayed_device.py::test_mistakes_are_found",
        "test_block_manager.py::test_pending_pages_are_found_by_match_only_and_vanish_with_their_sequence",
    ],
    "a busy machine changes the tokens": ["test_busy_neighbour.py::test_the_same_tokens_beside_busy_processes"],
    # --- the allocator
    "users that race corrupt the free list": [
        "test_block_manager_object.py::test_calls_from_many_threads_are_atomic",
        "test_threads.py::test_one_manager_for_several_threads",
    ],
    "two ways release the same page; a stale one frees it when it is somebody else's; pages leak one by one": [
        "test_block_manager_state.py::TestBlockManager",
        "test_block_manager_errors.py::test_wrong_use_says_what_is_wrong_and_changes_nothing",
        "test_page_sizes.py::test_the_allocator_against_its_model",
        "test_delayed_device.py::test_no_step_reads_a_page_that_is_given_away",
    ],
    "salts, tokens or ids are alike when written as strings": [
        "test_key_collisions.py::test_no_salt_finds_the_pages_of_another",
        "test_key_collisions.py::test_every_id_is_itself",
    ],
    "a hash collision serves the wrong page": [
        "test_block_manager.py::test_colliding_prompts_never_share",
        "test_key_collisions.py::test_no_salt_finds_the_pages_of_another",
    ],
    "hits of pages that are evicted already": [
        "test_key_collisions.py::test_salts_that_come_and_go_against_the_model",
        "test_block_manager_state.py::TestBlockManager",
    ],
    "a page that others share is written (no copy)": [
        "test_page_sizes.py::test_two_write_behind_a_page_that_they_share",
        "test_delayed_device.py::test_mistakes_are_found",
    ],
    "the time that a prompt takes tells what others asked": ["test_block_manager.py::test_salts_separate_tenants"],
    "tokens differ with the cache off, or on its hits alone, or in a full pool of a narrow dtype": [
        "test_engine.py::test_a_seed_gives_the_same_tokens_whatever_surrounds_it",
        "test_engine.py::test_an_fp8_cache_is_swapped_and_shared_as_any_other",
        "test_page_sizes.py::test_the_engine_gives_the_same_tokens",
    ],
    "ranks disagree on the size of the pool, or share a control buffer of fixed size": [
        "test_ranks.py::test_the_pool_is_resized_on_all_ranks",
        "test_ring.py::test_calls_of_any_size",
        "test_ring.py::test_rows_in_pieces",
    ],
    "a rank dies or hangs, and the others wait for ever, or processes and shared memory stay": [
        "test_rank_failures.py::test_another_rank_in_a_step",
        "test_rank_failures.py::test_the_first_rank_is_killed",
    ],
    "ranks need a port or a name, or import the user's script again": [
        "test_ranks.py::test_two_engines_from_threads",
        "test_ranks.py::test_starts_without_a_guard",
    ],
    # --- graphs and kernels
    "padding of a graph overwrites the last slot, walks past an array, or reads what was never written": [
        "test_padded_graph.py::test_every_batch_size_by_the_step_of_the_largest",
        "test_engine_cuda.py::test_any_batch_size",
    ],
    "a graph keeps the slots, or the plan, of its capture, or takes pages for slots": [
        "test_padded_graph.py::test_every_batch_size_by_the_step_of_the_largest",
        "test_cuda_limits.py::test_a_graph_follows_lengths_and_tables",
        "test_attention_cuda.py::test_a_plan_in_memory_that_steps_share",
    ],
    "NaN in a row that nobody owns reaches the output, or parts of the keys that are none": [
        "test_attention.py::test_case",
        "test_attention_cuda.py::test_decode_of_any_batch",
        "test_qkv_attention.py::test_bits",
    ],
    "pages of more than 128 tokens are silently wrong": [
        "test_attention.py::test_case",
        "test_page_sizes.py::test_the_engine_gives_the_same_tokens",
    ],
    "tables are looked at by the host, which breaks graphs, or -1 in them is refused": [
        "test_cuda_limits.py::test_bad_ids_are_masked_and_named",
        "test_padded_graph.py::test_every_batch_size_by_the_step_of_the_largest",
    ],
    "a tensor of another shape is cut to fit": ["test_weights.py::test_mis_shaped_tensor"],
    "an adapter is missing from the key of what is kept elsewhere": [
        "test_lora_engine.py::test_prefixes_are_shared_by_content",
        "test_lora_engine.py::test_the_same_name_with_other_weights",
    ],
    "the page before the last is dropped where tokens are guessed ahead": [
        "test_speculation.py::test_no_page_of_a_wrong_guess_is_found",
    ],
}

NOT_HERE = {  # defects of what there is none of, and how the sources would call it
    "a lower tier keeps the KV of a page that was given to another": "tier|offload(?!_to_disk)",  # a host page is one sequence's; that is a record of GPTQ
    "a short hash of an image is a part of the key": "pixel_values|multimodal",  # tokens are compared, and only tokens
    "sizes in a GGUF file are believed": "gguf(?!\")",  # but for the name of what is refused; of safetensors: test_safetensors_format.py
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_has_its_test(defect):
    for pointer in DEFECTS[defect]:
        file, name = pointer.split("::")
        assert re.search(rf"^(def {name}\(|{name} = )", (TESTS / file).read_text(), re.M), f"{pointer} is gone"


@pytest.mark.parametrize("defect", NOT_HERE)
def test_what_is_not_here_is_not_here(defect):
    """Who adds it tests for the defect that comes with it, and moves the entry to DEFECTS."""
    folders = ("pagedkv/engine", "pagedkv/models", "csrc")  # others name what they refuse
    sources = [path for folder in folders for path in (TESTS.parent / folder).rglob("*.*")]
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".c", ".h", ".cu", ".cuh")]
    assert len(texts) > 50 and not any(re.search(rf"\b({NOT_HERE[defect]})", text, re.I) for text in texts)


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

    ops.rms_norm(x, weight)
    np.testing.assert_array_equal(on_the_host(x), values)
    ops.rms_norm(x, weight, residual=residual)
    np.testing.assert_array_equal(on_the_host(x), values)
    np.testing.assert_array_equal(on_the_host(residual), values + values)
