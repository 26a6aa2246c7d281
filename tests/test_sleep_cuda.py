"""Sleep and new weights on a GPU: memory goes and comes, graphs stay, and tensors of another framework are read there."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_model
from oracle import rounded

from pagedkv import LLM, SamplingParams, ops
from pagedkv.engine import IpcTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ops.build_info()["cuda_problem"] is not None, reason=str(ops.build_info()["cuda_problem"])
    ),
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], list(range(20, 50))]
POOL = {"device": "cuda", "block_size": 4, "max_num_seqs": 8, "num_blocks": 200}


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ops.check_errors()
    assert not [output.error for output in outputs if output.error]
    return [output.token_ids for output in outputs]


def used() -> int:
    free, total = ops.memory_info("cuda:0")
    return total - free


@pytest.mark.parametrize("given", ["arrays", "torch", "torch, of another dtype", "path"])
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "qwen3_moe", "fp8"])
def test_new_weights(tmp_path, case, given, torch):
    """As a new engine's, by the graphs that were captured with the old ones."""
    family, options = ("qwen3", {"quantization": "fp8"}) if case == "fp8" else (case, {})
    old, new = (write_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    options = POOL | {"dtype": "bfloat16"} | options
    weights = random_weights(tiny_config(family), 1)
    if given == "torch":  # what is quantised is rounded to bfloat16 before
        weights = {name: rounded(array, "bfloat16").astype(np.float32) for name, array in weights.items()}
        (new / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with LLM(new, **options) as llm:
        expected = tokens(llm)
    if given.startswith("torch"):
        dtype = torch.float32 if "another" in given else torch.bfloat16
        weights = {name: torch.nn.Parameter(torch.from_numpy(array).to("cuda", dtype)) for name, array in weights.items()}
    with LLM(old, **options) as llm:
        before = tokens(llm)
        graphs = dict(llm._runner.graphs._graphs)
        assert llm.update_weights(new if given == "path" else weights) == 1
        if given.startswith("torch"):
            for tensor in weights.values():
                tensor.data.zero_()  # they may be changed after the call
        assert tokens(llm) == expected != before and llm._runner.graphs._graphs == graphs
        llm.update_weights(old)
        assert tokens(llm) == before


TRAINER = """
import sys, torch
from checkpoints import random_weights, tiny_config
weights = {name: torch.from_numpy(array).cuda() for name, array in random_weights(tiny_config(), 1).items()}
weights["lm_head.weight"] = torch.stack([weights["lm_head.weight"]] * 2)[1]  # with an offset in its storage
torch.cuda.synchronize()
for name, tensor in weights.items():
    _, handle, _, offset, *_ = tensor.untyped_storage()._share_cuda_()
    offset += tensor.storage_offset() * tensor.itemsize
    print(name, handle.hex(), offset, *tensor.shape)
print("ready", flush=True)
sys.stdin.read()
"""


def test_from_another_process(tmp_path, torch, environment):
    """By CUDA IPC, twice: memory that was opened before is opened again."""
    old, new = (write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    with LLM(new, **POOL) as llm:
        expected = tokens(llm)
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        given = {}
        for line in trainer.stdout:
            if line == "ready\n":
                break
            name, handle, offset, *shape = line.split()
            given[name] = IpcTensor(bytes.fromhex(handle), tuple(map(int, shape)), "float32", int(offset))
        with LLM(old, **POOL) as llm:
            before = tokens(llm)
            for _ in range(2):
                llm.update_weights(given)
                assert tokens(llm) == expected != before
                llm.update_weights(old)
            with pytest.raises(ValueError, match="handle: has 63 bytes but must have 64"):
                llm.update_weights({"lm_head.weight": dataclasses.replace(given["lm_head.weight"], handle=bytes(63))})
            with pytest.raises(ValueError, match="dtype is 'int7' but must be one of"):
                llm.update_weights({"lm_head.weight": dataclasses.replace(given["lm_head.weight"], dtype="int7")})
            assert tokens(llm) == before
        trainer.communicate()


def test_updates_while_streams_run(tmp_path, torch):
    """Back and forth between two checkpoints in the middle of answers; what follows is right each time."""
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    on_gpu = [
        {name: torch.from_numpy(array).cuda() for name, array in random_weights(tiny_config(), seed).items()} for seed in (0, 1)
    ]
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    right = []
    for folder in folders:
        with LLM(folder, **POOL) as llm:
            right.append(tokens(llm))
    with LLM(folders[0], **POOL) as llm:
        for turn in range(1, 9):
            versions = set()
            for i, output in enumerate(llm.stream([3, 1, 4], long)):
                versions.add(output.weight_version)
                if i == 5 * turn:
                    llm.update_weights(on_gpu[turn % 2], weight_version=turn % 2)
            assert versions == {0, 1} and tokens(llm) == right[turn % 2]
        llm.manager.check()


@pytest.mark.alone
@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_and_comes(tmp_path, level):
    """512 MiB of weights and 256 of the pool, several times; requests that were kept go on."""
    folder = write_model(tmp_path, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, vocab_size=8192)
    options = {"device": "cuda", "block_size": 16, "max_num_seqs": 8, "kv_cache_memory": 256 << 20}
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(folder, **options) as llm:
        weights = llm._runner.weights._places.memory.content.nbytes
        (alone,) = llm.generate([PROMPTS[0]], long, use_tqdm=False)
        expected, awake = tokens(llm), used()
        for _ in range(3):
            llm.add_request(PROMPTS[0], long, "a")
            llm.step()
            llm.sleep(level, "keep")
            given = awake - used()
            assert given > 0.9 * (weights + (256 << 20)), (given, weights)
            llm.wake_up(["weights"])
            if level == 2:
                llm.update_weights(folder)
            llm.wake_up(["kv_cache"])
            while llm.has_unfinished_requests():
                outputs = llm.step()
            assert outputs[-1].token_ids == alone.token_ids
            assert tokens(llm) == expected and abs(used() - awake) < 32 << 20
        ops.check_errors()


def test_a_norm_that_is_folded_again(tmp_path):
    """In bfloat16: the product is rounded once, from the weights as they were given."""
    folder = write_model(tmp_path)
    weights = random_weights(tiny_config(), 0)
    with LLM(folder, dtype="bfloat16", **POOL) as llm:
        linear = llm._runner.model.layers[0].attention.qkv
        before = ops.asarray(linear.weights[0].data, "float32", "cpu").numpy().copy()
        for _ in range(3):
            llm.update_weights(weights)
        np.testing.assert_array_equal(ops.asarray(linear.weights[0].data, "float32", "cpu").numpy(), before)
