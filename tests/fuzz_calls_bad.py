"""What makes a call wrong, or odd, for the fuzzer of calls: each function changes arguments in place and says how."""

import numpy as np
import oracle
from fuzz_calls_memory import CODES, Memory, View, at, encode, place

ALIASING = True  # outputs that overlap an input or each other

NOT_TENSORS = [
    None,
    [1.0],
    [[1, 2]],
    (),
    "abc",
    b"",
    b"12345678",
    3,
    2.5,
    2**70,
    float("nan"),
    True,
    object(),
    {},
    {1: 2},
    set(),
    1j,
    np.float32(2),
    np.int64(3),
    np.zeros((1,) * 9, np.float32),
    np.array(["a"]),
    np.array([None]),
    np.zeros(2, "f8"),
    np.zeros(2, bool),
    np.zeros(2, ">f4"),
    int,
    iter([1]),
    range(3),
    memoryview(b"1234")[::2],
]
NOT_NUMBERS = [
    None,
    "1",
    [1],
    2**63,
    -(2**63),
    2**31,
    -(2**31) - 1,
    2**70,
    -(10**400),
    float("nan"),
    float("inf"),
    -1,
    -1.5,
    1e39,
    1e300,
    5e-324,
    0,
    1,
    3,
    257,
    True,
    object(),
    1j,
    np.float32(0.5),
    np.int64(2),
    np.array([1.0]),
    (1, 2),
    (-2, 0),
    (1,),
    (2**70, 0),
    [0, 2**63 - 1],
    (0.5, 1),
    "ab",
    b"\0" * 64,
    b"x",
]
BAD_INTS = [-1, -2, 0, 1, 2, 5, 17, 100, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63)]
BAD_FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 65504.0, -1.0]


def pick(rng, things):
    return things[rng.integers(len(things))]


def views_in(a: dict) -> list[tuple]:
    """(container, key) of every View, those in lists too."""
    found = []
    for name, value in a.items():
        if isinstance(value, View):
            found.append((a, name))
        elif isinstance(value, (list, tuple)) and any(isinstance(item, View) for item in value):
            a[name] = list(value)
            found += [(a[name], i) for i, item in enumerate(value) if isinstance(item, View)]
    return found


def some_view(rng, a):
    found = views_in(a)
    return pick(rng, found) if found else (None, None)


def drop(rng, a, names):
    return f"without {(name := pick(rng, list(a)))}: {a.pop(name)!r}"


def unknown(rng, a, names):
    name = pick(rng, ["strem", "x2", "", "out ", "\udc80", "k_scale"])
    a[name] = None
    return f"also {name!r}"


def exchange(rng, a, names):
    one, other = pick(rng, list(a)), pick(rng, list(a))
    a[one], a[other] = a[other], a[one]
    return f"{one} and {other} exchanged"


def not_a_tensor(rng, a, names):
    holder, key = some_view(rng, a)
    if holder is not None:
        holder[key] = pick(rng, NOT_TENSORS)
    return f"{key}: no tensor"


def not_a_number(rng, a, names):
    name = pick(rng, names)
    a[name] = pick(rng, NOT_NUMBERS)
    return f"{name}: another object"


def other_dtype(rng, a, names):
    holder, key = some_view(rng, a)
    if holder is not None:
        dtype = pick(rng, list(CODES))
        holder[key] = place(
            rng, np.abs(np.nan_to_num(holder[key].numbers(holder[key].memory.bytes))).clip(0, 99) // 1, dtype
        )
    return f"{key}: another dtype"


def other_shape(rng, a, names):
    holder, key = some_view(rng, a)
    if holder is None:
        return "no tensor"
    view = holder[key]
    x = view.numbers(view.memory.bytes)
    dim = int(rng.integers(0, max(x.ndim, 1)))
    change = pick(rng, ["longer", "shorter", "empty", "rank", "less rank", "one"])
    if x.ndim == 0 or change == "rank":
        x = x[None]
    elif change == "longer":
        x = (
            np.concatenate([x, x.take([-1] if x.shape[dim] else [], dim)], dim)
            if x.size
            else np.zeros([n + 1 for n in x.shape], x.dtype)
        )
    elif change == "shorter":
        x = x.take(range(max(x.shape[dim] - 1, 0)), dim)
    elif change == "empty":
        x = x.take([], dim)
    elif change == "one":
        x = x.take([0] if x.shape[dim] else [], dim)
    else:
        x = x.reshape(-1) if rng.random() < 0.5 or not x.shape[0] else x[0]
    holder[key] = place(rng, x, view.dtype, is_plain=rng.random() < 0.5)
    return f"{key}: {change} {dim}"


def other_element(rng, a, names):
    holder, key = some_view(rng, a)
    if holder is None or holder[key].size == 0:
        return "no element"
    view = holder[key]
    codes = view.of(view.memory.bytes)
    index = tuple(int(rng.integers(n)) for n in view.shape)
    is_int = view.dtype.startswith("int")
    value = pick(rng, BAD_INTS if is_int else BAD_FLOATS)
    if is_int:
        codes[index] = np.array(value, object).astype("i8").astype(codes.dtype)
    elif view.dtype != "uint8":
        codes[index] = encode(oracle.rounded(value, view.dtype), view.dtype)
    return f"{'' if is_int else 'wild: '}{key}{list(index)} = {value}"


def readonly(rng, a, names):
    holder, key = some_view(rng, a)
    if holder is not None and holder[key].kind not in ("array", "torch"):
        holder[key] = at(holder[key], is_readonly=True)
    return f"{key}: read-only"


def sparse(rng, a, names):
    """The last dimension is not dense, or elements share memory."""
    holder, key = some_view(rng, a)
    if holder is None or not holder[key].shape or not holder[key].size:
        return "no dimension"
    view = holder[key]
    dim = len(view.shape) - 1 if rng.random() < 0.6 else int(rng.integers(len(view.shape)))
    strides = list(view.strides)
    if rng.random() < 0.5:
        strides[dim] = 0
        holder[key] = at(view, strides=tuple(strides), kind=pick(rng, ["dlpack", "tensor"]))
        return f"{key}: stride {dim} is 0"
    x = view.numbers(view.memory.bytes)
    wide = place(rng, np.repeat(x, 2, dim), view.dtype, is_plain=True)
    strides = list(wide.strides)
    strides[dim] *= 2
    kind = "dlpack" if wide.kind == "array" or rng.random() < 0.5 else wide.kind
    holder[key] = at(wide, shape=view.shape, strides=tuple(strides), kind=kind)
    return f"{key}: every second of dimension {dim}"


def misaligned(rng, a, names):
    holder, key = some_view(rng, a)
    width = 1 if holder is None else np.dtype(CODES[holder[key].dtype]).itemsize
    if width == 1:
        return "no alignment"
    view = holder[key]
    memory = Memory(np.concatenate([np.zeros(1, np.uint8), view.memory.bytes, np.zeros(8, np.uint8)]))
    kinds = ["dlpack", "tensor"] + ["numpy"] * (view.dtype not in ("bfloat16", "float8_e4m3fn"))
    holder[key] = at(view, memory=memory, offset=view.offset + 1, kind=pick(rng, kinds))
    return f"{key}: misaligned"


def hostile(rng, a, names):
    """Strides beyond the address space, which must be refused; or, where they step nowhere, must not matter."""
    holder, key = some_view(rng, a)
    if holder is None or not holder[key].shape:
        return "no dimension"
    view = holder[key]
    dim = int(rng.integers(len(view.shape)))
    strides = list(view.strides)
    strides[dim] = pick(rng, [2**62, -(2**62), 2**63 - 1, -(2**63), 2**61 + 1])
    steps = abs(strides[dim]) * (view.shape[dim] - 1) * np.dtype(CODES[view.dtype]).itemsize if view.size else 0
    if 0 < steps < 2**63:
        return "not hostile"
    holder[key] = at(view, kind="dlpack", claims=tuple(strides))
    return f"{key}: hostile stride {dim}"


def vast(rng, a, names):
    """No elements, but sizes of which products overflow."""
    holder, key = some_view(rng, a)
    if holder is None or len(holder[key].shape) < 2:
        return "no two dimensions"
    view = holder[key]
    shape = list(view.shape)
    zero, other = (int(n) for n in rng.permutation(len(shape))[:2])
    shape[zero] = 0
    shape[other] = pick(rng, [2**31, 2**40, 2**62, 2**63 - 1])
    if rng.random() < 0.5:
        shape = [0 if i == zero else shape[other] for i in range(len(shape))]
    holder[key] = at(view, shape=tuple(shape), strides=tuple(pick(rng, [1, 2**62]) for _ in shape), kind="dlpack")
    return f"{key}: vast shape {shape}"


def alias(rng, a, names):
    """One tensor lies in another's memory: the same, shifted, or of another shape."""
    found = views_in(a)
    if not ALIASING or len(found) < 2:
        return "no alias"
    (one, key), (other, other_key) = (found[i] for i in rng.permutation(len(found))[:2])
    view, target = one[key], other[other_key]
    if rng.random() < 0.4 and view.dtype == target.dtype and len(view.shape) == len(target.shape):
        one[key] = at(target, is_readonly=False)
        return f"{key} is {other_key}"
    width = np.dtype(CODES[view.dtype]).itemsize
    room = target.memory.bytes.size // width
    extent = sum(abs(s) * (n - 1) for s, n in zip(view.strides, view.shape) if n) + 1 if view.size else 0
    low = sum(s * (n - 1) for s, n in zip(view.strides, view.shape) if s < 0 and n)
    if extent > room or target.kind == "array":
        return "no room"
    place_at = int(rng.integers(0, room - extent + 1)) - low
    one[key] = at(
        view, memory=target.memory, offset=place_at * width, kind="dlpack" if view.kind == "array" else view.kind
    )
    return f"wild: {key} in the memory of {other_key}"


MUTATIONS = [
    drop, unknown, exchange, not_a_tensor, not_a_number, not_a_number, other_dtype, other_shape, other_shape,
    other_element, other_element, other_element, readonly, sparse, misaligned, hostile, vast, alias, alias, alias,
]
