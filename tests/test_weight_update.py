"""update_weights(): after it an engine is as a new one on the other checkpoint, and what is wrong changes nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time

import numpy as np
import pytest
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_model
from lora_adapters import write_adapter
from quantized_checkpoints import FORMATS, write_quantised
from rank_engine import SIZES
from threads import in_threads

from pagedkv import LLM, Engine, SamplingParams, ops
from pagedkv.engine import IpcTensor, LoRARequest
from pagedkv.models.safetensors import SafetensorsFile
from pagedkv.models.update import read_files

OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 80, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], list(range(20, 50))]
LAYER = "model.layers.1"


def tokens(llm: LLM, **options) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **options)
    assert not [output.error for output in outputs if output.error]
    return [output.token_ids for output in outputs]


def tokens_of(folder, **options) -> list[list[int]]:
    with LLM(folder, **OPTIONS | options) as llm:
        return tokens(llm)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model."""
    return [write_model(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def weights():
    return random_weights(tiny_config(), 1)


# --- all of the weights

CASES = {
    "qwen3": ("qwen3", {}, {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "bfloat16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "fp8": ("qwen3", {"hidden_size": 192, "intermediate_size": 160}, {"quantization": "fp8"}),
    "fp8 experts": ("qwen3_moe", {}, {"quantization": "fp8"}),
    "ranks": ("qwen3", SIZES, {"tensor_parallel_size": 2}),
    "ranks, experts": ("qwen3_moe", SIZES, {"tensor_parallel_size": 2}),
    "ranks, biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_a_new_engine(tmp_path, case):
    """In any order of the names, by arrays, by pairs, by a file's path, and back."""
    family, config, options = CASES[case]
    old, new = (write_model(tmp_path / str(seed), family, seed=seed, **config) for seed in (0, 1))
    names = list(given := random_weights(tiny_config(family, **config), 1))
    np.random.default_rng(5).shuffle(names)
    alone = {name: value for name, value in options.items() if name != "tensor_parallel_size"}  # the tokens are the same
    before, after = tokens_of(old, **alone), tokens_of(new, **alone)
    assert before != after
    with LLM(old, **OPTIONS | options) as llm:
        assert tokens(llm) == before
        assert llm.update_weights({name: given[name] for name in names}) == 1
        assert tokens(llm) == after
        assert llm.update_weights(read_files(old).items()) == 2
        assert tokens(llm) == before
        assert llm.update_weights(new / "model.safetensors", weight_version="third") == "third"
        assert tokens(llm) == after
        assert llm.update_weights(str(old), weight_version=9) == 9
        assert tokens(llm) == before
        llm.manager.check()
    assert tokens_of(old, **alone) == before, "the files are as they were"


def test_torchs_parameters(folders):
    torch = pytest.importorskip("torch")
    after = tokens_of(folders[1])
    given = {name: torch.from_numpy(array) for name, array in random_weights(tiny_config(), 1).items()}
    transposed = {name: array.T.contiguous().T if array.ndim == 2 else array for name, array in given.items()}
    with LLM(folders[0], **OPTIONS) as llm:
        llm.update_weights({name: torch.nn.Parameter(array) for name, array in transposed.items()})
        assert tokens(llm) == after


@pytest.mark.parametrize(
    "form",
    [
        "fp8", "fp8, small blocks", "fp8, tensor", "packed", "packed, zeros", "packed, order", "awq", "gptq",
        "gptq, order",
    ],
)
def test_in_a_checkpoints_own_format(tmp_path, form):
    for seed in (0, 1):
        write_quantised(tmp_path / str(seed), FORMATS[form], seed=seed)
    before, after = (tokens_of(tmp_path / str(seed)) for seed in (0, 1))
    assert before != after
    with LLM(tmp_path / "0", **OPTIONS) as llm:
        llm.update_weights(tmp_path / "1")
        assert tokens(llm) == after
        given = read_files(tmp_path / "0")
        scale = next(name for name in given if re.search(r"q_proj\.(scales|weight_scale|weight_scale_inv)$", name))
        with pytest.raises(ValueError, match="give all of them in one call"):
            llm.update_weights({scale: given[scale]})
        assert tokens(llm) == after
        llm.update_weights(given)
        assert tokens(llm) == before


@pytest.mark.parametrize("loaded", [False, True], ids=["loaded apart", "loaded joined"])
@pytest.mark.parametrize("given", [False, True], ids=["given apart", "given joined"])
def test_experts_in_one_tensor(tmp_path, loaded, given):
    """As transformers 5 has them in memory."""
    config = tiny_config("qwen3_moe")

    def joined(weights):
        found = {name: array for name, array in weights.items() if ".experts." not in name}
        for layer in range(config["num_hidden_layers"]):
            names = [f"model.layers.{layer}.mlp.experts.{i}" for i in range(config["num_experts"])]
            gate, up, down = ([weights[f"{name}.{part}_proj.weight"] for name in names] for part in ("gate", "up", "down"))
            stem = f"model.layers.{layer}.mlp.experts"
            found |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": np.stack(down)}
        return found

    old, new = (write_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (0, 1))
    after = tokens_of(new)
    if loaded:
        (old / "model.safetensors").write_bytes(safetensors_bytes(joined(random_weights(config, 0))))
    weights = random_weights(config, 1)
    with LLM(old, **OPTIONS) as llm:
        llm.update_weights(joined(weights) if given else weights)
        assert tokens(llm) == after
        with pytest.raises(ValueError, match=r"down_proj' has shape \[6, 64, 47\] but must have \[6, 64, 48\]"):
            llm.update_weights({f"{LAYER}.mlp.experts.down_proj": np.zeros((6, 64, 47), np.float32)})


# --- some of them


def with_some(tmp_path, weights, *names):
    """The first checkpoint with some tensors of the second."""
    folder = write_model(tmp_path / "some")
    mixed = random_weights(tiny_config(), 0) | {name: weights[name] for name in names}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(mixed))
    return folder


@pytest.mark.parametrize("names", [
    ("model.embed_tokens.weight",), ("lm_head.weight", "model.norm.weight"), (f"{LAYER}.self_attn.k_proj.weight",),
    (f"{LAYER}.self_attn.q_norm.weight", f"{LAYER}.mlp.down_proj.weight"),
    (f"{LAYER}.post_attention_layernorm.weight", f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.gate_proj.weight"),
], ids=lambda names: names[0])  # fmt: skip
def test_some_of_the_weights(tmp_path, folders, weights, names):
    """Those that a norm is multiplied into, too, without that norm."""
    after = tokens_of(with_some(tmp_path, weights, *names))
    with LLM(folders[0], **OPTIONS) as llm:
        llm.update_weights({name: weights[name] for name in names})
        assert tokens(llm) == after


def test_a_norm_alone(folders, weights):
    """It is multiplied into weights that are not there any more."""
    name, same = f"{LAYER}.input_layernorm.weight", random_weights(tiny_config(), 0)
    with LLM(folders[0], **OPTIONS) as llm:
        before = tokens(llm)
        message = r"is multiplied into '.*q_proj.weight', '.*k_proj.weight', '.*v_proj.weight'"
        for given in ({}, {f"{LAYER}.self_attn.q_proj.weight": weights[f"{LAYER}.self_attn.q_proj.weight"]}):
            with pytest.raises(ValueError, match=r"input_layernorm.weight' is multiplied into" if given else message):
                llm.update_weights({name: weights[name]} | given)
        llm.update_weights({name: same[name]})
        assert tokens(llm) == before


def test_tied_embeddings(tmp_path):
    """A trainer may give them twice, but only as one."""
    folder = write_model(tmp_path, tie_word_embeddings=True)
    weights = random_weights(tiny_config(tie_word_embeddings=True), 1)
    table = weights["model.embed_tokens.weight"]
    with LLM(folder, **OPTIONS) as llm:
        llm.update_weights(weights | {"lm_head.weight": table.copy()})
        after = tokens(llm)
        for head in (table + 1, table[:-1]):
            with pytest.raises(ValueError, match="'lm_head.weight' is not 'model.embed_tokens.weight', given with it"):
                llm.update_weights(weights | {"lm_head.weight": head})
        with pytest.raises(ValueError, match="'lm_head.weight' is not"):
            llm.update_weights({"lm_head.weight": table * 2})
        llm.update_weights({"lm_head.weight": table})  # it is there
        assert tokens(llm) == after


def test_beside_adapters(tmp_path, folders, weights):
    write_adapter(tmp_path / "adapter")
    lora = LoRARequest("adapter", 1, tmp_path / "adapter")
    with LLM(folders[1], enable_lora=True, **OPTIONS) as llm:
        expected = tokens(llm), tokens(llm, lora_request=lora)
    with LLM(folders[0], enable_lora=True, **OPTIONS) as llm:
        tokens(llm, lora_request=lora)
        llm.update_weights(weights)
        assert (tokens(llm), tokens(llm, lora_request=lora)) == expected and expected[0] != expected[1]


# --- in several calls


@pytest.mark.parametrize("case", ["tied", "qwen3_moe", "fp8", "ranks"])
@pytest.mark.parametrize("order", ["as they are", "at random"])
def test_one_tensor_at_a_time(tmp_path, case, order):
    """As trainers send them, who change their buffer after each call. Few wait for others. A request that is there goes
    on afterwards."""
    family, config, options = CASES[case]
    old, new = (write_model(tmp_path / str(seed), family, seed=seed, **config) for seed in (0, 1))
    names = list(given := random_weights(tiny_config(family, **config), 1))
    if order == "at random":
        np.random.default_rng(5).shuffle(names)
    alone = {name: value for name, value in options.items() if name != "tensor_parallel_size"}
    after = tokens_of(new, **alone)
    with LLM(old, **OPTIONS | options) as llm:
        for is_asleep in (False, True):
            if is_asleep:
                llm.sleep(2)
                with pytest.raises(RuntimeError, match="asleep: call wake_up"):
                    llm.start_weight_update()
                llm.wake_up(["weights"])
            version, most = llm.get_weight_version(), 0
            llm.start_weight_update()
            llm.add_request(PROMPTS[0], GREEDY, "a")
            assert llm.explain("a") == f"waits: the engine {'is asleep and ' * is_asleep}is taking new weights"
            for name in names:
                buffer = given[name].copy()
                assert llm.update_weights([(name, buffer)]) == version
                buffer[:] = 99
                most = max(most, len(llm._runner.weights.gathered.waiting))
            llm.wake_up()
            assert llm.finish_weight_update() == version + 1
            assert order == "at random" or most < len(names) / 4
            assert [output.token_ids for output in iter_to_end(llm)] == after[:1]
            assert tokens(llm) == after


def iter_to_end(llm):
    while llm.has_unfinished_requests():
        yield from (output for output in llm.step() if output.finished)


def test_a_folder_of_a_smaller_model(tmp_path, folders):
    """Its tensors would fit, but it lacks a layer. A file of some tensors is taken."""
    smaller = write_model(tmp_path, seed=4, num_hidden_layers=1)
    with LLM(folders[0], **OPTIONS) as llm:
        before = tokens(llm)
        with pytest.raises(ValueError, match=r"the folder does not have 'model.layers.1.*: give a file or named tensors"):
            llm.update_weights(smaller)
        assert tokens(llm) == before and llm.get_weight_version() == 0
        llm.update_weights(smaller / "model.safetensors")
        assert tokens(llm) != before


def test_an_update_that_is_not_complete(folders, weights):
    """It says what is missing, and may be given it; or it begins again; a norm that is as before may be left out."""
    norm, product = f"{LAYER}.input_layernorm.weight", f"{LAYER}.self_attn.q_proj.weight"
    same = random_weights(tiny_config(), 0)
    with LLM(folders[0], **OPTIONS) as llm:
        before = tokens(llm)
        with pytest.raises(RuntimeError, match="no update has begun: call start_weight_update"):
            llm.finish_weight_update()
        llm.start_weight_update()
        for name in (norm, product):
            llm.update_weights({name: weights[name]}, weight_version="a")
        for wrong, kind, message in [WRONG[name] for name in WRONG if name != "two names"]:
            with pytest.raises(kind, match=message):
                llm.update_weights(wrong)
        with pytest.raises(ValueError, match=r"is multiplied into '.*k_proj.weight', '.*v_proj.weight': give all of them in one"):
            llm.finish_weight_update()
        with pytest.raises(TypeError, match="weight_version is 1.5"):
            llm.finish_weight_update(1.5)
        assert llm.get_weight_version() == 0 and not llm.is_sleeping() and not llm.is_paused()
        llm.start_weight_update()
        assert llm.finish_weight_update() == 1 and tokens(llm) == before
        llm.start_weight_update()
        for name in (product, norm):
            llm.update_weights({name: same[name]})
        assert llm.finish_weight_update("b") == "b" and tokens(llm) == before
        llm.start_weight_update()
        for name, array in weights.items():
            llm.update_weights({name: array}, weight_version="c")
        assert llm.finish_weight_update() == "c" and tokens(llm) == tokens_of(folders[1])


def test_each_update_has_its_own_version(folders):
    """Of two threads, too."""
    with LLM(folders[0], **OPTIONS) as llm:
        found = in_threads(lambda _: [llm.update_weights(each) for each in folders * 5], range(2))
    assert sorted(found[0] + found[1]) == list(range(1, 21))


# --- what is wrong



class NoMemory:
    """As a tensor of torch on the device "meta"."""

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        raise RuntimeError("Cannot pack tensors on meta")


Q = f"{LAYER}.self_attn.q_proj.weight"
WRONG = {
    "name": ({"model.layers.7.mlp.up_proj.weight": np.zeros(3, np.float32)}, ValueError,
             r"'model.layers.7.mlp.up_proj.weight': the model has no such tensor \(the nearest is 'model.layers.1"),
    "names": ({f"a{i}": np.zeros(3, np.float32) for i in range(5)}, ValueError, r"'a0', 'a1', 'a2' and 2 more: the model"),
    "shape": ({Q: np.zeros((64, 128), np.float32)}, ValueError, r"q_proj.weight' has shape \[64, 128\] but must have \[128, 64\]"),
    "scalar": ({"model.norm.weight": np.array(3, np.float32)}, ValueError, r"norm.weight' has shape \[\] but must have \[64\]"),
    "dtype": ({Q: np.zeros((128, 64), np.int32)}, TypeError, r"q_proj.weight' has dtype int32 but must be of float32"),
    "no tensor": ({Q: "abc"}, TypeError, r"q_proj.weight' is no tensor"),
    "no memory": ({Q: NoMemory()}, TypeError, r"q_proj.weight' is no tensor that can be read: .*Cannot pack tensors on meta"),
    "no pairs": ([3], TypeError, "tensors holds int but must hold pairs"),
    "nothing": ({}, ValueError, "tensors is empty"),
    "two names": ({"norm.weight": np.zeros(64, np.float32)}, ValueError, r"'norm.weight' is there twice, as 'model.norm.weight' too"),
    "twice": ([(Q, np.zeros(3, np.float32)), (Q, np.zeros(3, np.float32))], ValueError, "q_proj.weight' is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_wrong_changes_nothing(tmp_path, weights, num_ranks):
    """The other tensors of the call are right."""
    folder = write_model(tmp_path, **SIZES if num_ranks > 1 else {})
    right = {name: weights[name] for name in ("model.norm.weight", f"{LAYER}.mlp.down_proj.weight")}
    with LLM(folder, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
        before = tokens(llm)
        for given, kind, message in WRONG.values():
            with pytest.raises(kind, match=message):
                if isinstance(given, dict):
                    given = right | given if given else {}
                llm.update_weights(given if isinstance(given, dict) else [*right.items(), *given])
        with pytest.raises(FileNotFoundError):
            llm.update_weights(tmp_path / "nowhere")
        for nothing, kind in ((None, TypeError), (5, TypeError), ("", ValueError)):  # "": not the folder one happens to be in
            with pytest.raises(kind, match=f"tensors is {nothing!r} but must be "):
                llm.update_weights(nothing)
        for version, kind in ((1.5, TypeError), (True, TypeError), (b"1", TypeError)):
            with pytest.raises(kind, match="weight_version is .* but must be an int or a str"):
                llm.update_weights(right, weight_version=version)
        assert llm.get_weight_version() == 0 and tokens(llm) == before


def test_a_closed_engine(folders, weights):
    llm = LLM(folders[0], **OPTIONS)
    llm.close()
    for call in (lambda: llm.update_weights(weights), llm.sleep, llm.wake_up, llm.pause, llm.resume, llm.reset_prefix_cache):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()


def test_a_failure_while_it_writes(folders, weights, monkeypatch):
    """What was to be written is missing then: nothing is served with half of it."""
    from pagedkv.models.places import Rows

    with LLM(folders[0], **OPTIONS) as llm:
        real, calls = Rows.check, []

        def check(self, source):
            write = real(self, source)

            def fail(upload):
                calls.append(self)
                if len(calls) == 5:
                    raise OSError("the disk is gone")
                write(upload)

            return fail

        monkeypatch.setattr(Rows, "check", check)
        with pytest.raises(OSError, match="the disk is gone"):
            llm.update_weights(weights)
        monkeypatch.undo()
        assert llm.is_sleeping() and llm.get_weight_version() == 0
        threading.Timer(0.1, lambda: llm.update_weights(folders[1])).start()
        assert tokens(llm) == tokens_of(folders[1])


# --- requests on their way, the cache, and versions


@pytest.mark.parametrize("behind", [0, 1])
def test_streams_go_on(folders, weights, behind):
    """Their tokens of before are those of the old weights, and say so."""
    prompt, long = PROMPTS[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(folders[0], **OPTIONS) as llm:
        llm._runner.num_behind = behind
        (alone,) = llm.generate([prompt], long, use_tqdm=False)
        seen: list[tuple[int | str, list[int]]] = []
        stream = llm.stream(prompt, long)
        for output in stream:
            seen.append((output.weight_version, output.token_ids))
            if len(seen) == 10:
                llm.update_weights(weights, weight_version="new")
        ids = [i for _, some in seen for i in some]
        count = sum(len(some) for version, some in seen if version == 0)
        assert len(ids) == 60 and 10 <= count < 60
        assert ids[:count] == alone.token_ids[:count] and ids != alone.token_ids
        assert [version for version, _ in seen] == sorted((version for version, _ in seen), key=str)
        assert output.weight_version == "new" and tokens(llm) == tokens_of(folders[1])
        with pytest.raises(ValueError, match="weight_version is None but the last one is 'new'"):
            llm.update_weights(weights)
        llm.update_weight_version(7)
        assert llm.update_weights(weights) == 8
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].weight_version == 8


def test_no_prefix_is_found_across_an_update(folders, weights):
    prompt = list(range(1, 33))
    with Engine(folders[0], **OPTIONS) as engine:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        engine.add_request(prompt, params, "old")
        engine.add_request(prompt[:-1], GREEDY, "found")
        found: dict = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output
                if output.request_id == "found" and output.finished and "new" not in found:
                    found["new"] = None
                    engine.update_weights(weights)  # "old" runs, with pages of the same prompt
                    engine.add_request(prompt, GREEDY, "new")
                if output.request_id == "new" and output.finished and "again" not in found:
                    found["again"] = None
                    engine.add_request(prompt, GREEDY, "again")
        assert found["found"].num_cached_tokens == 28 and found["new"].num_cached_tokens == 0
        assert found["again"].num_cached_tokens == 32
        with LLM(folders[1], **OPTIONS) as llm:
            (expected,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert found["new"].token_ids == found["again"].token_ids == expected.token_ids
        assert len(found["old"].token_ids) == 40
        assert engine.reset_prefix_cache() > 0 and engine.reset_prefix_cache() == 0


def test_a_saved_cache_is_of_the_folders_weights(tmp_path, folders, weights):
    with LLM(folders[0], **OPTIONS) as llm:
        tokens(llm)
        llm.save_cache(tmp_path / "cache")
        llm.update_weights(weights)
        for call in (llm.save_cache, llm.load_cache):
            with pytest.raises(ValueError, match="has changed the weights, but a saved cache is of those in the folder"):
                call(tmp_path / "cache")


@pytest.mark.parametrize("behind", [0, 1])
def test_while_many_ask(folders, behind):
    """Random traffic of several threads, and updates back and forth: each answer is of one checkpoint or crosses from one
    to the other; at the end all is as at the start."""
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [rng.integers(0, 97, rng.integers(1, 30)).tolist() for _ in range(24)]
    right = []
    for folder in folders:
        with LLM(folder, **OPTIONS) as llm:
            right.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    with LLM(folders[0], **OPTIONS) as llm:
        llm._runner.num_behind = behind
        llm.update_weight_version("0")
        problems, crossed = [], []

        def ask(first: int) -> None:
            for turn in range(20):
                i = (first * 5 + turn * 7) % len(prompts)
                versions, ids = set(), []
                for output in llm.stream(prompts[i], params):
                    versions.add(output.weight_version)
                    ids += output.token_ids
                if len(versions) > 1:
                    crossed.append(i)
                elif ids != right[int(versions.pop())][i]:
                    problems.append(i)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        turn = 0
        while any(thread.is_alive() for thread in threads):
            turn += 1
            llm.update_weights(folders[turn % 2], weight_version=str(turn % 2))
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert turn > 1 and len(crossed) < 80 and not problems
        assert llm.manager.stats()["used"] == 0
        llm.manager.check()


def test_weights_of_a_file_are_written_by_nobody_else(folders):
    """The file's memory is mapped for this process alone, and read-only for all but update_weights()."""
    file = SafetensorsFile(folders[0] / "model.safetensors")
    with pytest.raises(BufferError, match="read-only"):
        file.tensor("model.norm.weight").copy_(np.zeros(64, np.float32))
    assert json.loads((folders[0] / "config.json").read_text())["dtype"] == "float32"
    with LLM(folders[0], **OPTIONS) as llm:
        llm.update_weights({"model.norm.weight": np.zeros(64, np.float32)})
        assert not ops.asarray(llm._runner.model.norm).numpy().any()
    assert file.tensor("model.norm.weight").numpy().all()


def test_tensors_of_another_process(folders, weights, monkeypatch):
    """Where a handle points, with an offset; torch writes a version and a kind before its handles."""
    memory, handle = {}, bytes(range(64))
    for name, array in weights.items():
        memory[name] = np.concatenate([np.zeros(32, np.uint8), array.view(np.uint8).reshape(-1)])
    asked: list = []

    def open_ipc(given, num_bytes, device):
        asked.append((given, device))
        return ops.from_dlpack(memory[list(memory)[len(asked) - 1]])[:num_bytes]

    monkeypatch.setattr(ops, "open_ipc", open_ipc)
    for before in (b"", b"\x02c", b"\x03c"):
        asked.clear()
        given = {name: IpcTensor(before + handle, array.shape, "float32", 32, "cuda:1") for name, array in weights.items()}
        with LLM(folders[0], **OPTIONS) as llm:
            llm.update_weights(given)
            assert tokens(llm) == tokens_of(folders[1])
        assert set(asked) == {(handle, "cuda:1")}
    monkeypatch.undo()
    with LLM(folders[0], **OPTIONS) as llm:
        for wrong, message in (({"dtype": "int7"}, "dtype is 'int7' but must be one of"), ({"offset": -1}, "offset is -1 but")):
            bad = {"lm_head.weight": dataclasses.replace(given["lm_head.weight"], **wrong)}
            with pytest.raises(ValueError, match=message):
                llm.update_weights(bad)
