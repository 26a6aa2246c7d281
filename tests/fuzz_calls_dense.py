"""The dense operations and copies, for the fuzzer of calls; see fuzz_calls_ops.py."""

import numpy as np
import oracle
from fuzz_calls_memory import FLOATS, View, place
from fuzz_calls_ops import F8, Draw, Operation, Outcome, near, numbers

# --- rows


def draw_rows_of(table: str, ids: str):
    def draw(d: Draw) -> dict:
        dtype, rows, width = d.dtype(), d.size(), d.size(9)
        chosen = d.rng.integers(0, max(rows, 1), d.size() if rows else 0)
        a = {table: d.tensor((rows, width), dtype), ids: d.array(chosen, d.one_of("int32", "int64"))}
        return a | d.some(out=lambda: d.output((len(chosen), width), dtype)) | d.stream()

    return Operation(draw, lambda a: {"out": Outcome(numbers(getattr(a, table))[numbers(getattr(a, ids))])})


def draw_embedding(d: Draw) -> dict:
    a = draw_rows_of("weight", "token_ids").draw(d)
    return a | d.some(first_row=lambda: int(d.rng.integers(0, a["weight"].shape[0] + 1)))


def expect_embedding(a) -> dict:
    table, rows = numbers(a.weight), numbers(a.token_ids).astype(np.int64) - int(a.first_row or 0)
    out = np.zeros((len(rows), table.shape[1]))
    is_here = (rows >= 0) & (rows < len(table))
    out[is_here] = table[rows[is_here]]
    return {"out": Outcome(out)}


def draw_norm(d: Draw) -> dict:
    dtype, shape = d.dtype(), (d.size(), d.size(300 if d.is_large else 20))
    return {
        "x": d.tensor(shape, dtype, 2),
        "weight": d.tensor(shape[1:], dtype),
        **d.some(
            eps=lambda: d.one_of(1e-6, 1e-3, 1, np.float32(0.1)),
            residual=lambda: d.output(shape, dtype),
            out=lambda: d.output(shape, dtype),
        ),
        **d.stream(),
    }


def expect_norm(a) -> dict:
    """In float16 and bfloat16 each of three roundings may fall on the other side."""
    residual = numbers(a.residual)
    out, new = oracle.rms_norm(numbers(a.x), numbers(a.weight), float(a.eps), a.x.dtype, residual=residual)
    return {"out": near(out, a.x.dtype, 3), **({} if new is None else {"residual": Outcome(new)})}


def draw_scale(d: Draw) -> dict:
    dtype, shape = d.dtype(), (d.size(), d.size(20))
    return {
        "x": d.tensor(shape, dtype),
        "factors": d.tensor(shape[1:], dtype),
        **d.some(out=lambda: d.output(shape, dtype)),
        **d.stream(),
    }


def draw_silu(d: Draw) -> dict:
    dtype, rows, width = d.dtype(), d.size(), d.size(300 if d.is_large else 20)
    return {
        "x": d.tensor((rows, 2 * width), dtype, 4),
        **d.some(out=lambda: d.output((rows, width), dtype)),
        **d.stream(),
    }


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def draw_weight(d: Draw, outputs: int, width: int, dtype: str, experts: tuple[int, ...] = ()) -> tuple[dict, int]:
    """One of x's dtype or a quantised one, with all that belongs to it, and the width, which int4 may change. `experts`: as
    many of them."""
    if not d.maybe(0.4):
        return {"weight": d.tensor((*experts, outputs, width), dtype), **d.some(0.1, weight_scales=lambda: None)}, width
    columns = d.one_of(8, 16, 40, max(width, 1))
    if d.everything or d.one_of(True, False):
        columns = -(-columns // 8) * 8
        groups = d.one_of(0, 1, 2, 3) if width == 0 else d.one_of(1, 2, 3)
        width, block = groups * columns, (1, columns)
        a = {"weight": d.array(d.rng.integers(0, 256, (*experts, outputs, width // 2)), "uint8")}
        a |= {"weight_scales": d.tensor((*experts, outputs, groups), d.dtype(), 0.2)}
        a |= d.some(weight_zeros=lambda: d.array(d.rng.integers(0, 17, (*experts, outputs, groups)), "uint8"))
    else:
        block = d.one_of(1, 2, 128, max(outputs, 1)), d.one_of(1, 3, columns)
        blocks = -(-outputs // block[0]), -(-width // block[1])
        a = {"weight": d.tensor((*experts, outputs, width), F8), "weight_scales": d.tensor((*experts, *blocks), "float32")}
    is_even = all(size % each == 0 for size, each in zip((outputs, width), block, strict=True))
    if not is_even or outputs * width == 0 or d.maybe(0.5):
        a["weight_block"] = d.one_of(tuple, list)(block)
    return a, width


def weight_of(a) -> np.ndarray:
    """What the weight of a call stands for, or those of experts."""
    weight, scales, zeros = (None if each is None else numbers(each) for each in (a.weight, a.weight_scales, a.weight_zeros))
    if scales is None:
        return weight
    if weight.ndim == 2:
        return dequantised(a, weight, scales, zeros)
    return np.stack([dequantised(a, *(each if each is None else each[e] for each in (weight, scales, zeros))) for e in range(len(weight))])


def dequantised(a, weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    weight = oracle.unpacked_int4(weight) if a.weight.dtype == "uint8" else weight
    given = (-1, -1) if a.weight_block is None else a.weight_block
    if weight.size == 0:
        return weight.astype(np.float64)
    block = [weight.shape[i] // scales.shape[i] if given[i] == -1 else int(given[i]) for i in range(2)]
    return oracle.dequantized(weight, scales, block, 0 if a.weight.dtype == F8 else 8 if zeros is None else zeros)


def draw_linear(d: Draw) -> dict:
    dtype, rows, outputs, width = d.dtype(), d.size(10), d.size(20), d.size(40)
    weight, width = draw_weight(d, outputs, width, dtype)
    nothing = dict.fromkeys(("gate_up", "rms_eps", "x_squares", "out_squares", "bias") if d.everything else ())
    x = d.floats((rows, width), dtype)
    a = {
        "x": place(d.rng, x, dtype, may_repeat=True, may_be_readonly=True),
        **weight,
        **d.some(weight_is_constant=d.flag, quantize_x=d.flag, batch_invariant=d.flag),
        **d.stream(),
    }
    if outputs % 2 == 0 and d.maybe(0.4):
        a |= {"gate_up": d.output((rows, outputs), dtype), **d.some(rms_eps=lambda: d.one_of(1e-6, 0.5))}
        a |= d.some(out=lambda: d.output((rows, outputs // 2), dtype), add_to_out=lambda: d.one_of(False, 0))
        if "rms_eps" not in a:
            return nothing | a | d.some(bias=lambda: d.tensor((outputs,), dtype))
        if width:
            count = d.one_of(*divisors(width))
            squares = (x.astype(np.float64) ** 2).reshape(rows, count, width // count).sum(2)
            a |= d.some(x_squares=lambda: place(d.rng, squares.astype(np.float32), "float32", is_plain=True))
        return nothing | a
    a |= d.some(
        bias=lambda: d.tensor((outputs,), dtype), out=lambda: d.output((rows, outputs), d.one_of(dtype, "float32"))
    )
    a |= d.some(add_to_out=d.flag) if "out" in a else {}
    if outputs:
        shape = rows, d.one_of(*divisors(outputs))
        a |= d.some(out_squares=lambda: d.output(shape, "float32", is_plain=True))
    return nothing | a


def expect_linear(a) -> dict:
    """The rounding of the product is felt behind the gate too; sums of K products have a size of about sqrt(K)."""
    dtype, scale = a.x.dtype, 2 + a.x.shape[1] ** 0.5
    product = oracle.linear(numbers(a.x), weight_of(a), numbers(a.bias))
    if a.gate_up is None:
        out = product + (numbers(a.out) if a.add_to_out else 0)
        of_values = a.out is None or a.weight_scales is not None  # quantised ones may be rounded to x's dtype
        expected = {"out": near(out, dtype if of_values else a.out.dtype, scale * (30 if dtype == "float32" else 1))}
        if a.out_squares is not None:
            rows, count = a.out_squares.shape
            sums = (out**2).reshape(rows, count, out.shape[1] // count).sum(2)
            tolerance = 8 * scale * oracle.tolerance(dtype) * (1 + sums.max(initial=0))
            expected["out_squares"] = Outcome(sums, tolerance, tolerance)
        return expected
    product = product if a.rms_eps is None else oracle.over_rms(product, numbers(a.x), float(a.rms_eps))
    tolerance = 2 * scale * oracle.tolerance(dtype) * (1 + np.abs(product).max(initial=0))
    return {
        "out": Outcome(oracle.silu_and_mul(product, "float32"), tolerance, tolerance),
        "gate_up": Outcome(None),
    }


def draw_algorithms(d: Draw) -> dict:
    dtype, rows, outputs, width = d.dtype(), d.size(), d.size(20), d.size(40)
    weight, width = draw_weight(d, outputs, width, dtype)
    return {
        "x": d.tensor((rows, width), dtype),
        **weight,
        "out": d.output((rows, outputs), dtype),
    }


# --- mixture of experts


def at_least_one(d: Draw, most: int) -> int:
    return int(d.rng.integers(1, most + 1))


def draw_route(d: Draw) -> dict:
    rows, experts = d.size(), at_least_one(d, 40)
    shape = rows, at_least_one(d, min(experts, 32))
    return {
        "logits": d.tensor((rows, experts), d.dtype(), 3),
        "out_experts": d.output(shape, "int32", is_plain=True),
        "out_weights": d.output(shape, "float32", is_plain=True),
        **d.some(normalize=d.flag),
        **d.stream(),
    }


def expect_route(a) -> dict:
    experts, weights = oracle.route_experts(numbers(a.logits), a.out_experts.shape[1], bool(a.normalize))
    return {"out_experts": Outcome(experts), "out_weights": near(weights, "float32", 4)}


def draw_expert_linear(d: Draw) -> dict:
    dtype, rows, outputs, width = d.dtype(), d.size(), d.size(20), d.size(40)
    experts, chosen = at_least_one(d, 9), at_least_one(d, 4)
    weight, width = draw_weight(d, outputs, width, dtype, (experts,))
    is_summed = d.maybe(0.5)
    a = {
        "x": d.tensor((rows, chosen, width) if is_summed else (rows, width), dtype),
        **weight,
        "experts": d.array(d.rng.integers(0, experts, (rows, chosen)), is_plain=True),
        **d.some(weight_is_constant=d.flag, experts_are_constant=d.flag, batch_invariant=d.flag),
        **d.stream(),
    }
    if is_summed:
        a |= {"weights": d.tensor((rows, chosen), "float32", is_plain=True, may_repeat=False)}
        a |= d.some(out=lambda: d.output((rows, outputs), dtype), gated=lambda: d.one_of(False, 0))
        return a | (d.some(add_to_out=d.flag) if "out" in a else {})
    is_gated = outputs % 2 == 0 and d.maybe(0.5)
    a |= {"gated": True} if is_gated else {}
    return a | d.some(out=lambda: d.output((rows, chosen, outputs // 2 if is_gated else outputs), dtype))


def expect_expert_linear(a) -> dict:
    """As of linear."""
    dtype, scale = a.x.dtype, 2 + a.x.shape[-1] ** 0.5
    out = oracle.expert_linear(numbers(a.x), weight_of(a), numbers(a.experts), numbers(a.weights))
    if a.add_to_out:
        out = out + numbers(a.out)
    if not a.gated:
        return {"out": near(out, dtype, scale * (30 if dtype == "float32" else 1) * (1 if a.weights is None else 4))}
    tolerance = 2 * scale * oracle.tolerance(dtype) * (1 + np.abs(out).max(initial=0))
    gated = oracle.silu_and_mul(out.reshape(a.experts.size, out.shape[2]), "float32").reshape(*out.shape[:2], out.shape[2] // 2)
    return {"out": Outcome(gated, tolerance, tolerance)}


def draw_moe_mlp(d: Draw) -> dict:
    """Logits are small integers, so that it is certain which are the greatest."""
    dtype, rows, hidden, size = d.dtype(), d.size(), d.size(40), d.size(20)
    experts = at_least_one(d, 9)
    chosen = at_least_one(d, min(experts, 4))
    x, router = (place(d.rng, d.rng.integers(-1, 2, shape), dtype, may_repeat=True) for shape in ((rows, hidden), (experts, hidden)))
    return {
        "x": x,
        "router": router,
        "gate_up": d.tensor((experts, 2 * size, hidden), dtype, 0.3),
        "down": d.tensor((experts, hidden, size), dtype),
        **d.some(normalize=d.flag, weight_is_constant=d.flag, batch_invariant=d.flag),
        "logits": d.output((rows, experts), "float32"),
        "experts": d.output((rows, chosen), "int32", is_plain=True),
        "weights": d.output((rows, chosen), "float32", is_plain=True),
        "activation": d.output((rows, chosen, size), dtype, is_plain=True),
        **(d.some(add_to_out=d.flag) | {"out": d.output((rows, hidden), dtype)} if d.maybe(0.5) else {}),
        **d.stream(),
    }


def expect_moe_mlp(a) -> dict:
    """As of linear, twice: what the first product errs by, the second multiplies."""
    weights, dtype = (numbers(a.router), numbers(a.gate_up), numbers(a.down)), a.x.dtype
    out, experts, of_experts = oracle.moe_mlp(numbers(a.x), *weights, a.experts.shape[1], dtype, bool(a.normalize))
    scale = (4 + a.x.shape[1] ** 0.5) * (4 + a.down.shape[2] ** 0.5)
    if a.add_to_out:
        out = out + numbers(a.out)
    tolerance = scale * (30 if dtype == "float32" else 2) * oracle.tolerance(dtype) * (1 + np.abs(out).max(initial=0))
    return {"out": Outcome(out, tolerance, tolerance), "experts": Outcome(experts), "weights": near(of_experts, "float32", 4),
            "logits": Outcome(None), "activation": Outcome(None)}  # fmt: skip


def draw_lora_add(d: Draw) -> dict:
    dtype, rows, outputs, width, rank, slots = d.dtype(), d.size(), d.size(20), d.size(40), d.size(9), d.size(4)
    return {
        "x": d.tensor((rows, width), dtype),
        "a": d.tensor((slots, rank, width), dtype),
        "b": d.tensor((slots, outputs, rank), dtype),
        "slots": d.array(d.rng.integers(-2, slots, rows), is_plain=True),
        "out": d.output((rows, outputs), dtype),
        **d.stream(),
    }


def expect_lora_add(a) -> dict:
    """As of linear, twice: what the first product errs by, the second multiplies."""
    rank, width = a.a.shape[1:]
    scale = (2 + width**0.5) * (2 + rank**0.5)
    out = numbers(a.out) + oracle.lora(numbers(a.x), numbers(a.a), numbers(a.b), numbers(a.slots))
    return {"out": near(out, a.x.dtype, scale * (30 if a.x.dtype == "float32" else 1))}


# --- copies


def draw_pair(d: Draw):
    """Two dtypes between which numbers are converted, a shape and numbers of the first."""
    shape = tuple(d.size(4) for _ in range(d.rng.integers(0, 5)))
    if d.rng.random() < 0.3:
        dtype = d.one_of("uint8", "int32", "int64")
        return dtype, dtype, shape, d.rng.integers(0, 99, shape)
    src, dst = d.one_of(*FLOATS, F8), d.one_of(*FLOATS, F8)
    values = d.floats(shape, src, d.one_of(1e-4, 1, 300, 1e30))
    odd = d.rng.random(shape) < 0.1
    return (
        src,
        dst,
        shape,
        np.where(odd, oracle.rounded(d.one_of(np.nan, np.inf, -np.inf, -0.0, 1e-7, 448.5), src), values),
    )


def draw_copy_(d: Draw) -> dict:
    src, dst, shape, values = draw_pair(d)
    target = place(d.rng, d.rng.integers(0, 9, shape), dst)
    target.kind = "tensor"
    return {"self": target, "src": place(d.rng, values, src, may_repeat=True, may_be_readonly=True), **d.stream()}


def converted(values, dtype: str):
    return oracle.rounded(values, dtype) if dtype[0] in "fb" else values


def draw_asarray(d: Draw) -> dict:
    src, dst, _, values = draw_pair(d)
    obj = place(d.rng, values, src, may_repeat=True, may_be_readonly=True)
    return {"obj": obj, **d.some(dtype=lambda: d.one_of(dst, None), device=lambda: d.one_of("cpu", "cpu:0", None))}


def expect_asarray(a) -> dict:
    if not isinstance(a.obj, View):  # a number, a sequence of them, bytes: what NumPy makes of it is NumPy's
        return {"return": Outcome(None)}
    return {"return": Outcome(converted(numbers(a.obj), a.obj.dtype if a.dtype is None else str(a.dtype)))}


DENSE_OPERATIONS = {
    "embedding": Operation(draw_embedding, expect_embedding),
    "gather_rows": draw_rows_of("x", "indices"),
    "rms_norm": Operation(draw_norm, expect_norm),
    "scale_columns": Operation(
        draw_scale, lambda a: {"out": Outcome(oracle.rounded(numbers(a.x) * numbers(a.factors), a.x.dtype))}
    ),
    "silu_and_mul": Operation(
        draw_silu, lambda a: {"out": near(oracle.silu_and_mul(numbers(a.x), a.x.dtype), a.x.dtype, 2)}
    ),
    "linear": Operation(draw_linear, expect_linear),
    "linear_squares": Operation(lambda d: draw_algorithms(d) | d.some(batch_invariant=d.flag), lambda a: {}, lambda a: ["return"]),
    "linear_algorithms": Operation(draw_algorithms, None),
    "use_linear_algorithm": Operation(lambda d: draw_algorithms(d) | {"algorithm": bytes(64)}, None),
    "route_experts": Operation(draw_route, expect_route, lambda a: []),
    "expert_linear": Operation(draw_expert_linear, expect_expert_linear),
    "moe_mlp": Operation(draw_moe_mlp, expect_moe_mlp),
    "lora_add": Operation(draw_lora_add, expect_lora_add, lambda a: []),
    "Tensor.copy_": Operation(
        draw_copy_, lambda a: {"self": Outcome(converted(numbers(a.src), a.self.dtype))}, lambda a: ["self"]
    ),
    "asarray": Operation(draw_asarray, expect_asarray, lambda a: ["return"]),
}
