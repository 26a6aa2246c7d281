"""Sessions on objects, for the fuzzer of calls: a Tensor's methods, what makes one, devices and what CUDA only has.

A session makes some calls in a row. After each that raises, everything that can be seen of the object is as before.
"""

import numpy as np
from fuzz_calls_bad import NOT_NUMBERS, NOT_TENSORS, pick
from fuzz_calls_memory import CODES, Exported, decode, place

import pagedkv
from pagedkv import ops

ERRORS = (
    TypeError, ValueError, BufferError, MemoryError, NotImplementedError, KeyError, IndexError, OverflowError,
    RuntimeError,
)  # a RuntimeError: a Graph that is in no state for it


class Wrong(Exception):
    """What a call did that no call may do."""


def attempt(report, text: str, call):
    """(whether it went well, its result); any exception but a typed one with a message goes on."""
    report.setdefault("calls", []).append(text)
    try:
        return True, call()
    except ERRORS as error:
        if not str(error):
            raise Wrong(f"{text}: {error!r}") from error
        return False, type(error).__name__


# --- a Tensor

SIZES = [0, 1, 2, 3, 5, -1, -2, 2**31, 2**62, 2**63 - 1, 2**63, 2**70, -(2**63)]


def draw_key(rng):
    def item():
        if rng.random() < 0.5:
            return pick(rng, [0, 1, -1, 2, -3, 7, 2**70, np.int64(1), "a", None, 1.5, True, Ellipsis, object()])
        return slice(
            *(pick(rng, [None, None, 0, 1, 2, -1, -5, 9, 2**70, -(2**70), "x"]) for _ in range(rng.integers(1, 4)))
        )

    return item() if rng.random() < 0.4 else tuple(item() for _ in range(rng.integers(0, 5)))


def plain_key(key) -> bool:
    """NumPy takes more than ints and slices."""
    return all(
        isinstance(k, slice) or (isinstance(k, (int, np.integer)) and not isinstance(k, bool))
        for k in (key if isinstance(key, tuple) else (key,))
    )


def seen(tensor):
    return tensor.shape, tensor.dtype, tensor.device, tensor.ndim, tensor.nbytes, repr(tensor.tolist())


def try_tensor(rng, report) -> str:
    """Views of one against NumPy's of the same codes."""
    dtype = pick(rng, list(CODES))
    shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 5)))
    start = place(rng, rng.integers(0, 9, shape), dtype)
    start.memory.remember()
    start.kind = "tensor"
    report["start"] = start
    tensor, codes = start.give(pagedkv), start.of(start.memory.bytes)
    for _ in range(rng.integers(1, 8)):
        before = seen(tensor)
        what = rng.integers(6)
        if what == 0:
            key = draw_key(rng)
            done, view = attempt(report, f"[{key!r}]", lambda: tensor[key])
            expected = codes[key] if done and plain_key(key) else None
        elif what == 1:
            dims = [pick(rng, [0, 1, -1, 2, -2, 5, 2**70, "a", None, True]) for _ in range(2)]
            done, view = attempt(report, f"transpose{dims}", lambda: tensor.transpose(*dims))
            expected = codes.swapaxes(*dims) if done else None
        elif what == 2:
            sizes = (
                [pick(rng, SIZES) for _ in range(rng.integers(0, 4))] if rng.random() < 0.5 else [*codes.shape[::-1]]
            )
            sizes = pick(rng, [sizes, tuple(sizes), *NOT_TENSORS[:6], -1, codes.size])
            done, view = attempt(report, f"view({sizes!r})", lambda: tensor.view(sizes))
            is_vast = done and np.prod([max(n, 1) for n in view.shape], dtype=object) > 2**20  # NumPy may refuse it
            expected = codes.reshape(sizes) if done and not is_vast else None
        elif what == 3:
            other = pick(rng, [*CODES, *NOT_NUMBERS])
            done, view = attempt(report, f"view(-1, {other!r})", lambda: tensor.view(-1, other))
            expected = None
        elif what == 4:
            done, view, expected = try_export(rng, report, tensor, codes)
        else:
            done, view, expected = try_elements(report, tensor, codes, dtype)
        if seen(tensor) != before or (start.memory.bytes != start.memory.before).any():
            raise Wrong(f"{report}: the tensor was changed")
        if isinstance(view, pagedkv.Tensor) and expected is not None:
            tensor, codes = view, expected
            same = np.array(tensor.tolist()).reshape(tensor.shape)
            if tensor.shape != codes.shape or not np.array_equal(same, decode(codes, dtype), equal_nan=True):
                raise Wrong(f"{report}: {tensor.tolist()} is not {decode(codes, dtype)}")
    return "tensor session"


def try_export(rng, report, tensor, codes):
    options = {
        name: pick(rng, values)
        for name, values in {
            "stream": [None, -1, 0, 1, 2, "x", 2**70],
            "max_version": [None, (1, 0), (0, 8), (1,), (1, 2, 3), (2**40, 0), "1.0", ("a", 0)],
            "dl_device": [None, (1, 0), (2, 0), (1, 1), (1,), "cpu", (2**70, 0)],
            "copy": [None, True, False, "x", [], 1.5],
        }.items()
        if rng.random() < 0.5
    }

    def there_and_back():
        capsule = tensor.__dlpack__(**options)
        return None if rng.random() < 0.3 else pagedkv.from_dlpack(Exported(capsule))  # None: nobody takes it

    done, view = attempt(report, f"__dlpack__({options})", there_and_back)
    return done, view, codes if done and view is not None else None


def try_elements(report, tensor, codes, dtype):
    done, array = attempt(report, "numpy()", tensor.numpy)
    if done != (dtype not in ("bfloat16", "float8_e4m3fn")):
        raise Wrong(f"numpy() of {dtype}: {array}")
    if done and not np.array_equal(array, codes, equal_nan=True):
        raise Wrong(f"numpy(): {array} is not {codes}")
    attempt(report, "memoryview, len", lambda: (memoryview(tensor), len(tensor)))
    return (
        attempt(report, "setattr", lambda: setattr(tensor, "shape", ()))
        if hasattr(tensor, "__dict__")
        else (True, None),
        None,
        None,
    )


# --- what makes tensors, and the runtime


def try_make(rng, report) -> str:
    sizes = pick(
        rng, [[pick(rng, SIZES) for _ in range(rng.integers(0, 10))], int(rng.integers(0, 9)), (3, 2), *NOT_NUMBERS]
    )
    dtype = pick(
        rng,
        [*CODES, *CODES, np.float32, np.dtype("int32"), "float64", "torch.bfloat16", "", "\udc80", *NOT_NUMBERS[:9]],
    )
    device = pick(
        rng, ["cpu", "cpu", "cpu", "cpu:0", "cuda", "cuda:1", "cuda:999", "cpu:1", "", "tpu", "\0", *NOT_NUMBERS[:9]]
    )
    options = {} if rng.random() < 0.7 else {"pinned": pick(rng, [True, False, *NOT_NUMBERS])}
    big = (
        isinstance(sizes, (list, tuple))
        and 2**20 < np.prod([n for n in sizes if isinstance(n, int) and n > 0], dtype=object) < 2**40
    )
    if not big:
        done, tensor = attempt(
            report,
            f"empty({sizes!r}, {dtype!r}, {device!r}, {options})",
            lambda: pagedkv.empty(sizes, dtype, device, **options),
        )
        if done and (
            tensor.device != "cpu" or tensor.shape != tuple((sizes,) if hasattr(sizes, "__index__") else sizes)
        ):
            raise Wrong(f"{report}: {tensor}")
    thing = pick(rng, [*NOT_TENSORS, *NOT_NUMBERS, [[1, 2], [3, 4.5]], [[1], [2, 3]]])
    attempt(report, f"asarray({thing!r}, {dtype!r}, {device!r})", lambda: pagedkv.asarray(thing, dtype, device))
    attempt(report, f"from_dlpack({thing!r})", lambda: pagedkv.from_dlpack(thing))
    return "making session"


def try_ids(rng, report) -> str:
    ids = pick(
        rng,
        [
            [pick(rng, [0, 1, 5, 99]) for _ in range(rng.integers(0, 40))],
            [1, pick(rng, NOT_NUMBERS)],
            (1, 2),
            np.arange(3),
            np.arange(3, dtype=np.int32),
            *NOT_TENSORS,
        ],
    )
    size = pick(rng, [6, 100, *NOT_NUMBERS])
    done, packed = attempt(report, f"_pack_ids({ids!r}, {size!r})", lambda: pagedkv._C._pack_ids(ids, size))
    if done and (
        np.frombuffer(packed, np.int32).tolist() != [int(i) for i in ids]
        or not all(0 <= i < int(size) for i in np.frombuffer(packed, "i4"))
    ):
        raise Wrong(f"{report}: {packed}")
    return "ids session"


def try_runtime(rng, report) -> str:
    """Without CUDA all of these refuse, but for the CPU."""
    thing, threads = pick(rng, ["cpu", "cpu", "cuda", "cuda:7", None, *NOT_NUMBERS]), ops.get_num_threads()
    for call in (
        ops.synchronize,
        ops.check_errors,
        ops.reload_context,
        ops.memory_info,
        ops.num_multiprocessors,
        lambda x: ops.open_ipc(bytes(64), 1, x),
        lambda x: ops.open_ipc(x, 1, "cpu"),
        lambda x: ops.open_ipc(bytes(64), x, "cpu"),
        pagedkv.Stream,
        pagedkv.Graph,
        lambda x: pagedkv.Event(True, x),
        lambda x: pagedkv.Event(x),
        lambda x: pagedkv.Graph().capture(x),
        lambda x: pagedkv.Graph().replay(x),
        lambda x: pagedkv.Graph(x),
        lambda x: pagedkv.Event(device=x),
        ops.ElasticBuffer,
        lambda x: ops.ElasticBuffer(1 << 20, x),
        lambda x: ops.ElasticBuffer(1 << 20).resize(x),
        lambda x: ops.ElasticBuffer(1 << 20).tensor(x),
        lambda x: ops.ElasticBuffer(1 << 20).tensor(3, x, reserved=True),
        lambda x: pagedkv.Graph().__enter__(),
        lambda x: pagedkv.Graph().__exit__(x),
    ):
        attempt(report, f"{getattr(call, '__name__', call)}({thing!r})", lambda: call(thing))
    if not isinstance(thing, (int, np.integer)) or not 1 <= thing <= 4096:
        done, _ = attempt(report, f"set_num_threads({thing!r})", lambda: ops.set_num_threads(thing))
        if done or ops.get_num_threads() != threads:
            raise Wrong(f"{report}: {ops.get_num_threads()} threads")
    return "runtime session"


SESSIONS = {"Tensor": try_tensor, "make": try_make, "_pack_ids": try_ids, "runtime": try_runtime}
