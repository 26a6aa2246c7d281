"""decode_step: a decode step as one kernel, against the operations that it stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from checkpoints import tiny_config

from pagedkv import Stream, ops
from pagedkv.engine.cache.pool import KVCaches
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.registry import load_model, read_spec
from pagedkv.models.spec import Batch

PROBLEM = ops.build_info()["cuda_problem"]
gpu = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]
VOCAB, MAX_LEN, DEVICE = 4112, 5000, "cuda:0"
LISTS = "qkv_weights", "o_weights", "gate_up_weights", "down_weights", "q_norms", "k_norms", "k_caches", "v_caches"


def arguments(**changes):
    """Right ones, but for the device. A change of a list is one of its second element."""
    shapes = {
        "token_ids": ((2,), "int32"), "sampled": ((2,), "int32"), "positions": ((2,), "int32"),
        "slot_mapping": ((2,), "int32"), "block_tables": ((2, 3), "int32"), "context_lens": ((2,), "int32"),
        "temperatures": ((2,), "float32"), "seeds": ((2,), "int64"), "next_positions": ((2,), "int32"),
        "embedding": ((512, 64), "bfloat16"), "norm": ((64,), "bfloat16"), "head": ((512, 64), "bfloat16"),
        "cos_sin": ((99, 8), "float32"), "qkv_weights": ((32, 64), "bfloat16"), "o_weights": ((64, 16), "bfloat16"),
        "gate_up_weights": ((48, 64), "bfloat16"), "down_weights": ((64, 24), "bfloat16"), "q_norms": ((8,), "bfloat16"),
        "k_norms": ((8,), "bfloat16"), "k_caches": ((5, 4, 1, 8), "bfloat16"), "v_caches": ((5, 4, 1, 8), "bfloat16"),
        "words": ((9,), "int64"),
    }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        changed = ops.empty(*changes.get(name, shape))
        made[name] = [ops.empty(*shape), changed] if name in LISTS else changed
    return made | {"in_clusters": True}


def test_the_cpu_has_none():
    with pytest.raises(NotImplementedError, match="decode_step needs a Hopper GPU"):
        ops.decode_step(**arguments())
    words = arguments()
    del words["words"]
    with pytest.raises(NotImplementedError, match="decode_step needs a Hopper GPU"):
        ops.decode_step_words(**words)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "sampled: dim 0 is 3 but token_ids has T=2", {"sampled": ((3,), "int32")}),
        (TypeError, "embedding: dtype is float16", {"embedding": ((512, 64), "float16")}),
        (ValueError, r"qkv_weights\[1\]: dim 0 is 31 but the first layer has Q=32", {"qkv_weights": ((31, 64), "bfloat16")}),
        (ValueError, r"down_weights\[1\]: dim 0 is 65 but embedding has K=64", {"down_weights": ((65, 24), "bfloat16")}),
        (TypeError, r"k_caches\[1\].*dtypes are float8_e4m3fn and bfloat16", {"k_caches": ((5, 4, 1, 8), "float8_e4m3fn")}),
        (ValueError, r"k_caches\[1\]: dim 0 is 6 but", {"k_caches": ((6, 4, 1, 8), "bfloat16")}),
        (TypeError, "words: dtype is int32", {"words": ((9,), "int32")}),
    ],
)  # fmt: skip
def test_bad_calls(error, message, changes):
    with pytest.raises(error, match=message):
        ops.decode_step(**arguments(**changes))


def test_bad_lists():
    good = arguments()
    for name, value, message in (
        ("qkv_weights", [], "qkv_weights: there are 0 but must be 1 to 64"),
        ("o_weights", good["o_weights"][:1], "o_weights: there are 1 but must be 2"),
        ("k_norms", [], "k_norms: there are 0 but must be 2"),
        ("q_norms", [], "k_norms: there are 2 but must be 0"),
        ("v_caches", good["k_caches"], "overlap"),
    ):
        with pytest.raises((ValueError, BufferError), match=message):
            ops.decode_step(**good | {name: value})
    with pytest.raises(ValueError, match="k_scale: is given but the caches are bfloat16"):
        ops.decode_step(**good, k_scale=0.5)
    with pytest.raises(ValueError, match="eps"):
        ops.decode_step(**good, eps=-1.0)


# --- what a model says


def model_on_cpu(folder, dtype="bfloat16", batch_invariant=False, **changes):
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    spec = read_spec(folder)
    caches = KVCaches(spec, dtype, 4, "cpu")
    caches.allocate(3, 0)
    return load_model(spec, DummyCheckpoint(dtype, "cpu", batch_invariant=batch_invariant), 64), caches.layers


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_models_arguments(tmp_path, family):
    model, layers = model_on_cpu(tmp_path, family=family)
    given = model.step_arguments(layers)
    assert [each.shape for each in given["down_weights"]] == [(64, 96)] * 2
    assert [each.shape for each in given["gate_up_weights"]] == [(192, 64)] * 2
    assert len(given["q_norms"]) == len(given["k_norms"]) == (2 if family == "qwen3" else 0)
    assert [(k.data_ptr(), v.data_ptr()) for k, v in zip(given["k_caches"], given["v_caches"], strict=True)] == [
        (k.data_ptr(), v.data_ptr()) for k, v in layers
    ]
    rows = arguments()
    names = list(rows)[:9]
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):  # all fits together
        ops.decode_step_words(**{name: rows[name] for name in names}, **given, in_clusters=True)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("in bfloat16", {"dtype": "float32"}),
        ("not batch-invariant", {"batch_invariant": True}),
        ("qkv_weights of layer 0 is quantised, has a bias", {"attention_bias": True}),
        ("layer 0 has no plain MLP", {"family": "qwen3_moe"}),
        ("layer 1 has a window", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_models_that_are_no_kernel(tmp_path, message, options):
    model, layers = model_on_cpu(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        model.step_arguments(layers)


# --- on a GPU


def write_shape(folder, **changes):
    config = tiny_config(
        hidden_size=1024, intermediate_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=3, vocab_size=VOCAB, max_position_embeddings=MAX_LEN, **changes,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Case:
    lens: tuple[int, ...]
    block_size: int = 16
    fp8: bool = False
    group: int = 2
    tied: bool = True


class Setting:
    """A model, two equal caches and a batch, whose tokens are those of the step before."""

    def __init__(self, case: Case, folder):
        rng = np.random.default_rng(1)
        write_shape(folder, tie_word_embeddings=case.tied)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8 * case.group}))
        spec = read_spec(folder)
        self.model = load_model(spec, DummyCheckpoint("bfloat16", DEVICE), MAX_LEN)
        pages = [-(-n // case.block_size) for n in case.lens]
        self.num_pages, self.rows = sum(pages) + 2, len(case.lens)
        self.caches = [KVCaches(spec, "float8_e4m3fn" if case.fp8 else "bfloat16", case.block_size, DEVICE) for _ in range(2)]
        for caches in self.caches:
            caches.allocate(self.num_pages, 0)
        slots = np.arange(self.num_pages * case.block_size, dtype=np.int32)
        for pairs in zip(*(caches.layers for caches in self.caches), strict=True):
            key, value = (there(rng.standard_normal((len(slots), 8, 128)).astype(np.float32), "bfloat16") for _ in range(2))
            for k_cache, v_cache in pairs:
                ops.store_kvcache(key, value, k_cache, v_cache, there(slots))
        order, table, at = rng.permutation(self.num_pages), np.zeros((self.rows, max(*pages, 1) + 1), np.int32), 0
        for row, count in enumerate(pages):
            table[row, :count], at = order[at : at + count], at + count
        lens = np.array(case.lens, np.int32)
        positions = np.maximum(lens - 1, 0)
        slots = table[np.arange(self.rows), positions // case.block_size] * case.block_size + positions % case.block_size
        self.slots = np.where(lens > 0, slots, -1).astype(np.int32)
        self.before = rng.integers(0, VOCAB, self.rows).astype(np.int32)
        self.ids = -1 - np.arange(self.rows, dtype=np.int32)[::-1]
        rows = np.arange(self.rows)
        self.batch = Batch(
            None, there(positions), there(self.slots), there(table), there(lens), None, 1, {}, None,
            there(np.where(rows % 2, 0.8, 0).astype(np.float32)), there(rng.integers(0, 1 << 40, self.rows)), there(lens), 0,
        )  # fmt: skip

    def start(self):
        self.batch.token_ids, sampled = there(self.ids), there(self.before)
        return sampled

    def twin(self):
        """The logits by many kernels."""
        sampled, model, batch = self.start(), self.model, self.batch
        ops.take_sampled(batch.token_ids, sampled)
        hidden = model.forward(batch, self.caches[0].layers, model.allocate_buffers(self.rows))
        return np.array(model.logits(hidden, out=model.allocate_logits(self.rows)).tolist(), np.float32)

    def assert_tokens(self, tokens, logits):
        """Each wins with the row's own noise once its logit is raised by ten times what two right computations are
        apart."""
        assert min(tokens) >= 0
        logits = logits.copy()
        logits[np.arange(self.rows), tokens] += 0.1
        numbers = self.batch.temperatures, self.batch.seeds, self.batch.next_positions
        assert ops.sample(there(logits), *numbers).tolist() == tokens

    def arguments(self, sampled):
        batch = self.batch
        return self.model.step_arguments(self.caches[1].layers) | {
            "token_ids": batch.token_ids, "sampled": sampled, "positions": batch.positions,
            "slot_mapping": batch.slot_mapping, "block_tables": batch.block_tables, "context_lens": batch.context_lens,
            "temperatures": batch.temperatures, "seeds": batch.seeds, "next_positions": batch.next_positions,
        }  # fmt: skip

    def words(self, in_clusters):
        count = ops.decode_step_words(**self.arguments(self.start()), in_clusters=in_clusters)
        return there(np.zeros(count, np.int64))

    def step(self, words, in_clusters):
        sampled = self.start()
        ops.decode_step(**self.arguments(sampled), words=words, in_clusters=in_clusters)
        return sampled

    def content(self, which):
        """Of all pages of a cache, as bytes by layer."""
        (content,) = self.caches[which].read(np.arange(self.num_pages), self.num_pages)
        return content


def there(array, dtype=None):
    return ops.asarray(array, dtype, DEVICE)


def floats(content):
    return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def assert_caches(case, setting, used, others):
    """Only the slots in use were written, with what the many kernels wrote. These round probabilities and the products
    before norms to bfloat16, too: from the second layer on two right computations are 0.005 to 0.012 apart."""
    share = len(used) / (setting.num_pages * case.block_size)  # of all slots
    for i, (theirs, ours, before) in enumerate(zip(setting.content(0), setting.content(1), others, strict=True)):
        if case.fp8:  # the heads of a slot are apart; of right ones 5 % are rounded otherwise, later up to 26 %
            assert np.mean(ours != before) <= share and np.mean(ours != theirs) <= (0.1 if i < 2 else 0.5) * share
            continue
        theirs, ours, before = (each.reshape(-1, 2 * 8 * 128) for each in (theirs, ours, before))
        changed = np.flatnonzero((ours != before).any(1))
        assert set(changed) <= set(used) and len(changed) == len(used)
        expected = floats(theirs[used].reshape(-1))
        apart = np.linalg.norm(floats(ours[used].reshape(-1)) - expected) / np.linalg.norm(expected)
        assert apart <= (0.01 if i < 2 else 0.03), (i // 2, "keys" if i % 2 == 0 else "values")


CASES = {
    "one": Case((400,)),
    "first": Case((1,)),
    "page": Case((16,)),
    "next page": Case((17,), block_size=16),
    "long": Case((4000,)),
    "two": Case((333, 17)),
    "padding": Case((40, 0)),
    "pages of 1": Case((70, 300), block_size=1),
    "pages of 256": Case((700,), block_size=256),
    "fp8": Case((400,), fp8=True),
    "fp8, four heads": Case((33, 800), fp8=True, group=4, tied=False),
    "four heads": Case((500,), group=4),
}


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("in_clusters", [True, False])
    @pytest.mark.parametrize("name", CASES)
    def test_step(self, tmp_path, name, in_clusters):
        case = CASES[name]
        setting = Setting(case, tmp_path)
        logits, words = setting.twin(), setting.words(in_clusters)
        others = setting.content(1)
        tokens = setting.step(words, in_clusters).tolist()
        setting.assert_tokens(tokens, logits)
        assert [setting.step(words, in_clusters).tolist() for _ in range(2)] == [tokens] * 2
        used = [slot for slot in setting.slots.tolist() if slot >= 0]
        assert_caches(case, setting, used, others)
        ops.check_errors()

    @pytest.mark.parametrize("in_clusters", [True, False])
    def test_a_thousand_runs_have_equal_bits(self, tmp_path, in_clusters):
        setting = Setting(Case((777, 130)), tmp_path)
        words, last = setting.words(in_clusters), setting.caches[1].layers[-1][0]
        page = int(setting.slots[0]) // 16
        expected, bits = setting.step(words, in_clusters).tolist(), last[page : page + 1].tolist()
        for _ in range(1000):
            assert setting.step(words, in_clusters).tolist() == expected
        assert last[page : page + 1].tolist() == bits

    @pytest.mark.parametrize("in_clusters", [True, False])
    def test_beside_another_stream(self, tmp_path, in_clusters):
        setting = Setting(Case((300,)), tmp_path)
        words, a = setting.words(in_clusters), there(np.ones((4096, 4096), np.float32), "bfloat16")
        expected, own, other = setting.step(words, in_clusters).tolist(), Stream(DEVICE), Stream(DEVICE)
        out = ops.empty((4096, 4096), "bfloat16", DEVICE)
        for _ in range(20):
            with other:
                for _ in range(5):
                    ops.linear(a, a, out=out)
            with own:
                assert setting.step(words, in_clusters).tolist() == expected

    @pytest.mark.parametrize("in_clusters", [True, False])
    def test_after_a_failure(self, tmp_path, in_clusters):
        setting = Setting(Case((300,)), tmp_path)
        words = setting.words(in_clusters)
        expected = setting.step(words, in_clusters).tolist()
        first = words[:1].tolist()[0]
        words[:1].copy_(np.array([first + (1 << 32)]))
        assert setting.step(words, in_clusters).tolist() == [-1]
        words[:1].copy_(np.array([words[:1].tolist()[0] % (1 << 32)]))
        assert setting.step(words, in_clusters).tolist() == expected

    def test_refusals(self, tmp_path):
        setting = Setting(Case((5,)), tmp_path)
        good = setting.arguments(setting.start())
        with pytest.raises(ValueError, match="words: dim 0 is 7 but must be "):
            ops.decode_step(**good, words=ops.empty(7, "int64", DEVICE), in_clusters=True)
        with pytest.raises(ValueError, match="embedding: dim 0 is 4103 but must be a multiple of 16"):
            ops.decode_step_words(**good | {name: good[name][:4103] for name in ("embedding", "head")}, in_clusters=False)
        with pytest.raises(BufferError, match="does not begin at a multiple of 128 bytes"):
            memory = ops.empty(1024 * VOCAB + 8, "bfloat16", DEVICE)
            ops.decode_step_words(**good | {"head": memory[8:].view((VOCAB, 1024))}, in_clusters=True)
