"""Requests with adapters of low rank: against merged models, several in a batch, slots, the prefix cache, bad adapters."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
from checkpoints import save_pretrained, write_model
from lora_adapters import ALL, write_adapter, write_merged
from model_oracle import assert_close, oracle_logits, oracle_tokens, poison, record_logits
from tiny_engine import by_hand, engine, generate

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine import LoRARequest
from pagedkv.engine.scheduling.adapter_slots import AdapterSlots
from pagedkv.models.adapter import Adapter, read_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = {
    "a": {"seed": 1},
    "b": {"seed": 2, "r": 7, "lora_alpha": 3, "targets": ("q_proj", "v_proj", "down_proj")},
    "c": {"seed": 3, "r": 1, "use_rslora": True, "targets": ("k_proj", "o_proj", "gate_proj"), "layers": (1,)},
    "d": {"seed": 4, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 5}, "dtype": "float16"},
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The base model, adapters, and the merged model of each of them."""
    home = tmp_path_factory.mktemp("lora")
    write_model(home / "base")
    for name, how in KINDS.items():
        write_merged(home / f"merged {name}", write_adapter(home / name, **how))
    return home


def lora(home, name: str) -> LoRARequest | None:
    return LoRARequest(name, "abcd".index(name) + 1, home / name) if name else None


def prompts_of(rng, count: int, most: int = 30) -> list[list[int]]:
    return [rng.integers(0, 97, rng.integers(2, most)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def expected(home):
    """The greedy tokens of prompts by the merged models, each alone: {name: function}."""
    llms = {name: LLM(home / f"merged {name}" if name else home / "base", device="cpu", num_blocks=200) for name in ("", *KINDS)}
    yield lambda name, prompt: list(generate(llms[name], [prompt], GREEDY)[0].token_ids)
    for llm in llms.values():
        llm.close()


def lora_engine(home, place, **options):
    return engine(home / "base", place, **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | options)


# --- right


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_a_merged_model(home, rng, device, name):
    """At every position, in prompts and in decodes."""
    prompts = prompts_of(rng, 3)
    recorded = []
    for folder, options, request in ((f"merged {name}", {}, None), ("base", {"enable_lora": True}, lora(home, name))):
        with LLM(home / folder, device=device, block_size=4, num_blocks=100, max_num_batched_tokens=16, enforce_eager=True, **options) as llm:
            poison(llm)
            parts = record_logits(llm)
            outputs = llm.generate(prompts, GREEDY, lora_request=request, use_tqdm=False)
            tokens = [output.token_ids for output in outputs]
            recorded.append((tokens, {seq: np.concatenate([each for _, each in found]) for seq, found in parts.items()}))
    (merged_tokens, merged), (tokens, logits) = recorded
    assert tokens == merged_tokens
    assert merged.keys() == logits.keys()
    for seq, each in logits.items():
        assert_close(each, merged[seq], 1e-4)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 14, "swap_space": 1 << 16}, {"num_blocks": 14}], ids=str)
def test_several_in_a_batch(home, expected, rng, place, options):
    """With none, more adapters than slots, chunks of prompts, and pages that do not suffice."""
    names = ["", "a", "a", "b", "b", "c", "", "d", "a", "c", "c", "", "b", "d"]
    prompts = [rng.integers(0, 97, rng.integers(10, 14)).tolist() for _ in names]
    with lora_engine(home, place, **options) as llm:
        requests = [lora(home, name) for name in names]
        outputs = llm.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False)
        assert llm.manager.num_used_blocks == 0 and (llm.stats().num_preemptions > 0) == ("num_blocks" in options)
        assert (llm.scheduler.queues.num_swaps > 0) == ("swap_space" in options)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert output.error is None and list(output.token_ids) == expected(name, prompt), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_families(tmp_path, rng, family):
    """Biases of q, k and v among them."""
    write_model(tmp_path / "base", family)
    write_merged(tmp_path / "merged", write_adapter(tmp_path / "a", family), family)
    prompts = prompts_of(rng, 3)
    with LLM(tmp_path / "merged", device="cpu", num_blocks=50) as llm:
        merged = [output.token_ids for output in generate(llm, prompts, GREEDY)]
    with LLM(tmp_path / "base", device="cpu", num_blocks=50, enable_lora=True) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path / "a")), use_tqdm=False)
    assert [output.token_ids for output in outputs] == merged


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(home, rng, device, dtype):
    """The first logits are those of the float32 engine, as far as 16 bits go."""
    prompt = prompts_of(rng, 1)[0]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = []
    for each in ("float32", dtype):
        with LLM(home / "base", device=device, dtype=each, num_blocks=50, enable_lora=True) as llm:
            (output,) = llm.generate([prompt], params, lora_request=lora(home, "a"), use_tqdm=False)
            found.append(output.outputs[0].logprobs[0])
    exact, rounded = found
    for token in exact.keys() & rounded.keys():
        assert abs(exact[token] - rounded[token]) < 0.5
    assert len(exact.keys() & rounded.keys()) >= 3


def test_quantised_weights(home, rng):
    """LoRA beside float8: the answers without an adapter are those of the quantised model, those with it are not."""
    prompts = prompts_of(rng, 4)
    with LLM(home / "base", device="cpu", quantization="fp8", num_blocks=100) as llm:
        plain = [output.token_ids for output in generate(llm, prompts, GREEDY)]
    with LLM(home / "base", device="cpu", quantization="fp8", num_blocks=100, enable_lora=True) as llm:
        assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == plain
        outputs = llm.generate(prompts, GREEDY, lora_request=lora(home, "a"), use_tqdm=False)
    assert all(output.error is None for output in outputs)
    assert [output.token_ids for output in outputs] != plain


def test_peft_says_the_same(tmp_path, rng):
    """Saved by PEFT itself, and computed by it beside transformers' model."""
    peft = pytest.importorskip("peft", reason="the oracle is PEFT's own model")
    torch = pytest.importorskip("torch")
    model = save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", rank_pattern={r"layers.0.mlp.up_proj": 2},
                             alpha_pattern={"q_proj": 9}, use_rslora=True, task_type="CAUSAL_LM")  # fmt: skip
    adapted, generator = peft.get_peft_model(model, config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "a")
    adapted.eval()
    prompt = prompts_of(rng, 1)[0]
    with LLM(tmp_path / "base", device="cpu", num_blocks=50, enable_lora=True) as llm:
        parts = record_logits(llm)
        (output,) = llm.generate([prompt], GREEDY, lora_request=LoRARequest("a", 1, tmp_path / "a"), use_tqdm=False)
    assert output.error is None and list(output.token_ids) == oracle_tokens(adapted, prompt, 12)
    (found,) = parts.values()
    logits = np.concatenate([each for _, each in found])
    assert_close(logits, oracle_logits(adapted, [*prompt, *output.token_ids][:-1]), 1e-4)


# --- the ways in


def test_stream_chat_embed_and_async(home, expected, rng):
    prompt, request = prompts_of(rng, 1)[0], lora(home, "a")
    right = expected("a", prompt)
    with LLM(home / "base", device="cpu", num_blocks=100, enable_lora=True) as llm:
        pieces = [token for output in llm.stream(prompt, GREEDY, lora_request=request) for token in output.outputs[0].token_ids]
        assert pieces == right
        llm.add_request(prompt, GREEDY, "mine", lora_request=request)
        (output,) = [output for _ in range(100) for output in llm.step() if output.finished] if llm.has_unfinished_requests() else []
        assert list(output.token_ids) == right
        vectors = [llm.embed([prompt], lora_request=each, use_tqdm=False)[0].embedding for each in (None, request)]
        assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
        chat = [{"role": "user", "content": "1+1="}]
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        outputs = [llm.chat(chat, GREEDY, chat_template=template, lora_request=each, use_tqdm=False)[0] for each in (None, request)]
        assert outputs[0].token_ids == generate(llm, ["1+1="], GREEDY)[0].token_ids != outputs[1].token_ids

        async def run():
            async for output in AsyncEngine(llm).generate(prompt, GREEDY, lora_request=request):
                tokens = output.outputs[0].token_ids
            vector = await AsyncEngine(llm).embed(prompt, lora_request=request)
            return list(tokens), vector.embedding

        tokens, vector = asyncio.run(run())
        assert tokens == right and np.abs(vector - vectors[1]).max() < 1e-5


def test_siblings_and_prompt_logprobs(home, rng):
    """Answers that are forked have the adapter of their prompt."""
    prompt = prompts_of(rng, 1)[0]
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=8, prompt_logprobs=1, ignore_eos=True)
    found = []
    for folder, options, request in (("merged b", {}, None), ("base", {"enable_lora": True}, lora(home, "b"))):
        with LLM(home / folder, device="cpu", num_blocks=50, max_num_seqs=2, **options) as llm:
            (output,) = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
            assert output.error is None
            found.append(([each.token_ids for each in output.outputs], output.prompt_logprobs))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1][1:], found[1][1][1:], strict=True):
        assert one.keys() == other.keys() and all(abs(one[token] - other[token]) < 1e-3 for token in one)


def test_nothing_changes_without_enable_lora(home):
    with LLM(home / "base", device="cpu", num_blocks=50) as llm:
        model = llm._runner.model
        assert not model.lora and all(block.norm is None for layer in model.layers for block in layer)
        assert llm._runner.memory._decode_arrays(1)[1].adapter_slots is None


# --- the prefix cache


def test_prefixes_are_shared_by_content(home, expected, tmp_path, rng, place):
    """By requests of one adapter, also under another name; not with another adapter or with none."""
    prompt = rng.integers(0, 97, 21).tolist()
    write_adapter(tmp_path / "copy of a", **KINDS["a"])
    with lora_engine(home, place) as llm:
        def cached(request):
            (output,) = llm.generate([prompt], GREEDY, lora_request=request, use_tqdm=False)
            assert list(output.token_ids) == expected({None: "", "copy": "a"}.get(request and request.lora_name, request and request.lora_name), prompt)
            return output.num_cached_tokens

        assert cached(None) == 0 and cached(lora(home, "a")) == 0 and cached(lora(home, "b")) == 0
        assert cached(lora(home, "a")) == 20 and cached(None) == 20
        assert cached(LoRARequest("copy", 9, tmp_path / "copy of a")) == 20


@pytest.mark.parametrize("in_place", [False, True])
def test_the_same_name_with_other_weights(home, expected, tmp_path, rng, in_place):
    """Neither stale keys and values nor stale matrices."""
    prompt = rng.integers(0, 97, 21).tolist()
    request = LoRARequest("mine", 1, tmp_path / "mine")
    write_adapter(tmp_path / "mine", **KINDS["a"])
    with LLM(home / "base", device="cpu", block_size=4, num_blocks=100, enable_lora=True) as llm:
        def answer():
            (output,) = llm.generate([prompt], GREEDY, lora_request=request, use_tqdm=False)
            return list(output.token_ids), output.num_cached_tokens

        assert answer() == (expected("a", prompt), 0) and answer() == (expected("a", prompt), 20)
        if not in_place:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                os.unlink(tmp_path / "mine" / name)
        time.sleep(0.02)  # a file system's clock ticks
        write_adapter(tmp_path / "mine", **KINDS["b"])
        assert answer() == (expected("b", prompt), 0) and answer() == (expected("b", prompt), 20)
        time.sleep(0.02)
        write_adapter(tmp_path / "mine", **KINDS["a"] | {"lora_alpha": 4, "seed": 1})  # only the configuration and B's scale
        assert answer()[1] == 0


# --- slots


def test_an_adapter_waits_for_a_slot(home, expected, rng):
    """Requests without one pass it, others with one do not, and explain() says why."""
    prompts = prompts_of(rng, 4)
    with lora_engine(home, ("cpu", 0), max_loras=1) as llm:
        by_hand(llm)
        ids = [llm.add_request(prompt, GREEDY, lora_request=lora(home, name)) for prompt, name in zip(prompts, ("a", "b", "a", ""), strict=True)]
        llm.step()
        running = [seq.request.id for seq in llm.scheduler.queues.running]
        assert running == [ids[0], ids[3]]
        assert all("finds no slot: sequences that run have other adapters in all 1 (max_loras)" in llm.explain(i) for i in ids[1:3])
        done = {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                done[output.request_id] = list(output.token_ids)
    assert list(done) and done == {id: expected(name, prompt) for id, prompt, name in zip(ids, prompts, ("a", "b", "a", ""), strict=True)}


def test_who_waits_for_a_slot_preempts_nobody(home, rng):
    with lora_engine(home, ("cpu", 0), max_loras=1, max_num_seqs=1) as llm:
        by_hand(llm)
        first = llm.add_request([1, 2, 3], GREEDY, lora_request=lora(home, "a"), priority=5)
        llm.step()
        llm.add_request([1, 2, 3], GREEDY, lora_request=lora(home, "b"), priority=0)
        for _ in range(5):
            llm.step()
            assert [seq.request.id for seq in llm.scheduler.queues.running] == [first]
        while llm.has_unfinished_requests():
            llm.step()
        assert llm.stats().num_preemptions == 0


def adapter(number: int) -> Adapter:
    return Adapter(bytes([number]), {})


def test_the_least_recently_used_slot_gives_way():
    slots = AdapterSlots(2)
    for number in (1, 2):
        slots.pin(adapter(number))
    assert slots.slots_of([adapter(1), None, adapter(2)]) == [0, -1, 1]
    assert [slot for slot, _ in slots.take_writes()] == [0, 1] and slots.take_writes() == []
    assert slots.has_room(adapter(1)) and not slots.has_room(adapter(3))
    slots.pin(adapter(1))
    slots.unpin(adapter(1))
    assert not slots.has_room(adapter(3))  # another sequence still has it
    slots.unpin(adapter(1))
    slots.unpin(adapter(2))
    slots.pin(adapter(1))  # still there
    assert slots.take_writes() == [] and slots.slots_of([adapter(1)]) == [0]
    slots.pin(adapter(3))
    assert slots.slots_of([adapter(3)]) == [1] and slots.take_writes() == [(1, adapter(3))]
    slots.clear()
    assert slots.has_room(adapter(2)) and slots.take_writes() == []


def test_after_an_error_slots_are_written_anew(home, expected, rng):
    """A step that fails before its adapters are written must not leave slots that seem to hold them."""
    prompts = prompts_of(rng, 3)
    with lora_engine(home, ("cpu", 0)) as llm:
        model, failures = llm._runner.model, []
        write = model.write_adapter

        def fail_once(slot, adapter):
            if not failures:
                failures.append(slot)
                raise MemoryError("for the test")
            write(slot, adapter)

        model.write_adapter = fail_once
        outputs = llm.generate(prompts, GREEDY, lora_request=lora(home, "a"), use_tqdm=False)
        assert failures
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.error is None and list(output.token_ids) == expected("a", prompt)


# --- what is refused


def tensor(kind: str = "A", module: str = "model.layers.0.self_attn.q_proj") -> str:
    return f"base_model.model.{module}.lora_{kind}.weight"


BAD = {  # how an adapter is written, and the error
    "rank": ({"r": 20}, ValueError, "r is 20 for model.layers.0.*but max_lora_rank is 8"),
    "dora": ({"use_dora": True}, NotImplementedError, "use_dora is True; only False is supported"),
    "bias": ({"bias": "all"}, NotImplementedError, "bias is 'all'; only 'none' is supported"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, NotImplementedError, "modules_to_save is .'lm_head'."),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, NotImplementedError, "fan_in_fan_out is True"),
    "layer_replication": ({"layer_replication": [[0, 1]]}, NotImplementedError, "layer_replication is"),
    "tokens": ({"trainable_token_indices": [1]}, NotImplementedError, "trainable_token_indices is"),
    "parameters": ({"target_parameters": ["x"]}, NotImplementedError, "target_parameters is"),
    "pissa": ({"init_lora_weights": "pissa"}, NotImplementedError, "init_lora_weights is 'pissa', which changes the base model's weights"),
    "pattern": ({"layers_pattern": "h"}, NotImplementedError, "layers_pattern is 'h'"),
    "type": ({"peft_type": "LOHA"}, NotImplementedError, "peft_type is 'LOHA'; only 'LORA' is supported"),
    "no type": ({"peft_type": None}, ValueError, "peft_type is missing"),
    "unknown": ({"frobnicate": 1}, ValueError, "frobnicate is 1, a setting that is not known here"),
    "no rank": ({"rank_pattern": {"x": 0}}, ValueError, "rank_pattern is 0 but must be an integer >= 1"),
    "alpha": ({"alpha_pattern": {"y": "x"}}, ValueError, "alpha_pattern is 'x' but must be a number"),
    "rslora": ({"use_rslora": "no"}, ValueError, "use_rslora is 'no'"),
    "digits": ({"alpha_pattern": {"z_proj": 10**400}}, ValueError, "alpha_pattern is 1000.* but must be a number"),
    "regex": ({"target_modules": "(("}, ValueError, "adapter_config.json: target_modules holds '\\(\\(', which is no pattern: missing"),
    "regex of ranks": ({"rank_pattern": {"q_proj)": 4}}, ValueError, "rank_pattern holds 'q_proj\\)', which is no pattern: unbalanced"),
    "no targets": ({"target_modules": None}, ValueError, "target_modules is missing"),
    "targets": ({"target_modules": [1]}, ValueError, "target_modules is .1. but must be a pattern or a list"),
    "fewer": ({"target_modules": ["q_proj"]}, ValueError, "an adapter for model.layers.0.self_attn.k_proj, but target_modules does not name it"),
    "more": ({"targets": ("q_proj",), "target_modules": ["q_proj", "up_proj"]}, ValueError, "no adapter for model.layers.0.mlp.up_proj, but"),
    "layers": ({"layers_to_transform": [0]}, ValueError, "an adapter for model.layers.1.self_attn.q_proj, but"),
    "shape": ({"change": lambda t: t.update({tensor(): t[tensor()][:, :-1]})}, ValueError, "lora_A.weight' has shape .4, 63. but must have .4, 64."),
    "swapped": ({"change": lambda t: t.update({tensor("B"): t[tensor("B")].T.copy()})}, ValueError, "lora_B.weight' has shape"),
    "dtype": ({"change": lambda t: t.update({tensor(): t[tensor()].astype(np.int32)})}, NotImplementedError, "has dtype I32"),
    "missing": ({"change": lambda t: t.pop(tensor("B"))}, ValueError, "lora_B.weight' is missing"),
    "head": ({"change": lambda t: t.update({tensor(module="lm_head"): t[tensor()]})}, NotImplementedError,
             "tensor 'base_model.model.lm_head.lora_A.weight': this model has no such projection"),
    "expert": ({"change": lambda t: t.update({tensor(module="model.layers.0.mlp.experts.3.up_proj"): t[tensor()]})}, NotImplementedError, "experts.3"),
    "magnitude": ({"change": lambda t: t.update({"base_model.model.x.lora_magnitude_vector": t[tensor()]})}, NotImplementedError, "lora_magnitude_vector"),
    "nothing": ({"change": lambda t: t.clear()}, ValueError, "no tensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def cpu(home):
    with LLM(home / "base", device="cpu", num_blocks=100, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_fails_alone(home, cpu, tmp_path, name):
    how, kind, message = BAD[name]
    write_adapter(tmp_path, **how)
    requests = [LoRARequest("bad one", 1, tmp_path), None, lora(home, "a")]
    outputs = cpu.generate([[1, 2, 3]] * 3, GREEDY, lora_request=requests, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["error", "length", "length"]
    assert isinstance(outputs[0].error, kind)
    with pytest.raises(kind, match=f"(?s)adapter 'bad one': .*{message}"):
        raise outputs[0].error


def test_bad_folders(cpu, tmp_path):
    def error(path):
        (output,) = cpu.generate([[1, 2]], GREEDY, lora_request=LoRARequest("x", 1, path), use_tqdm=False)
        return f"{type(output.error).__name__}: {output.error}"

    assert "no folder" in error(tmp_path / "nowhere")
    assert "no adapter_config.json: not the folder of an adapter" in error(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin is not read: save it as safetensors" in error(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "peft_type is missing" in error(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    assert error(tmp_path).startswith("ValueError: adapter 'x': ")


def test_regular_expressions_and_excluded_modules(cpu, tmp_path):
    """As PEFT reads them; what is written has q and v of layer 1 alone."""
    how = {"targets": ("q_proj", "v_proj"), "layers": (1,), "layers_to_transform": None}
    shapes = cpu._runner.model.adapter_shapes
    for config in (
        {"target_modules": r".*\.1\.self_attn\.(q|v)_proj"},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "1.self_attn.v_proj"]},
        {"target_modules": [f"model.layers.1.self_attn.{each}_proj" for each in "qv"], "layers_to_transform": [0]},  # whole names
        {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*|.*mlp.*|.*(k|o)_proj"},
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"], "layers_to_transform": 1, "layers_pattern": ["layers"]},
    ):  # fmt: skip
        write_adapter(tmp_path, **how | config)
        found = read_adapter(tmp_path, shapes, 8, "float32")
        assert sorted(found.matrices) == ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]


def test_names_of_a_base_model(cpu, tmp_path):
    """As PEFT writes them for one without a head, such as Qwen3-Embedding: without "model.", in patterns, too."""

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.model.", "model.")] = tensors.pop(name)

    shapes, how = cpu._runner.model.adapter_shapes, {"targets": ("q_proj", "up_proj"), "layers": (1,)}
    write_adapter(tmp_path / "with a head", **how)
    expected = read_adapter(tmp_path / "with a head", shapes, 8, "float32")
    assert len(expected.matrices) == 2
    for i, config in enumerate((
        {}, {"layers_to_transform": None, "target_modules": ["layers.1.self_attn.q_proj", "1.mlp.up_proj"]},
        {"layers_to_transform": None, "target_modules": r"layers\.1\.(self_attn\.q|mlp\.up)_proj"},
    )):  # fmt: skip
        write_adapter(tmp_path / str(i), change=rename, **how | config)
        found = read_adapter(tmp_path / str(i), shapes, 8, "float32")
        assert found.digest == expected.digest and found.matrices.keys() == expected.matrices.keys()
    write_adapter(tmp_path / "wrong", change=rename, **how | {"target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match=r"an adapter for layers.1.mlp.up_proj, but target_modules does not name it"):
        read_adapter(tmp_path / "wrong", shapes, 8, "float32")


def test_wrong_arguments_raise_at_once(home, cpu):
    with pytest.raises(TypeError, match="lora_request is 'a' but must be a LoRARequest"):
        cpu.generate([[1]], GREEDY, lora_request="a")
    with pytest.raises(TypeError, match="lora_request is 3 but must be a LoRARequest"):
        cpu.add_request([1], GREEDY, lora_request=3)
    with pytest.raises(ValueError, match="2 lora_requests for 1 prompts"):
        cpu.generate([[1]], GREEDY, lora_request=[None, None])
    for arguments, error, message in (
        (("", 1, "x"), TypeError, "lora_name is ''"), (("a", 0, "x"), ValueError, "lora_int_id is 0"), (("a", 1, 3), TypeError, "lora_path is 3"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            LoRARequest(*arguments)
    with LLM(home / "base", device="cpu", num_blocks=20) as llm, pytest.raises(ValueError, match="but the engine has no enable_lora=True"):
        llm.generate([[1]], GREEDY, lora_request=lora(home, "a"))
    for options, message in (
        ({"max_loras": 2}, "max_loras is 2 but enable_lora is False"), ({"max_lora_rank": 4}, "max_lora_rank is 4 but"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras is 0"), ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank is 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LLM(home / "base", device="cpu", **options)


def test_a_mixture_of_experts_takes_adapters_of_attention(tmp_path, rng):
    write_model(tmp_path / "base", "qwen3_moe")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    write_merged(tmp_path / "merged", write_adapter(tmp_path / "a", "qwen3_moe", targets=attention), "qwen3_moe")
    write_adapter(tmp_path / "experts", "qwen3_moe", targets=ALL)
    prompts = prompts_of(rng, 2)
    with LLM(tmp_path / "merged", device="cpu", num_blocks=50) as llm:
        merged = [output.token_ids for output in generate(llm, prompts, GREEDY)]
    with LLM(tmp_path / "base", device="cpu", num_blocks=50, enable_lora=True) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=LoRARequest("a", 1, tmp_path / "a"), use_tqdm=False)
        assert [output.token_ids for output in outputs] == merged
        (output,) = llm.generate(prompts[:1], GREEDY, lora_request=LoRARequest("e", 2, tmp_path / "experts"), use_tqdm=False)
        assert "mlp.experts" in str(output.error) and "no such projection that takes an adapter" in str(output.error)
