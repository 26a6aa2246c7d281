"""The kernel of a whole decode step (csrc/cuda/step), run on the CPU with CTAs that wait for each other: against float64."""

from dataclasses import dataclass, replace

import emulated
import numpy as np
import oracle
import pytest

from pagedkv import ops

DIM = 128


@dataclass
class Case:
    rows: int
    q_heads: int
    kv_heads: int = 2
    hidden: int = 512
    ffn: int = 256
    layers: int = 2
    vocab: int = 304
    block_size: int = 16
    lens: tuple[int, ...] = (40,)
    cluster: bool = True
    stages: int = 5
    steps: int = 1
    missing: int = 0
    fp8: bool = False


def bf16(x):
    """Rounded to bfloat16, as float64; its bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64), bits


def of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


FIELDS = (
    "is_cluster", "num_layers", "hidden", "ffn", "q_heads", "kv_heads", "vocab", "max_positions", "block_size",
    "num_blocks", "num_rows", "table_stride", "num_stages", "num_steps", "num_missing", "is_fp8",
)  # fmt: skip


class Model:
    """Random weights and a cache, as bits of bfloat16."""

    def __init__(self, case, seed):
        rng = np.random.default_rng(seed)
        self.case, heads = case, case.q_heads + 2 * case.kv_heads

        # Weights that the copy engine reads: in one piece of memory, at multiples of 128 bytes.
        sizes = (heads * DIM, case.hidden), (case.hidden, case.q_heads * DIM), (2 * case.ffn, case.hidden), (case.hidden, case.ffn)
        total = case.layers * sum(a * b + 512 for a, b in sizes) + case.vocab * case.hidden + 1024
        self.memory, self.at = np.full(total, 0x7FC0, np.uint16), 0
        self.at = -self.memory.ctypes.data % 128 // 2
        self.first_weight = self.memory[self.at :]

        def weight(*shape, scale=None, mean=0.0):
            return bf16(mean + rng.standard_normal(shape) * (scale or shape[-1] ** -0.5))[1]

        def placed(*shape, scale=None):
            self.at += 64 * int(rng.integers(0, 8))
            its = self.memory[self.at : self.at + np.prod(shape)].reshape(shape)
            its[:] = weight(*shape, scale=scale)
            self.at += its.size
            return its

        self.num_pages = sum(-(-n // case.block_size) + 1 for n in case.lens)
        cache = self.num_pages, case.block_size, case.kv_heads, DIM
        self.layers = [
            (
                *(placed(*size) for size in sizes), weight(DIM, scale=0.1, mean=1), weight(DIM, scale=0.1, mean=1),
                *((rng.integers(0, 0x48, cache) + 128 * rng.integers(0, 2, cache)).astype(np.uint8) if case.fp8 else weight(*cache, scale=1) for _ in range(2)),
            )
            for _ in range(case.layers)
        ]  # fmt: skip
        self.embedding, self.norm = placed(case.vocab, case.hidden, scale=1), weight(case.hidden, scale=0.1, mean=1)
        angles = np.arange(400)[:, None] * 1e6 ** (-np.arange(DIM // 2) / (DIM / 2))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.lens = np.array(case.lens, np.int32)
        self.positions = np.maximum(self.lens - 1, 0).astype(np.int32)
        self.tokens = rng.integers(0, case.vocab, case.rows).astype(np.int32)
        order, at = rng.permutation(self.num_pages).astype(np.int32), 0
        self.table = np.full((case.rows, max(-(-n // case.block_size) + 1 for n in case.lens)), -1, np.int32)
        for row, n in enumerate(case.lens):
            count = -(-n // case.block_size) + 1
            self.table[row, :count], at = order[at : at + count], at + count
        row = np.arange(case.rows)
        page = self.table[row, self.positions // case.block_size]
        self.slots = (page * case.block_size + self.positions % case.block_size).astype(np.int32)
        self.slots[self.lens == 0] = -1
        self.temperatures = np.where(row % 2, 0.8, 0).astype(np.float32)
        self.seeds = rng.integers(0, 1 << 40, case.rows)
        self.out, self.first_out = np.full((2, case.rows), -7, np.int32)
        self.dump = np.zeros((case.layers, 2, case.rows, case.hidden), np.uint16)
        self.status = np.zeros(4, np.uint32)

    def run(self, step):
        case = self.case
        values = (
            case.cluster, case.layers, case.hidden, case.ffn, case.q_heads, case.kv_heads, case.vocab, len(self.cos_sin),
            case.block_size, self.num_pages, case.rows, self.table.shape[1], case.stages, case.steps, case.missing, case.fp8,
        )  # fmt: skip
        struct = emulated.struct_of(*FIELDS)(*values)
        pointers = np.array([[each.ctypes.data for each in layer] for layer in self.layers], np.uint64)
        arrays = (
            pointers, self.first_weight, self.embedding, self.norm, self.cos_sin, self.tokens, self.positions, self.slots,
            self.lens, self.table, self.temperatures, self.seeds, self.out, self.first_out, self.dump, self.status,
        )  # fmt: skip
        step(struct, *arrays)

    # --- the oracle: a half of a layer, from what the kernel had before it

    def rms(self, x):
        return 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def turn(self, x, weight, position):
        x = bf16(bf16(x * self.rms(x))[0] * of(weight))[0]
        cos, sin = np.split(self.cos_sin[position].astype(np.float64), 2)
        low, high = np.split(x, 2, -1)
        return bf16(np.concatenate([low * cos - high * sin, high * cos + low * sin], -1))[0]

    def read(self, cache, scale):
        if not self.case.fp8:
            return of(cache)
        code, sign = cache & 127, np.where(cache < 128, 1, -1)
        return scale * sign * np.where(code < 8, code / 512, (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7.0))

    def attention_half(self, layer, x):
        case = self.case
        qkv, o, _, _, q_norm, k_norm, k_cache, v_cache = self.layers[layer]
        y = bf16(x @ of(qkv).T * self.rms(x))[0].reshape(case.rows, -1, DIM)
        out = np.zeros((case.rows, case.q_heads, DIM))
        for row, n in enumerate(case.lens):
            if n == 0:
                continue
            q = self.turn(y[row, : case.q_heads], q_norm, n - 1)
            new_k = self.turn(y[row, case.q_heads : -case.kv_heads], k_norm, n - 1)
            at = np.arange(n)
            page, place = self.table[row, at // case.block_size], at % case.block_size
            k, v = (self.read(each[page, place], scale) for each, scale in ((k_cache, 0.25), (v_cache, 0.5)))
            new_v = y[row, -case.kv_heads :]
            if case.fp8:  # attended to as it is stored
                new_k, new_v = (
                    scale * oracle.rounded(new / scale, "float8_e4m3fn") for new, scale in ((new_k, 0.25), (new_v, 0.5))
                )
            assert is_near(k[-1], new_k), (layer, row, "the key in the cache")
            assert is_near(v[-1], new_v), (layer, row, "the value in the cache")
            k, v = (np.repeat(each, case.q_heads // case.kv_heads, 1) for each in (k, v))
            p = np.exp(np.einsum("hd,khd->hk", q, k) * DIM**-0.5)
            out[row] = np.einsum("hk,khd->hd", p / p.sum(1, keepdims=True), v)
        return bf16(x + bf16(out)[0].reshape(case.rows, -1) @ of(o).T)[0]

    def mlp_half(self, layer, x):
        gate_up, down = self.layers[layer][2:4]
        gate, up = np.split(bf16(x @ of(gate_up).T * self.rms(x))[0], 2, -1)
        return bf16(x + bf16(bf16(gate / (1 + np.exp(-gate)))[0] * up)[0] @ of(down).T)[0]

    def logits(self, x):
        return bf16(x * of(self.norm))[0] @ of(self.embedding).T * self.rms(x)


CASES = {
    "one": Case(1, 4),
    "panels": Case(1, 4, hidden=1024, ffn=512, layers=1, lens=(64,), stages=3),  # of all kinds more than one
    "first": Case(1, 4, layers=1, lens=(1,)),
    "two": Case(2, 4, lens=(33, 7), block_size=1),
    "fp8": Case(2, 8, lens=(33, 70), block_size=4, fp8=True, layers=1),
    "long": Case(1, 4, layers=1, lens=(300,)),
    "words": Case(1, 4, cluster=False),
    "panels of words": Case(1, 4, hidden=1024, ffn=512, layers=1, lens=(64,), stages=3, cluster=False),
    "words of two": Case(2, 4, lens=(17, 0), layers=1, cluster=False),
    "long words": Case(1, 4, layers=1, lens=(390,), cluster=False),
    "words of fp8": Case(2, 8, lens=(33, 170), block_size=4, fp8=True, layers=1, cluster=False),
}


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return emulated.load(tmp_path_factory.mktemp("step"), "step_on_cpu.cpp", "step_on_cpu")


def is_near(ours, theirs):
    return np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max() and np.linalg.norm(
        ours - theirs
    ) <= 4e-3 * np.linalg.norm(theirs)


def check(case, model):
    before = of(model.embedding[model.tokens])
    for layer in range(case.layers):
        after = of(model.dump[layer])
        assert is_near(after[0], model.attention_half(layer, before)), (layer, "attention")
        assert is_near(after[1], model.mlp_half(layer, after[0])), (layer, "mlp")
        before = after[1]
    logits = ops.asarray(model.logits(before).astype(np.float32))
    drawn = ops.sample(logits, model.temperatures, model.seeds, model.positions)
    assert model.out.tolist() == np.asarray(drawn).tolist()


@pytest.mark.parametrize("name", CASES)
def test_step(step, name):
    case = CASES[name]
    model = Model(case, seed=sum(map(ord, name)))
    model.run(step)
    epochs = 2 * case.layers + 1
    assert model.status.tolist() == [epochs, 0, 0, 1]
    check(case, model)


@pytest.mark.parametrize(("cluster", "missing"), [(True, 4), (False, 1)])
def test_missing_cta(step, cluster, missing):
    """Who waits for it ends all the same, the step has no tokens, and the next one is right."""
    case = replace(CASES["one"], layers=1, steps=2, cluster=cluster, missing=missing)
    model = Model(case, seed=5)
    model.run(step)
    assert model.first_out.tolist() == [-1]
    assert model.status[1] == 0 and model.status[3] == 2
    check(case, model)


@pytest.mark.parametrize("cluster", [True, False])
def test_nan(step, cluster):
    """Words say when they were written, whatever they are: nobody waits for a NaN, and no token comes of it."""
    case = replace(CASES["one"], layers=1, cluster=cluster)
    model = Model(case, seed=9)
    model.embedding[model.tokens[0], 7] = 0x7FC0
    model.run(step)
    assert model.out.tolist() == [-1]
    assert model.status[1] == 0


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("token_ids: dim 0 is 3 but must be 1 or 2", {"rows": 3, "lens": (4, 4, 4)}),
        ("o_weights: the query heads are 6 but must be 2 or 4 for each KV head", {"q_heads": 6}),
        ("o_weights: the query heads are 16 but", {"q_heads": 16}),
        ("k_caches: the KV heads are 9 but must be 1 to 8", {"q_heads": 18, "kv_heads": 9}),
        ("embedding: dim 1 is 768 but must be a multiple of", {"hidden": 768}),
        ("down_weights: dim 1 is 320 but must be a multiple of", {"ffn": 320}),
        ("embedding: dim 0 is 300 but must be a multiple of 16", {"vocab": 300}),
        ("embedding: dim 0 is 112 but must be a multiple of 16, and 256 times", {"vocab": 112}),
    ],
)
def test_refusal(step, what, changes):
    with pytest.raises(AssertionError, match=f"^b'{what}"):
        Model(replace(CASES["one"], **changes), seed=1).run(step)
