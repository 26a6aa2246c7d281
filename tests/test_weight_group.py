"""Weights that a trainer broadcasts by NCCL: on the CPU with fake_nccl.c in its place; on two GPUs with NCCL itself."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from checkpoints import random_weights, tiny_config, write_model
from rank_engine import SIZES
from served import serving

from pagedkv import LLM, AsyncEngine, SamplingParams, ops
from pagedkv.engine import BroadcastTensor, WeightGroup, weight_updates
from pagedkv.models import nccl

OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 80, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12]]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[-1]) or shutil.which("gcc")


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    source = Path(__file__).parent / "fake_nccl.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, source], check=True)
    return path


@pytest.fixture
def fake(library, monkeypatch):
    monkeypatch.setenv("PAGEDKV_NCCL", str(library))
    monkeypatch.setattr(weight_updates, "GROUP_DEVICES", ("cpu",))
    nccl._library.cache_clear()
    yield monkeypatch
    nccl._library.cache_clear()


class Trainer(threading.Thread):
    """Member 0: joins, and sends in the order of what it was given."""

    def __init__(self, id: bytes, size: int, sent: list[np.ndarray]) -> None:
        super().__init__()
        self.args, self.sent, self.error = (id, size), sent, None
        self.start()

    def run(self) -> None:
        try:
            group = WeightGroup(self.args[0], self.args[1], 0, "cpu", timeout=10)
            group.broadcast(self.sent)
            group.close()
            group.close()
        except Exception as error:
            self.error = error

    def result(self) -> None:
        self.join(30)
        if self.error is not None:
            raise self.error


def described(weights: dict[str, np.ndarray]) -> dict[str, BroadcastTensor]:
    return {name: BroadcastTensor(array.shape, "float32") for name, array in weights.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_new_weights(tmp_path, fake, num_ranks):
    """In any order, and in the dtype of the sender; the group serves several updates."""
    shape = SIZES if num_ranks == 2 else {}
    folders = [write_model(tmp_path / str(seed), seed=seed, **shape) for seed in (0, 1)]
    weights = random_weights(tiny_config(**shape), 1)
    names = np.random.default_rng(0).permutation(list(weights)).tolist()
    halves = [{name: weights[name] for name in names if ("layers.0." in name) == first} for first in (True, False)]
    with LLM(folders[1], **OPTIONS) as llm:
        expected = tokens(llm)
    id = nccl.unique_id()
    with LLM(folders[0], tensor_parallel_size=num_ranks, **OPTIONS) as llm:
        before = tokens(llm)
        trainer = Trainer(id, 1 + num_ranks, [array for half in halves for array in half.values()])
        llm.init_weights_update_group(id, 1 + num_ranks)
        llm.sleep(2)
        llm.wake_up()
        for i, half in enumerate(halves):
            assert llm.update_weights(described(half), weight_version=f"half {i}") == f"half {i}"
        trainer.result()
        assert tokens(llm) == expected != before
        llm.destroy_weights_update_group()
        llm.destroy_weights_update_group()
        with pytest.raises(RuntimeError, match=r"in no group that sends weights: call init_weights_update_group\(\) first"):
            llm.update_weights(described(weights), weight_version="none")
        assert tokens(llm) == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_does_not_fit_changes_nothing(tmp_path, fake, num_ranks):
    """It is received, so that the sender need not wait, and then refused; the next update works."""
    folder = write_model(tmp_path, **SIZES)
    norm = np.zeros(64, np.float32)
    id = nccl.unique_id()
    with LLM(folder, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
        before = tokens(llm)
        trainer = Trainer(id, 1 + num_ranks, [norm, np.zeros(3, np.float32), norm])
        llm.init_weights_update_group(id, 1 + num_ranks)
        with pytest.raises(ValueError, match="no such tensor"):
            llm.update_weights({"model.norm.wait": BroadcastTensor((64,), "float32")})
        with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \[3\] but must have \[64\]"):
            llm.update_weights({"model.norm.weight": BroadcastTensor((3,), "float32")})
        assert tokens(llm) == before and llm.get_weight_version() == 0
        with pytest.raises(TypeError, match="'b' is there, but others in the call are BroadcastTensors"):
            llm.update_weights({"a": BroadcastTensor((64,), "float32"), "b": norm})
        llm.update_weights([("model.norm.weight", BroadcastTensor((64,), "float32"))])
        trainer.result()
        assert tokens(llm) != before


def test_members_that_do_not_come(tmp_path, fake):
    """The engine goes on without a group."""
    folder = write_model(tmp_path, **SIZES)
    with LLM(folder, **OPTIONS) as llm:
        before = tokens(llm)
        with pytest.raises(RuntimeError, match=r"rank 0: TimeoutError: NCCL, CommInitRankConfig: .* not come within 0.2 s"):
            llm.init_weights_update_group(nccl.unique_id(), 2, timeout=0.2)
        with pytest.raises(RuntimeError, match="in no group"):
            llm.update_weights({"model.norm.weight": BroadcastTensor((64,), "float32")})
        assert tokens(llm) == before
        id = nccl.unique_id()
        trainer = Trainer(id, 2, [])
        llm.init_weights_update_group(id, 2, timeout=10)
        trainer.result()
        with pytest.raises(RuntimeError, match="rank 0: RuntimeError: NCCL, Broadcast: unhandled system error"):
            llm.update_weights({"model.norm.weight": BroadcastTensor((64,), "float32")})
        assert tokens(llm) == before


@pytest.mark.parametrize("call", ["GetUniqueId", "CommInitRankConfig", "Broadcast"])
def test_what_nccl_says(fake, call):
    fake.setenv("FAKE_NCCL_FAIL", call)
    with pytest.raises(RuntimeError, match=f"NCCL, {call}: unhandled system error, "):
        id = nccl.unique_id()
        trainer = Trainer(id, 2, [np.zeros(3, np.float32)])
        try:
            WeightGroup(id, 2, 1, "cpu", timeout=10).broadcast([np.zeros(3, np.float32)])
        finally:
            trainer.join(30)


def test_bad_arguments(fake, monkeypatch):
    id = bytes(128)
    for arguments, error, text in [
        ((b"x", 2, 0), ValueError, "unique_id is b'x' but must be 128 bytes"), ((id, 1, 0), ValueError, "world_size is 1 but"),
        ((id, 2, 2), ValueError, "rank is 2 but must be at most 1"), ((id, 2.0, 0), TypeError, "world_size is 2.0 but"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            WeightGroup(*arguments, "cpu")
    with pytest.raises(ValueError, match="timeout is 0 but must be above 0"):
        WeightGroup(id, 2, 0, "cpu", timeout=0)
    with pytest.raises(ValueError, match="dtype is 'int7' but must be one of"):
        BroadcastTensor((3,), "int7").empty("cpu")
    id = nccl.unique_id()
    trainer = Trainer(id, 2, [])
    group = WeightGroup(id, 2, 1, "cpu")
    trainer.result()
    for tensors, root, text in [
        ([np.zeros((4, 4), np.float32)[:, ::2]], 0, r"tensors\[0\] is not contiguous"), ([], 2, "root is 2 but must be at most 1"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            group.broadcast(tensors, root)
    group.close()
    with pytest.raises(RuntimeError, match="this WeightGroup is closed"):
        group.broadcast([])


def test_a_library_that_is_none(fake, tmp_path):
    """And one that is too old."""
    fake.setenv("FAKE_NCCL_VERSION", "21300")
    with pytest.raises(ImportError, match=r"libnccl.so is NCCL 21300 but must be 21400 \(2.14\) or later"):
        nccl.unique_id()
    fake.setenv("PAGEDKV_NCCL", "/no/such/file.so")
    nccl._library.cache_clear()
    with pytest.raises(ImportError, match=r"needs NCCL \(libnccl.so.2, .*\) and found none: tried /no/such/file.so$"):
        nccl.unique_id()
    folder = write_model(tmp_path, **SIZES)
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(RuntimeError, match="rank 0: ImportError: a group of weights needs NCCL"):
            llm.init_weights_update_group(bytes(128), 2)
        fake.setattr(weight_updates, "GROUP_DEVICES", ("cuda",))
        with pytest.raises(ValueError, match="device is 'cpu', but NCCL is for GPUs"):
            llm.init_weights_update_group(bytes(128), 2)
        assert tokens(llm)


def test_over_http(tmp_path, fake):
    folder = write_model(tmp_path, **SIZES)
    norm = random_weights(tiny_config(**SIZES), 1)["model.norm.weight"] * 0 + 3
    client = AsyncEngine(folder, **OPTIONS)
    with serving(client, with_admin=True) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        id = nccl.unique_id()
        text = base64.b64encode(id).decode()
        trainer = Trainer(id, 2, [norm])
        joined = http.post("/init_weights_update_group", json={"unique_id": text, "world_size": 2})
        assert joined.status_code == 200 and joined.json() == {"unique_id": text, "world_size": 2}
        sent = [{"name": "model.norm.weight", "dtype": "float32", "shape": [64]}]
        assert http.post("/update_weights", json={"broadcast": sent, "weight_version": 7}).json() == {"weight_version": 7}
        trainer.result()
        assert (ops.asarray(client.engine._runner.model.norm, "float32").numpy() == 3).all()
        assert http.post("/destroy_weights_update_group").status_code == 200
        for path, body, status, message in [
            ("/update_weights", {"broadcast": sent}, 409, "in no group"), ("/update_weights", {"broadcast": 3}, 400, "list of objects"),
            ("/update_weights", {"broadcast": [{"name": "x"}]}, 400, "must hold objects with name, dtype and shape"),
            ("/init_weights_update_group", {"unique_id": "?", "world_size": 2}, 400, "bytes in base64"),
            ("/init_weights_update_group", {"world_size": 2}, 400, "unique_id must be given"),
            ("/init_weights_update_group", {"unique_id": text[:8], "world_size": 2}, 400, "but must be 128 bytes"),
        ]:  # fmt: skip
            answer = http.post(path, json=body)
            assert answer.status_code == status and message in answer.json()["error"]["message"], (body, answer.text)
    client.close()


TRAINER = """
import sys
import torch
from checkpoints import random_weights, tiny_config
from pagedkv.engine import WeightGroup
group = WeightGroup(bytes.fromhex(sys.argv[1]), 2, 0, "cuda:1")
weights = random_weights(tiny_config(), 1)
group.broadcast([torch.from_numpy(array).to("cuda:1", torch.bfloat16) for array in weights.values()])
group.close()
"""


@pytest.mark.gpu
def test_from_another_gpu(cuda, tmp_path):
    """By NCCL itself, from torch's tensors in another process."""
    pytest.importorskip("torch")
    if ops.build_info()["cuda_devices"] < 2:
        pytest.skip("fewer than two GPUs")
    try:
        id = nccl.unique_id()
    except ImportError as problem:
        pytest.skip(str(problem))
    folders = [write_model(tmp_path / str(seed), seed=seed, dtype="bfloat16") for seed in (0, 1)]
    options = OPTIONS | {"device": cuda}
    with LLM(folders[1], **options) as llm:
        expected = tokens(llm)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    with LLM(folders[0], **options) as llm:
        assert tokens(llm) != expected
        with subprocess.Popen([sys.executable, "-c", TRAINER, id.hex()], env=environment) as trainer:
            try:
                llm.init_weights_update_group(id, 2)
                weights = random_weights(tiny_config(), 1)
                llm.update_weights({name: BroadcastTensor(array.shape, "bfloat16") for name, array in weights.items()})
                assert trainer.wait(60) == 0
            finally:
                trainer.kill()  # it may wait for a member that has failed
        assert tokens(llm) == expected
        with pytest.raises(RuntimeError, match="not come within 1 s"):
            llm.init_weights_update_group(nccl.unique_id(), 2, timeout=1)
        assert tokens(llm) == expected
