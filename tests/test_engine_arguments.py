"""What LLM, generate() and SamplingParams take, and what they refuse."""

from __future__ import annotations

import array
import inspect
import io
import re
import threading
from collections import deque
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from checkpoints import ALPHABET
from tiny_engine import GREEDY, generate

from pagedkv import LLM, AsyncEngine, Engine, SamplingParams
from pagedkv._C import _pack_ids
from pagedkv.engine import options as engine_options
from pagedkv.engine.options import EngineOptions


@pytest.fixture
def llm(folder):
    with LLM(folder, device="cpu", block_size=4, num_blocks=200, max_num_seqs=8) as llm:
        yield llm


# --- prompts and outputs


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_token_ids_of_any_sequence(count, rng):
    ids = rng.integers(0, 2**31 - 1, count)
    for given in (ids.tolist(), tuple(ids.tolist()), list(ids), ids, ids.astype(np.int32)):
        assert _pack_ids(given, 2**31 - 1) == ids.astype(np.int32).tobytes()
    assert _pack_ids([True, False], 2) == np.int32([1, 0]).tobytes()
    for nothing in (0, -1, -(2**63)):
        with pytest.raises(ValueError, match="element 0 is 1 but must be in"):
            _pack_ids([1], nothing)


@pytest.mark.parametrize("bad", [-1, 7, 2**31, -(2**31) - 1, 2**32 + 3, 2**64, np.int64(7)])
@pytest.mark.parametrize("position", [0, 40])
def test_a_token_id_out_of_range_fails_alone(llm, bad, position):
    ids = [1, 2, 3] * 20
    ids[position] = bad
    with pytest.raises(ValueError, match="ids"):
        _pack_ids(ids, 7)
    llm.config = replace(llm.config, vocab_size=7)
    good, failed = generate(llm, [[1, 2], ids], GREEDY)
    assert good.error is None and failed.finish_reason == "error" and failed.prompt_token_ids == ids
    assert str(failed.error) == f"token id {bad} is not in 0..6"


def test_text_and_token_ids_are_the_same_prompt(llm):
    ids = [ALPHABET.index(c) for c in "12+34="]
    text, tokens = generate(llm, ["12+34=", ids], GREEDY)
    assert (text.prompt, text.prompt_token_ids, tokens.prompt) == ("12+34=", ids, None)
    assert text.token_ids == tokens.token_ids and text.text == tokens.text
    assert (text.finish_reason, text.error, len(text.token_ids)) == ("length", None, 12)
    array, pair = generate(llm, [np.array(ids), tuple(ids)], GREEDY)
    assert array.token_ids == pair.token_ids == text.token_ids


def test_a_string_is_one_prompt(llm):
    """Not one prompt per character."""
    outputs = generate(llm, "abc", GREEDY)
    assert len(outputs) == 1 and outputs[0].prompt == "abc"


def test_no_prompts(llm):
    assert generate(llm, []) == []


@pytest.mark.parametrize("prompt", [3, None, 2.5, b"bytes"])
def test_a_prompt_of_the_wrong_type(llm, prompt):
    with pytest.raises(TypeError, match=r"one prompt of token ids: \[\[1, 2, 3\]\]"):
        generate(llm, [[1], prompt])


def test_max_tokens_zero(llm):
    """It ends at once, where other engines go on for ever, and leaves the others alone."""
    nothing, one = generate(llm, ["abc", "abc"], [SamplingParams(max_tokens=0), SamplingParams(max_tokens=1)])
    assert (nothing.token_ids, nothing.text, nothing.finish_reason, nothing.error) == ([], "", "length", None)
    assert len(one.token_ids) == 1


def test_parameters_for_each_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(output.token_ids) for output in generate(llm, ["a", "b", "c"], params)] == [1, 5, 3]
    for wrong in (params[:2], params * 2, []):
        with pytest.raises(ValueError, match=f"{len(wrong)} sampling_params for 3 prompts"):
            generate(llm, ["a", "b", "c"], wrong)
    with pytest.raises(TypeError, match="which is no SamplingParams"):
        generate(llm, ["a"], [{"max_tokens": 3}])
    with pytest.raises(TypeError, match="sampling_params is {'max_tokens': 3} but must be SamplingParams, or a list"):
        generate(llm, ["a"], {"max_tokens": 3})


def test_unknown_options(llm, folder):
    with pytest.raises(TypeError, match="SamplingParams has no option 'top_q'; did you mean 'top_p'"):
        SamplingParams(top_q=0.5)
    with pytest.raises(TypeError, match="LLM has no option 'gpu_memory_use'; did you mean 'gpu_memory_utilization'"):
        LLM(folder, device="cpu", gpu_memory_use=0.9)
    with pytest.raises(TypeError, match="Engine has no option 'zzz'$"):
        Engine(folder, zzz=1)
    assert "max_num_seqs: int | None = None" in str(inspect.signature(LLM))
    assert str(inspect.signature(SamplingParams)).startswith("(n: 'int' = 1, best_of: ")
    assert "model" in inspect.signature(Engine).parameters
    with pytest.raises(TypeError, match="verbose"):
        llm.generate("a", verbose=True)


BAD_PARAMS = [
    ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
    ({"temperature": float("nan")}, ValueError, "temperature is nan"),
    ({"temperature": float("inf")}, ValueError, "temperature is inf"),
    ({"temperature": "hot"}, TypeError, "temperature is 'hot'"),
    ({"temperature": True}, TypeError, "temperature is True"),
    ({"temperature": 1e39}, ValueError, "temperature is 1e\\+39 but must be at least 0 and at most 3.4e\\+38"),
    ({"temperature": 10**400}, ValueError, "must be at least 0 and at most"),
    ({"top_k": -2}, ValueError, "top_k is -2 but must be at least -1"),
    ({"top_k": 2.0}, TypeError, "top_k is 2.0 but must be an integer"),
    ({"top_k": 2**31}, ValueError, "top_k is 2147483648"),
    ({"top_p": 0.0}, ValueError, "top_p is 0.0 but must be above 0 and at most 1"),
    ({"top_p": 1.01}, ValueError, "top_p is 1.01"),
    ({"top_p": float("nan")}, ValueError, "top_p is nan"),
    ({"min_p": -0.1}, ValueError, "min_p is -0.1 but must be at least 0 and at most 1"),
    ({"min_p": 2}, ValueError, "min_p is 2"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0 but must be at least 1.2e-38"),
    ({"repetition_penalty": 1e-50}, ValueError, "repetition_penalty is 1e-50 but must be at least 1.2e-38"),
    ({"repetition_penalty": float("inf")}, ValueError, "repetition_penalty is inf"),
    ({"presence_penalty": float("nan")}, ValueError, "presence_penalty is nan"),
    ({"frequency_penalty": "0"}, TypeError, "frequency_penalty is '0'"),
    ({"frequency_penalty": -1e39}, ValueError, "frequency_penalty is -1e\\+39"),
    ({"logprobs": -1}, ValueError, "logprobs is -1"),
    ({"logprobs": 21}, ValueError, "logprobs is 21 but must be at most 20"),
    ({"logprobs": True}, TypeError, "logprobs is True but must be an integer"),
    ({"max_tokens": -1}, ValueError, "max_tokens is -1"),
    ({"max_tokens": 2.0}, TypeError, "max_tokens is 2.0"),
    ({"max_tokens": True}, TypeError, "max_tokens is True"),
    ({"max_tokens": 2**31}, ValueError, "max_tokens is 2147483648"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos is 1"),
    ({"n": 16_385}, ValueError, "n is 16385 but must be at most 16384"),
    ({"best_of": 10**9}, ValueError, "best_of is 1000000000 but must be at most 16384"),
    ({"stop": np.array("a")}, TypeError, "stop is array"),
    ({"stop_token_ids": np.array(1)}, TypeError, r"stop_token_ids is array\(1\) but must be a list of token ids"),
    ({"seed": 2**63}, ValueError, "seed is 9223372036854775808"),
    ({"seed": 1.5}, TypeError, "seed is 1.5"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_PARAMS)
def test_bad_sampling_params(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


BAD_OPTIONS = [
    ({"block_size": 0}, ValueError, "block_size is 0"),
    ({"block_size": "16"}, TypeError, "block_size is '16'"),
    ({"num_blocks": -3}, ValueError, "num_blocks is -3"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0"),
    ({"max_num_seqs": "8"}, TypeError, "max_num_seqs is '8' but must be an integer"),
    ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens is 0 but must be at least 1"),
    ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, ValueError, "must be at least max_num_seqs=8"),
    ({"max_model_len": 257}, ValueError, "max_model_len is 257 but the model was made for 256"),
    ({"max_model_len": 0}, ValueError, "max_model_len is 0"),
    ({"kv_cache_memory": 100}, ValueError, "kv_cache_memory is 100 bytes but one page needs 16384"),
    ({"swap_space": 4}, ValueError, "swap_space is 4 bytes but one page needs 16384"),  # of other engines: in GiB
    ({"kv_cache_memory": "1GB"}, TypeError, "kv_cache_memory is '1GB' but must be an integer"),
    ({"kv_cache_memory": 1 << 20, "num_blocks": 4}, ValueError, "num_blocks and kv_cache_memory both"),
    ({"eviction": "fifo"}, ValueError, "eviction is 'fifo' but must be reuse or lru"),
    ({"enable_prefix_caching": "no"}, TypeError, "enable_prefix_caching is 'no' but must be True or False"),
    ({"seed": "a"}, TypeError, "seed is 'a' but must be an integer"),
    ({"dtype": "int8"}, ValueError, "dtype is 'int8'"),
    ({"dtype": np.int32}, ValueError, "dtype is 'int32' but must be auto, float32, float16 or bfloat16"),
    ({"dtype": None}, TypeError, "dtype is None but must be a dtype"),
    ({"kv_cache_dtype": None}, TypeError, "kv_cache_dtype is None but must be a dtype"),
    ({"block_size": None}, TypeError, "block_size is None but must be an integer"),
    ({"tensor_parallel_size": None}, TypeError, "tensor_parallel_size is None but must be an integer"),
    ({"max_num_seqs": 10**9}, ValueError, "max_num_seqs is 1000000000 but must be at most 1048576"),
    ({"eviction": np.array([1, 2])}, ValueError, r"eviction is array\(\[1, 2\]\) but must be reuse or lru"),
    ({"kv_cache_dtype": np.float16}, ValueError, "kv_cache_dtype is 'float16' but must be auto, fp8 or"),
    ({"device": "tpu"}, ValueError, "device: 'tpu' is not a device"),
    ({"device": None}, ValueError, "device: None is not a device"),
    ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype is 'int4' but must be auto, fp8 or float8_e4m3fn"),
    ({"gpu_memory_utilization": "0.9"}, TypeError, "gpu_memory_utilization is '0.9' but must be a number"),
    ({"gpu_memory_utilization": 0}, ValueError, "gpu_memory_utilization is 0 but must be above 0 and at most 1"),
    ({"enforce_eager": 1}, TypeError, "enforce_eager is 1 but must be True or False"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_engine_options(folder, options, error, message):
    with pytest.raises(error, match=message):
        LLM(folder, **options)


def test_devices_and_dtypes_of_other_libraries(folder):
    """Their objects, not only their names."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, np.float16, np.dtype("float16"), "float16"):
        with LLM(folder, device=torch.device("cpu"), dtype=dtype, num_blocks=64) as llm:
            assert (llm.device, llm.dtype, llm.kv_cache_dtype) == ("cpu", "float16", "float16")
    with LLM(folder, device=torch.device("cpu", 0), dtype=torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn) as llm:
        assert (llm.device, llm.dtype, llm.kv_cache_dtype) == ("cpu", "bfloat16", "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"device: device\(type='meta'\) is not a device"):
        LLM(folder, device=torch.device("meta"))


@pytest.mark.parametrize(("num_gpus", "chosen"), [(0, "cpu"), (1, "cuda:0"), (8, "cuda:0")])
def test_the_device_is_a_gpu_where_there_is_one(monkeypatch, num_gpus, chosen):
    """Without a word of the user's; no GPU is asked for where there is none."""
    monkeypatch.setattr(engine_options.ops, "build_info", lambda: {"cuda_devices": num_gpus})
    monkeypatch.setattr(engine_options, "Stream", lambda device: SimpleNamespace(device={"cuda": "cuda:0"}[device]))
    assert engine_options.find_device(EngineOptions().device) == chosen
    assert engine_options.find_device("cpu") == engine_options.find_device("cpu:0") == "cpu"


def test_an_engine_without_a_device_is_where_auto_is(folder):
    for make in (LLM, Engine, AsyncEngine):
        made = make(folder, num_blocks=64)
        try:
            engine = getattr(made, "engine", made)
            assert engine.device == engine_options.find_device("auto")
            sizes = engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens
            assert sizes == ((64, 2048) if engine.device == "cpu" else (256, 16384))
        finally:
            made.close()


def test_pool_size(folder):
    with LLM(folder, device="cpu", kv_cache_memory=10 * 16384 + 1) as llm:
        assert llm.manager.num_blocks == 10
    with LLM(folder, device="cpu", max_num_seqs=3) as llm:
        assert llm.manager.num_blocks == 3 * 256 / 16


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        LLM(tmp_path / "nowhere", device="cpu")
    with pytest.raises(TypeError, match="model is None but must be a folder, or a name on the Hugging Face hub"):
        LLM(None, device="cpu")


@pytest.mark.parametrize(("name", "value", "error"), [
    ("abort", ["a"], TypeError), ("explain", 5, TypeError), ("wake_up", 5, ValueError), ("wake_up", [[]], ValueError),
])  # fmt: skip
def test_arguments_of_methods(llm, name, value, error):
    with pytest.raises(error, match=re.escape(f" is {value!r} but must be ")):
        getattr(llm, name)(value)


@pytest.mark.parametrize("options", [
    {"chat_template": ["a"]}, {"chat_template_kwargs": 5}, {"chat_template_kwargs": {1: 2}},
])  # fmt: skip
def test_options_of_chats(llm, options):
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r} but must be ")):
        llm.chat([{"role": "user", "content": "a"}], **{"chat_template": "a"} | options)


def test_numbers_of_numpy():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int32(7))
    assert params == SamplingParams(temperature=0.5, max_tokens=3, seed=7)
    assert [type(v) for v in (params.temperature, params.max_tokens, params.seed)] == [float, int, int]


def test_params_are_keys_of_a_dict():
    """Those with a dict of biases, too."""
    options = dict(temperature=0.5, logit_bias={3: 1.0, 5: -2.0}, stop=["a"], allowed_token_ids=[3, 5])
    found = {SamplingParams(**options): "with", SamplingParams(): "without"}
    assert found[SamplingParams(**options)] == "with" and found[SamplingParams()] == "without"
    assert SamplingParams(**options | dict(logit_bias={3: 1.5})) not in found


@pytest.mark.parametrize("prompts", [None, 5, 2.5, np.array(1)])
def test_prompts_of_the_wrong_type(llm, prompts):
    with pytest.raises(TypeError, match=re.escape(f"prompts is {prompts!r} but must be a string or a list of prompts")):
        generate(llm, prompts)


NO_LISTS = {
    "a file": lambda: io.StringIO("abc\ncba\n"),
    "a set": lambda: {"abc", "cba"},
    "an iterator of characters": lambda: iter("abc"),
    "a generator": lambda: (text for text in ["abc"]),
    "a map": lambda: map(str, [1, 2]),
    "keys": lambda: {"abc": 1}.keys(),
    "bytes": lambda: b"abc",
    "a bytearray": lambda: bytearray(b"abc"),
    "a view": lambda: memoryview(b"abc"),
    "one list of token ids": lambda: [1, 2, 3],
    "one array of token ids": lambda: np.array([1, 2, 3]),
    "one array.array": lambda: array.array("i", [1, 2, 3]),
    "a range": lambda: range(3),
    "a dict of other keys": lambda: {"text": "abc"},
    "an empty dict": dict,
    "a message": lambda: {"role": "user", "content": "abc"},
    "messages": lambda: [{"role": "user", "content": "abc"}],
    "an image": lambda: {"prompt": "abc", "multi_modal_data": {"image": 1}},
    "a text that is none": lambda: {"prompt": [1, 2]},
    "token ids that are none": lambda: {"prompt_token_ids": "abc"},
    "no token ids": lambda: {"prompt_token_ids": None},
}


@pytest.mark.parametrize("name", NO_LISTS)
def test_what_is_no_list_of_prompts(llm, name):
    for call in (llm.generate, llm.embed):
        with pytest.raises(TypeError, match=r"prompt"):
            call(NO_LISTS[name](), use_tqdm=False)
    assert llm.stats().num_waiting == 0 and not llm.has_unfinished_requests()


def test_prompts_as_dicts(llm):
    """As vLLM's, alone or in a list; with both, the token ids are served, and the text is shown."""
    ids = [ALPHABET.index(c) for c in "12+34="]
    expected = generate(llm, ["12+34="], GREEDY)[0].token_ids
    ways = [{"prompt": "12+34="}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}, {"prompt": "x", "prompt_token_ids": ids},
            {"prompt": "12+34=", "prompt_token_ids": None}, MappingProxyType({"prompt": "12+34=", "multi_modal_data": None})]  # fmt: skip
    shown = ["12+34=", None, None, "x", "12+34=", "12+34="]
    together = generate(llm, [*ways, "12+34="], GREEDY)
    alone = [generate(llm, way, GREEDY)[0] for way in ways] + together[-1:]
    for output, single, text in zip(together, alone, [*shown, "12+34="], strict=True):
        assert (output.prompt, single.prompt) == (text, text)
        assert output.prompt_token_ids == single.prompt_token_ids == ids
        assert output.token_ids == single.token_ids == expected
    streamed = list(llm.stream(ways[1], GREEDY))
    assert [token for output in streamed for token in output.token_ids] == expected
    vectors = [llm.embed(way, use_tqdm=False)[0].embedding for way in (*ways, "12+34=")]
    assert all((vector == vectors[0]).all() for vector in vectors)
    llm.add_request(ways[0], GREEDY, "a")
    while llm.has_unfinished_requests():
        outputs = llm.step()
    assert outputs[-1].prompt == "12+34=" and outputs[-1].token_ids == expected
    assert [each.token_ids for each in generate(llm, np.array([ids, ids]), GREEDY)] == [expected] * 2
    assert [each.token_ids for each in generate(llm, deque([ids]), GREEDY)] == [expected]


@pytest.mark.parametrize("prompt", [["a"], [1.5], np.ones((2, 2), int)])
def test_a_prompt_that_holds_no_token_ids(llm, prompt):
    with pytest.raises(TypeError, match=r"prompts\[1\] holds no token ids: "):
        generate(llm, ["abc", prompt])


def test_a_text_that_is_no_unicode_fails_alone(llm):
    good, bad = generate(llm, ["abc", "ab\ud800"], GREEDY)
    assert good.error is None and len(good.token_ids) == 12
    assert (bad.finish_reason, bad.token_ids, bad.prompt_token_ids) == ("error", [], [])
    assert "surrogates not allowed" in str(bad.error)


def test_a_prompt_that_calls_generate(llm):
    """No lock is held while a prompt's own code runs."""

    class Prompt(list):
        def __iter__(self):
            return iter(generate(llm, ["abc"], GREEDY)[0].token_ids)

    results = []
    thread = threading.Thread(target=lambda: results.extend(generate(llm, [Prompt([1])], GREEDY)), daemon=True)
    thread.start()
    thread.join(20)
    assert results and results[0].prompt_token_ids == generate(llm, ["abc"], GREEDY)[0].token_ids
