"""pagedkv.integrations.transformers: its masks against transformers' own, and models with random weights by
attn_implementation="pagedkv" against the same by "eager": tokens in float32, logits in bfloat16."""

import importlib
import itertools
import sys

import pytest

torch = pytest.importorskip("torch", reason="transformers runs on it")
transformers = pytest.importorskip("transformers", reason="these tests run its models")

from transformers import ContinuousBatchingConfig, GenerationConfig, masking_utils  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.generation.continuous_batching.input_outputs import (  # noqa: E402
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner  # noqa: E402

from pagedkv.integrations.transformers import attention, batching, masks, register  # noqa: E402

register()

VOCABULARY, NUM_NEW = 97, 8
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=None,
    eos_token_id=None,
)
WINDOW = dict(sliding_window=7)
BART = dict(
    vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, forced_eos_token_id=None, pad_token_id=0,
    bos_token_id=1, eos_token_id=VOCABULARY, decoder_start_token_id=1,
)
MODELS = {  # what each adds
    "Qwen3": SIZES,  # norms of q and k
    "Mistral": SIZES | WINDOW,  # a window in all layers
    "Gemma2": SIZES | WINDOW | dict(attn_logit_softcapping=5.0, query_pre_attn_scalar=16),  # softcap, a window in half
    "GptOss": SIZES | WINDOW | dict(num_local_experts=4, num_experts_per_tok=2),  # sinks, a window in half
    "Phimoe": SIZES | WINDOW | dict(num_local_experts=4, num_experts_per_tok=2),  # a window that no layer names
    "Bart": BART,  # an encoder and cross-attention
}


def build(name, device, seed, dtype=torch.float32, **options):
    """A model with weights that attention matters for, on the device."""
    torch.manual_seed(seed)
    kind = "ForConditionalGeneration" if name == "Bart" else "ForCausalLM"
    model = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**MODELS[name] | options)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1 or parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.15)
    return model.to(device, dtype)


def draw(rng, *shape):
    return torch.from_numpy(rng.integers(1, VOCABULARY, shape))


def padded(rng, device, lengths=(1, 24, 15, 2), side="left"):
    """A batch of prompts, the first of one token."""
    ids, width = draw(rng, len(lengths), max(lengths)), max(lengths)
    places = torch.arange(width).flip(0) if side == "left" else torch.arange(width)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def by(model, name, run):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return run(model)


# --- masks


def meaning(mask, q_length, kv_length):
    """What a mask says, as bool [batch, queries, keys]."""
    said = masks.unpack(mask)
    left, right = said.window_size
    first, count = said.key_starts[:, None, None], said.context_lens[:, None, None]
    key = torch.arange(kv_length) - first  # the number of a key, and of the key at the place of a query
    place = torch.arange(q_length)[:, None] + count - q_length
    if right != 0:  # the queries of a bidirectional mask are its keys
        place = torch.arange(q_length)[:, None] - first
    sees = (key >= 0) & (key < count)
    if left >= 0:
        sees = sees & (key >= place - left)
    if right >= 0:
        sees = sees & (key <= place + right)
    return sees.expand(-1, q_length, -1)


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window of both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
}
REFUSED = "window of both sides", "right"


@pytest.mark.parametrize(
    "name, side", [each for each in itertools.product(FUNCTIONS, ("left", "right", None)) if each != REFUSED]
)
def test_masks_mean_what_those_of_transformers_mean(rng, name, side):
    function = FUNCTIONS[name]
    is_causal = masks.window_of(function)[1] == 0
    for _ in range(20):
        past, q_length, unused, dropped = (int(n) for n in rng.integers((0, 1, 0, 0), (9, 9, 4, 3)))
        if not is_causal:
            past = unused = dropped = 0
        kv_length = past + q_length + unused  # a static cache has unused slots, one of a window has dropped keys
        lengths = rng.integers(1, past + q_length + 1, 4) + dropped
        known = None
        if side:
            known = padded(rng, "cpu", (dropped + past + q_length, *lengths), side)["attention_mask"].bool()
        if side == "left" and rng.random() < 0.5:  # a mask of tokens to come, too
            known = torch.cat([known, torch.ones(5, unused, dtype=torch.bool)], 1)
        shape = dict(batch_size=5, q_length=q_length, kv_length=kv_length, kv_offset=dropped, q_offset=dropped + past)
        want = masking_utils.sdpa_mask(
            **shape, mask_function=function, attention_mask=known, allow_is_causal_skip=False
        )[:, 0]
        if rng.random() < 0.5:  # as of a static cache
            shape["q_offset"] = torch.tensor(shape["q_offset"])
        got = meaning(masks.make_mask(**shape, mask_function=function, attention_mask=known), q_length, kv_length)
        counts = torch.ones(5, q_length, dtype=torch.bool)  # what a query that is padding sees does not count
        if known is not None:
            counts = known[:, dropped + past :][:, :q_length]
        assert torch.equal(got[counts], want.expand(5, -1, -1)[counts])


# --- generate


@pytest.mark.parametrize("name", MODELS)
def test_generate(rng, seed, device, name):
    model, batch = build(name, device, seed), padded(rng, device, side="right" if name == "Bart" else "left")
    options = dict(max_new_tokens=NUM_NEW, do_sample=False)
    want = by(model, "eager", lambda model: model.generate(**batch, **options))
    assert torch.equal(by(model, "pagedkv", lambda model: model.generate(**batch, **options)), want)
    if name != "Bart":
        static = by(model, "pagedkv", lambda model: model.generate(**batch, **options, cache_implementation="static"))
        assert torch.equal(static, want)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "GptOss"])
def test_logits_in_bfloat16(rng, seed, device, name):
    dense = dict(num_experts_per_tok=4) if name == "GptOss" else {}  # all: rounding cannot choose others
    model, batch = build(name, device, seed, torch.bfloat16, **dense), padded(rng, device)
    exact = build(name, device, seed, **dense)
    exact.load_state_dict(model.state_dict())  # the same weights, so that only the arithmetic differs
    want, peer, got = (
        by(each, how, lambda model: model(**batch).logits.float())[batch["attention_mask"].bool()]
        for each, how in ((exact, "eager"), (model, "eager"), (model, "pagedkv"))
    )
    assert (got - want).norm() < 1.25 * (peer - want).norm() < 0.1 * want.norm()


def test_an_encoder_padded_on_either_side(rng, seed, device):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        initializer_range=0.15,
    )  # fmt: skip
    model = transformers.BertModel(config).eval().to(device)
    for side in "left", "right":
        batch = padded(rng, device, side=side)
        want, got = (by(model, how, lambda model: model(**batch)[0]) for how in ("eager", "pagedkv"))
        is_token = batch["attention_mask"].bool()
        torch.testing.assert_close(got[is_token], want[is_token], rtol=1e-4, atol=1e-4)


def test_a_prompt_in_parts(rng, seed, device):
    model, batch = build("Gemma2", device, seed), padded(rng, device)

    def run(model):
        cache, ids, mask, logits = transformers.DynamicCache(config=model.config), *batch.values(), []
        for start, stop in (0, 5), (5, 16), (16, 17), (17, 24):
            part = dict(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            logits.append(model(**part).logits)
        return torch.cat(logits, 1)[mask.bool()]

    torch.testing.assert_close(by(model, "pagedkv", run), by(model, "eager", run), rtol=1e-4, atol=1e-4)


def test_compiled_whole(rng, seed):
    model, batch = build("Qwen3", "cpu", seed, num_hidden_layers=1), padded(rng, "cpu")
    want = by(model, "pagedkv", lambda model: model(**batch, use_cache=False).logits)
    torch._dynamo.reset()
    mask = masks.make_mask(4, 24, 24, attention_mask=batch["attention_mask"].bool())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, want)


# --- continuous batching


def batching_config(device, page_size, can_be_captured=True, **options):
    is_new = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
    if device == "cpu" and not is_new:
        pytest.importorskip("psutil", reason="transformers before page_size asks it for the memory of a CPU")
    on_gpu = {} if device == "cpu" else dict(use_cuda_graph=can_be_captured)
    return ContinuousBatchingConfig(**{"page_size" if is_new else "block_size": page_size}, **options, **on_gpu)


def generate_batch(model, prompts, config):
    options = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = by(model, "pagedkv", lambda model: model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=config, progress_bar=False
    ))  # fmt: skip
    assert model.config._attn_implementation == "pagedkv"
    return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.rsplit("_", 1)[1]))]


# max_batch_tokens 16 cuts prompts into parts; max_blocks_per_request 0 leaves decodes without block tables; a padded
# step has tokens and requests that are none, as CUDA graphs need.
@pytest.mark.parametrize("name, page_size, max_batch_tokens, max_blocks, is_padded", [
    ("Qwen3", 8, 16, None, False), ("Qwen3", 5, 128, 0, False), ("Qwen3", 256, 128, 1, True), ("Qwen3", 4, 16, 0, True),
    ("Mistral", 8, 16, None, False), ("Gemma2", 4, 16, None, True), ("GptOss", 8, 128, None, False),
    ("Phimoe", 16, 16, None, False),
])  # fmt: skip
def test_generate_batch(rng, seed, device, monkeypatch, name, page_size, max_batch_tokens, max_blocks, is_padded):
    model, shared = build(name, device, seed), draw(rng, 33).tolist()
    prompts = [(shared if i % 2 else []) + draw(rng, length).tolist() for i, length in enumerate((1, 24, 15, 2, 9, 31))]
    one = dict(max_new_tokens=NUM_NEW, do_sample=False)
    want = [
        by(model, "eager", lambda model: model.generate(torch.tensor([prompt], device=device), **one))[0, len(prompt) :]
        for prompt in prompts
    ]
    steps, shared_tokens, gathers, updates = [], [], [], []

    def spy(owner, method, seen):
        original = getattr(owner, method)

        def call(*args, **options):
            result = original(*args, **options)
            seen.append((args, result))
            return result

        monkeypatch.setattr(owner, method, call)

    if is_padded:
        always = property(lambda self: True, lambda self, value: None)
        monkeypatch.setattr(ModelRunner, "pad_inputs", always, raising=False)
    spy(batching, "_make_step", steps)
    spy(PagedAttentionCache, "search_prefix_match", shared_tokens)
    spy(batching, "_update_ring", gathers)
    spy(PagedAttentionCache, "update", updates)
    num_blocks = 1024 // page_size + 4  # few enough that those of finished requests are used again
    config = batching_config(
        device, page_size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_blocks_per_request=max_blocks,
        max_requests_per_batch=3,
        can_be_captured=name not in ("GptOss", "Phimoe"),  # PyTorch 2.11 copies to the host to multiply by experts
    )  # fmt: skip
    got = generate_batch(model, prompts, config)
    assert got == [tokens.tolist() for tokens in want]
    all_see_all = name == "Qwen3"
    assert bool(gathers) is not all_see_all
    assert not all_see_all or all(result[0] is args[1] for args, result in updates)  # 5.24 calls it, which does nothing
    has_tables = {options.get("block_table") is not None for (*_, options), _ in steps}
    assert has_tables == ({False, True} if all_see_all and max_blocks != 0 else {False})
    if all_see_all and max_batch_tokens == 16:
        found = max(result for _, result in shared_tokens)  # of 33, in pages of 8
        assert found == 32 if device == "cpu" else found > 0  # a GPU may not have computed all of them yet


@pytest.mark.gpu
@pytest.mark.parametrize("can_be_captured", [True, False])
def test_the_first_batch_is_not_zeroed(rng, seed, cuda, monkeypatch, can_be_captured):
    """On a busy GPU: transformers' zeros are late, and a batch runs later still, long after its inputs were copied."""
    model, prompt, zeroed = build("Qwen3", cuda, seed), draw(rng, 16).tolist(), []
    zero, copy_inputs = ContinuousBatchingIOs._reset_static_tensors, ContinuousBatchingAsyncIOs.get_model_kwargs

    def zero_late(self, full_reset=False):
        if full_reset and self.device.type == "cuda":
            torch.cuda._sleep(100_000_000)  # clocks: 50 ms
            zeroed.append(self)
        zero(self, full_reset)

    def run_late(self, *args, **options):
        result = copy_inputs(self, *args, **options)
        self.compute_stream.wait_stream(torch.cuda.current_stream(cuda))  # on which the zeros are
        return result

    monkeypatch.setattr(ContinuousBatchingIOs, "_reset_static_tensors", zero_late)
    monkeypatch.setattr(ContinuousBatchingAsyncIOs, "get_model_kwargs", run_late)
    want = by(model, "eager", lambda model: model.generate(
        torch.tensor([prompt], device=cuda), max_new_tokens=NUM_NEW, do_sample=False
    ))[0, len(prompt) :]  # fmt: skip
    config = batching_config(cuda, 8, can_be_captured, num_blocks=64, max_batch_tokens=32, use_async_batching=True)
    assert generate_batch(model, [prompt], config) == [want.tolist()]
    assert len(set(zeroed)) == 2  # asynchronous batching has two sets of inputs


def test_other_names_are_left_to_transformers(seed):
    register()  # again: nothing is wrapped twice
    model = build("Qwen3", "cpu", seed)
    config = model.config
    for name, is_flash in ("sdpa", False), ("eager", False), ("flash_attention_2", True), (batching.NAME, True):
        config._attn_implementation = name
        assert initialization.is_flash_attention_requested(config) is is_flash
    for name, is_kept in ("sdpa", 0), (batching.NAME, 7):
        config._attn_implementation, settings = name, ContinuousBatchingConfig(max_blocks_per_request=7)
        initialization.ensure_decode_fast_path_is_available(config, settings, False)
        assert settings.max_blocks_per_request == is_kept


# --- what is refused


def refused_by_a_layer():
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    module = torch.nn.Module()
    return {
        "dropout": lambda: attention.attend(module, q, kv, kv, None, dropout=0.5),
        "gradients": lambda: attention.attend(module, q.clone().requires_grad_(), kv, kv, None),
        "output_attentions": lambda: attention.attend(module, q, kv, kv, None, output_attentions=True),
        "position_bias": lambda: attention.attend(module, q, kv, kv, None, position_bias=torch.zeros(1, 4, 3, 3)),
        "indices": lambda: attention.attend(module, q, kv, kv, None, indices=torch.zeros(1, 3, 2, dtype=torch.int64)),
        "cu_seq_lens_q": lambda: attention.attend(module, q, kv, kv, None, cu_seq_lens_q=torch.tensor([0, 3])),
        "value": lambda: attention.attend(module, q, kv, kv[..., :8], None),
        "attention_mask": lambda: attention.attend(module, q, kv, kv, torch.zeros(1, 1, 3, 3)),
    }


@pytest.mark.parametrize("name", refused_by_a_layer())
def test_a_layer_refuses(name):
    with pytest.raises(NotImplementedError, match=name):
        refused_by_a_layer()[name]()


def refused_masks():
    hole, right = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    hole[1, 2], right[1, 4] = False, False
    both_sides = masking_utils.sliding_window_bidirectional_mask_function(2)
    prefix = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    return [
        (dict(attention_mask=hole), "on the left or on the right"),
        (dict(attention_mask=right, mask_function=both_sides), "on the left of a sequence only"),
        (dict(mask_function=masking_utils.chunked_causal_mask_function(2, torch.zeros(2))), "not chunked_overlay"),
        (dict(mask_function=prefix), "not or_masks"),
    ]


@pytest.mark.parametrize("options, message", refused_masks())
def test_a_mask_that_has_no_form_is_refused(options, message):
    with pytest.raises(NotImplementedError, match=f"attention_mask: .*{message}"):
        masks.make_mask(2, 5, 5, **options)


def test_packed_sequences_are_refused(rng, seed):
    model = build("Qwen3", "cpu", seed)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(NotImplementedError, match="packed_sequence"):
        by(model, "pagedkv", lambda model: model(draw(rng, 1, 5), position_ids=positions, use_cache=False))
    torch._dynamo.reset()  # the compiler cannot look whether they are
    run = torch.compile(lambda model, ids, **options: model(ids, use_cache=False, **options).logits, backend="eager")
    ids = draw(rng, 2, 5)
    with pytest.raises(NotImplementedError, match="packed_sequence.* in compiled code pass attention_mask"):
        by(model, "pagedkv", lambda model: run(model, ids))
    got = by(model, "pagedkv", lambda model: run(model, ids, attention_mask=torch.ones_like(ids)))
    torch.testing.assert_close(got, by(model, "eager", lambda model: model(ids).logits), rtol=1e-4, atol=1e-4)


def test_a_release_without_what_is_hooked_into(monkeypatch):
    monkeypatch.delattr(initialization, "ensure_decode_fast_path_is_available")
    with pytest.raises(NotImplementedError, match="has no .*initialization.ensure_decode_fast_path_is_available"):
        register()


def test_one_row_of_no_keys(device):
    """A row that is all padding gives zeros."""
    known = torch.tensor([[True, True], [False, False]], device=device)
    mask = masks.make_mask(2, 2, 2, attention_mask=known)
    q, kv = torch.randn(2, 4, 2, 16, device=device), torch.randn(2, 2, 2, 16, device=device)
    out, _ = attention.attend(torch.nn.Module(), q, kv, kv, mask)
    assert not out[1].any() and torch.equal(out[0, 0], kv[0, :, 0].repeat_interleave(2, 0))


def test_without_transformers(monkeypatch):
    for name in list(sys.modules):
        if name.startswith("pagedkv.integrations."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs the package transformers, not installed"):
        importlib.import_module("pagedkv.integrations.transformers")
