"""Tensors of other libraries through every way in (exchange API, buffer, DLPack of both kinds) and every way out."""

import gc
import json
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import numpy as np
import pytest
from fuzz_calls_memory import Exported

import pagedkv
from pagedkv import ops


class Producer:
    """A DLPack producer with nothing but __dlpack__, as CuPy and JAX are; `versions` says what it understands."""

    def __init__(self, tensor: pagedkv.Tensor, versions: bool, device: tuple[int, int] = (1, 0)):
        self.tensor, self.versions, self.device = tensor, versions, device
        self.calls: list[dict] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options):
        self.calls.append(options)
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(max_version=options.get("max_version"))


def norm_by_numpy(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack_producer(rng, versions):
    array = rng.standard_normal((4, 8)).astype(np.float32)
    producer = Producer(pagedkv.asarray(array), versions)
    out = ops.rms_norm(producer, np.ones(8, np.float32))
    assert isinstance(out, pagedkv.Tensor)  # a framework that we cannot ask for memory
    np.testing.assert_allclose(out.numpy(), norm_by_numpy(array), rtol=1e-5)
    assert producer.calls[0] == {"max_version": (1, 3)} and len(producer.calls) == (1 if versions else 2)

    gone = weakref.ref(producer.tensor)
    tensor = pagedkv.from_dlpack(producer)
    assert tensor.data_ptr() == array.ctypes.data
    del producer
    gc.collect()
    assert gone() is not None and tensor.tolist() == array.tolist()
    del tensor
    gc.collect()
    assert gone() is None


def test_capsules_of_both_kinds():
    tensor = pagedkv.asarray([1.0, 2.0])
    assert '"dltensor"' in repr(tensor.__dlpack__())
    assert '"dltensor"' in repr(tensor.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=(1, 0)))
    assert tensor.__dlpack_device__() == (1, 0)
    copy = np.from_dlpack(Producer(pagedkv.asarray([1.0, 2.0]), True))
    assert copy.tolist() == [1.0, 2.0]


def test_numpy_from_dlpack_shares_and_keeps_alive():
    tensor = pagedkv.asarray([[1.0, 2.0], [3.0, 4.0]])
    array = np.from_dlpack(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert array.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    del array
    gc.collect()
    assert gone() is None
    source = np.arange(3, dtype=np.float32)
    copied = np.from_dlpack(pagedkv.asarray(source), copy=True)
    assert copied.ctypes.data != source.ctypes.data and copied.tolist() == [0.0, 1.0, 2.0]


def test_read_only_by_dlpack():
    array = np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    tensor = pagedkv.asarray(array)
    assert not np.from_dlpack(tensor).flags.writeable
    with pytest.raises(BufferError, match="read-only, which a capsule from before DLPack 1.0 cannot say"):
        tensor.__dlpack__()
    again = pagedkv.from_dlpack(Producer(tensor, True))
    with pytest.raises(BufferError, match="read-only"):
        again.copy_(np.zeros(3, np.float32))


def test_read_only_numpy_is_fine_to_read_and_refused_to_write(rng):
    x = rng.standard_normal((2, 8)).astype(np.float32)
    x.flags.writeable = False
    weight = np.ones(8, np.float32)
    weight.flags.writeable = False
    out = ops.rms_norm(x, weight)
    assert isinstance(out, np.ndarray) and out.flags.writeable
    with pytest.raises(BufferError, match="out: is read-only but would be written"):
        ops.rms_norm(x, weight, out=x)
    with pytest.raises(BufferError, match="residual: is read-only but would be written"):
        ops.rms_norm(x, weight, residual=x)
    cache = np.zeros((2, 4, 1, 8), np.float32)
    sealed = cache.copy()
    sealed.flags.writeable = False
    with pytest.raises(BufferError, match="v_cache: is read-only but would be written"):
        pagedkv.store_kvcache(x[:, None], x[:, None], cache, sealed, np.array([0, 1]))
    assert not cache.any()


def test_many_producer_types():
    """More types than the cache of readers holds are still read."""
    kinds = [type(f"Producer{i}", (Producer,), {}) for i in range(40)]
    for _ in range(2):
        for i, kind in enumerate(kinds):
            assert pagedkv.from_dlpack(kind(pagedkv.asarray([i]), True)).tolist() == [i]


def test_producers_that_misbehave():
    class NoDevice:
        def __dlpack__(self, **options):
            raise AssertionError

    class Raises(Producer):
        def __dlpack__(self, **options):
            raise BufferError("cannot export today")

    class NotACapsule(Producer):
        def __dlpack__(self, **options):
            return 3

    class Used(Producer):
        def __dlpack__(self, **options):
            capsule = self.tensor.__dlpack__()
            np.from_dlpack(Exported(capsule))
            return capsule

    tensor = pagedkv.asarray([1.0])
    for producer, error, text in [
        (NoDevice(), AttributeError, "__dlpack_device__"),
        (Raises(tensor, True), BufferError, "obj: cannot export today"),
        (NotACapsule(tensor, True), BufferError, "obj: __dlpack__\\(\\) returned no unused DLPack capsule"),
        (Used(tensor, True), BufferError, "obj: __dlpack__\\(\\) returned no unused DLPack capsule"),
    ]:
        with pytest.raises(error, match=text):
            pagedkv.from_dlpack(producer)


def test_shapes_and_layouts_that_cannot_be_described():
    with pytest.raises(ValueError, match="obj: has 9 dimensions but at most 8 are supported"):
        pagedkv.from_dlpack(np.zeros((1,) * 9, np.float32))
    packed = np.zeros(3, dtype=[("pad", "u1"), ("x", "<f4")])
    with pytest.raises(BufferError, match="obj: stride 0 of 5 bytes is no multiple of its element's 4"):
        pagedkv.from_dlpack(packed["x"])
    shifted = np.frombuffer(bytearray(13), np.uint8)[1:].view("<f4")
    with pytest.raises(BufferError, match="obj: its address .* is not aligned to its dtype float32"):
        pagedkv.from_dlpack(shifted)
    assert pagedkv.from_dlpack(shifted[:0]).shape == (0,)  # as array("i") gives, in CPython 3.11
    with pytest.raises(TypeError, match="obj: elements of format '>f' are not supported"):
        pagedkv.from_dlpack(np.zeros(3, ">f4"))


class Mistaken(Producer):
    """Its device is wrong in the way of the caller's choice."""

    def __dlpack_device__(self):
        return self.device() if callable(self.device) else self.device


@pytest.mark.parametrize(
    ("device", "error"), [((), IndexError), (None, TypeError), ((10**30, 0), OverflowError), (list("ab"), TypeError)]
)
def test_the_name_comes_before_a_producers_mistake(device, error):
    with pytest.raises(error, match="^obj: "):
        pagedkv.from_dlpack(Mistaken(pagedkv.empty(3), True, device))


def test_only_the_first_line_of_a_producers_message():
    def fail():
        raise RuntimeError("no memory here\nframe #0: ...")

    with pytest.raises(RuntimeError) as caught:
        pagedkv.from_dlpack(Mistaken(pagedkv.empty(3), True, fail))
    assert str(caught.value) == "obj: no memory here"


# --- torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


TORCH_DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int32", "int64"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_round_trip(torch, dtype):
    bits = torch.randint(0, 120, (3, 4, 2), dtype=torch.uint8)
    source = bits.view(torch.float8_e4m3fn) if dtype == "float8_e4m3fn" else bits.to(getattr(torch, dtype))
    tensor = pagedkv.from_dlpack(source)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == (tuple(source.shape), dtype, source.data_ptr())
    assert tensor.tolist() == source.float().tolist()
    back = torch.from_dlpack(tensor)  # versioned capsule
    assert back.dtype == source.dtype and back.data_ptr() == source.data_ptr()
    old = torch.utils.dlpack.from_dlpack(tensor.__dlpack__())  # the older kind
    assert old.dtype == source.dtype and old.data_ptr() == source.data_ptr()
    assert pagedkv.empty((2, 2), source.dtype).dtype == dtype


def test_torch_lifetime_both_ways(torch):
    source = torch.arange(10.0)
    tensor = pagedkv.from_dlpack(source)[2:]
    del source
    gc.collect()
    junk = [torch.full((10,), -1.0) for _ in range(100)]
    assert tensor.tolist() == [float(i) for i in range(2, 10)] and len(junk) == 100
    own = pagedkv.asarray([1.0, 2.0, 3.0])
    gone = weakref.ref(own)
    for capsule in (own, own.__dlpack__()):
        back = torch.from_dlpack(capsule)
        del capsule
    del own
    gc.collect()
    assert back.tolist() == [1.0, 2.0, 3.0] and gone() is not None
    thread = threading.Thread(target=lambda keep: keep.clear(), args=([back],))  # deleted from any thread
    del back
    thread.start()
    thread.join()
    gc.collect()
    assert gone() is None


def test_a_result_of_torchs_without_a_gradient_is_told(torch):
    """Nobody else says so; Parameters and the rest are taken all the same, and nothing is said where nobody asks for one."""
    x, weight = torch.randn(3, 16), torch.nn.Parameter(torch.randn(16))
    with pytest.warns(UserWarning, match="weight requires grad, but pagedkv computes no gradients, so the result of rms_norm has none"):
        assert not ops.rms_norm(x, weight).requires_grad
    with pytest.warns(UserWarning, match="^x requires grad"):
        ops.rms_norm(x.requires_grad_(), weight.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.rms_norm(x.detach(), weight.detach())
        ops.rms_norm(x.detach().numpy(), weight)
        with torch.no_grad():
            ops.rms_norm(x, weight)
        with torch.inference_mode():
            ops.rms_norm(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="requires grad"):
            ops.rms_norm(x, weight)


def test_torchs_negative_bit_is_refused(torch):
    """Its export gives the memory, which has the other sign."""
    parts = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    views = [parts, parts[:1], parts[1], parts.reshape(2, 1), torch._neg_view(torch.ones(4)), torch._neg_view(torch.ones(2, 2).bfloat16())]
    for view in views:
        for read in (ops.asarray, pagedkv.from_dlpack):
            with pytest.raises(BufferError, match=r"negative bit.*resolve_neg\(\)"):
                read(view)
        assert np.array_equal(ops.asarray(view.resolve_neg().float()).numpy(), view.float().resolve_neg().numpy())
    with pytest.raises(BufferError, match="x: has PyTorch's negative bit"):
        ops.rms_norm(parts.reshape(2, 1), torch.ones(1))
    with pytest.raises(BufferError, match="src: has PyTorch's negative bit|src: "):
        pagedkv.empty((2,)).copy_(parts)
    assert ops.asarray(parts.contiguous()).tolist() == [-2, 4]


def test_torch_out_is_torch(torch, rng):
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
    out = ops.rms_norm(x, weight)
    assert type(out) is torch.Tensor and out.dtype == torch.bfloat16 and not out.requires_grad
    expected = norm_by_numpy(x.float().numpy()) * weight.detach().float().numpy()
    np.testing.assert_allclose(out.float().numpy(), expected, rtol=2e-2)
    assert type(ops.rms_norm(torch.nn.Parameter(x), weight)) is torch.Tensor
    given = torch.empty_like(x)
    assert ops.rms_norm(x, weight, out=given) is given and torch.equal(given, out)
    # the first tensor decides
    assert type(ops.rms_norm(x.float().numpy(), weight.detach().float())) is np.ndarray
    assert type(ops.rms_norm(pagedkv.from_dlpack(x), weight)) is pagedkv.Tensor
    empty = ops.rms_norm(torch.empty(0, 16), torch.ones(16))
    assert type(empty) is torch.Tensor and empty.shape == (0, 16)


def test_torch_is_first_met_behind_a_silent_framework(torch, environment):
    """The stream for a producer's __dlpack__ is looked for among the later arguments, PyTorch's for the first time."""
    code = """
        import torch, pagedkv
        from test_interop import Producer
        x = Producer(pagedkv.asarray([[3.0, 4.0]], "float32"), True)
        print(pagedkv.ops.rms_norm(x, torch.ones(2), 0.0).tolist())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(result.stdout), [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)


def test_torch_views_and_strides(torch):
    qkv = torch.randn(5, 3, 4, 16)
    key, value = qkv[:, 1], qkv[:, 2]  # not contiguous, last dimension dense: taken as they are
    caches = torch.full((2, 3, 4, 4, 16), float("nan"))
    slots = torch.tensor([3, 0, -1, 7, 11])
    pagedkv.store_kvcache(key, value, caches[0], caches[1], slots)
    flat = caches.view(2, 12, 4, 16)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[0, slot], key[token]) and torch.equal(flat[1, slot], value[token])
    assert torch.isnan(flat[:, [1, 2, 4, 5, 6, 8, 9, 10]]).all()
    # A stride that is never taken may be anything, that of the last dimension, too.
    one, ones = torch.randn(5).as_strided((5, 1, 1), (1, 3, 7)), torch.zeros(3, 4, 1, 1)
    pagedkv.store_kvcache(one, one, ones, torch.zeros_like(ones), slots)
    assert torch.equal(ones.flatten()[slots[slots >= 0]], one.flatten()[slots >= 0])
    with pytest.raises(BufferError, match="key: the last dimension must be dense but its stride is 20"):
        pagedkv.store_kvcache(torch.randn(16, 4, 5).permute(2, 1, 0), value, caches[0], caches[1], slots)
    with pytest.raises(BufferError, match="k_cache: would be written but its elements share memory"):
        pagedkv.store_kvcache(key, value, torch.zeros(1, 3, 4, 16).expand(4, -1, -1, -1), caches[1], slots)


def test_torch_requires_grad(torch):
    x = torch.randn(2, 8, requires_grad=True)
    weight = torch.ones(8)
    assert not ops.rms_norm(x, weight).requires_grad
    for name in ("out", "residual"):
        with pytest.raises(BufferError, match=rf"{name}: would be written but requires grad; pass {name}.detach\(\)"):
            ops.rms_norm(x, weight, **{name: x})
        before = x.detach().clone()
        with pytest.raises(BufferError):
            ops.rms_norm(torch.randn(2, 8), weight, **{name: x * 1})  # not a leaf
        assert torch.equal(x.detach(), before)
    ops.rms_norm(x, weight, out=x.detach())
    cache = torch.zeros(2, 2, 1, 8, requires_grad=True)
    with pytest.raises(BufferError, match=r"caches\[1\]: would be written but requires grad"):
        pagedkv.copy_blocks([cache.detach(), cache], torch.tensor([[0, 1]]))


def test_torch_what_is_not_supported(torch):
    weight = torch.ones(4)
    kinds = "float64", "int16", "bool", "complex64", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"
    for dtype, name in [(getattr(torch, kind), kind) for kind in kinds]:
        with pytest.raises(TypeError, match=f"x: dtype {name} is not supported"):
            ops.rms_norm(torch.zeros(2, 4, dtype=dtype), weight)
    with pytest.raises(Exception, match="x: "):
        ops.rms_norm(torch.zeros(2, 4, device="meta"), weight)
    with pytest.raises(Exception, match="x: "):
        ops.rms_norm(torch.eye(4).to_sparse(), weight)


def test_torch_stream_argument_is_ignored_on_the_cpu(torch):
    class Stream:
        cuda_stream = 12345

    x, weight = torch.randn(2, 4), torch.ones(4)
    expected = ops.rms_norm(x, weight)
    for stream in (None, 0, 1, 2**63, Stream()):
        assert torch.equal(ops.rms_norm(x, weight, stream=stream), expected)
    for stream in ("x", 1.5, object(), -1):
        with pytest.raises(TypeError, match="stream: must be None, an int"):
            ops.rms_norm(x, weight, stream=stream)


def test_torch_tensors_that_have_no_memory_or_too_much_shape():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="^obj: [^\n]*meta[^\n]*$"):
        pagedkv.from_dlpack(torch.empty(3, device="meta"))
    with pytest.raises(BufferError, match="obj: its producer gave a shape of more than 2\\^63 bytes"):
        pagedkv.from_dlpack(torch.zeros(1).expand(2**31, 2**31))


def test_a_device_that_is_not_there():
    """Of a producer that gives a stream's memory: its error, no SystemError."""
    import producer

    class OnGpu(producer.Producer):
        def __init__(self):
            super().__init__(4096, (4,), None, "f4")
            self._tensor.device_type, self._tensor.device_id = 2, 99

        def __dlpack_device__(self):
            return (2, 99)

    for take in pagedkv.from_dlpack, pagedkv.asarray:
        with pytest.raises((BufferError, NotImplementedError), match="CUDA"):  # the latter: built without
            take(OnGpu())


def test_a_deleter_may_run_python_after_an_error():
    """A producer's deleter finds no exception, and the exception survives it."""
    import fuzz_calls_memory

    view = fuzz_calls_memory.place(np.random.default_rng(1), np.zeros(3), "float32", is_plain=True)
    assert not fuzz_calls_memory.alive
    with pytest.raises(ValueError, match="x: has 1 dimensions"):
        ops.silu_and_mul(fuzz_calls_memory.Producer(view))
    bent = fuzz_calls_memory.at(view, memory=fuzz_calls_memory.Memory(np.zeros(99, np.uint8)), offset=1)
    with pytest.raises(BufferError, match="obj: its address 0x[0-9a-f]+ is not aligned"):
        pagedkv.from_dlpack(fuzz_calls_memory.Producer(bent))
    assert not fuzz_calls_memory.alive
