"""pagedkv.Tensor on its own and with NumPy: making, views, conversion, the buffer protocol, lifetime."""

import gc
import inspect
import io
import itertools
import operator
import weakref

import numpy as np
import pytest

import pagedkv

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8}
IN_NUMPY = [name for name in DTYPES if name not in ("bfloat16", "float8_e4m3fn")]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 200, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (3, 5), (1, 2, 3, 4, 5, 1, 2, 1)])
def test_empty(dtype, shape):
    tensor = pagedkv.empty(shape, dtype)
    count = int(np.prod(shape))
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.ndim) == (shape, dtype, "cpu", len(shape))
    assert tensor.nbytes == count * DTYPES[dtype]
    assert tensor.strides == tuple(int(np.prod(shape[i + 1 :])) if count else tensor.strides[i] for i in range(len(shape)))
    assert tensor.data_ptr() % 64 == 0


def test_empty_defaults():
    tensor = pagedkv.empty(3)
    assert repr(tensor) == "Tensor(shape=(3,), dtype='float32', device='cpu')"
    assert pagedkv.empty([2, np.int64(3)], np.float16, "cpu").dtype == "float16"
    assert pagedkv.empty((), np.dtype("int64")).tolist() is not None


@pytest.mark.parametrize("dtype", IN_NUMPY)
def test_numpy_both_ways_shares_memory(rng, dtype):
    array = random_array(rng, (4, 3, 5), dtype)
    tensor = pagedkv.asarray(array)
    assert (tensor.shape, tensor.dtype) == (array.shape, dtype)
    assert tensor.data_ptr() == array.ctypes.data
    back = tensor.numpy()
    assert back.dtype == array.dtype and np.shares_memory(back, array)
    back[1, 2, 3] = 77
    assert array[1, 2, 3] == 77 and tensor.tolist() == array.tolist()
    assert np.asarray(tensor).tolist() == array.tolist()


def test_strided_numpy(rng):
    array = random_array(rng, (6, 8), "float32")
    for view in (array.T, array[::-1], array[::2, 1::3], array[:, ::-2], np.broadcast_to(array[0], (3, 8)), array[2:2]):
        tensor = pagedkv.from_dlpack(view)
        assert tensor.shape == view.shape
        assert tensor.tolist() == view.tolist()
        assert tensor.numpy().tolist() == view.tolist()
        if view.size:
            assert tensor.data_ptr() == view.ctypes.data
            assert tensor.strides == tuple(s // 4 for s in view.strides)


def test_index_and_slice(rng):
    array = random_array(rng, (9, 4), "float32")
    tensor = pagedkv.asarray(array)
    assert len(tensor) == 9
    for i in (0, 3, 8, -1, -9, np.int32(5)):
        assert tensor[i].tolist() == array[i].tolist() and tensor[i].shape == (4,)
    assert tensor[2][1].tolist() == float(array[2, 1]) and tensor[2][1].shape == ()
    bounds = [None, 0, 1, 4, 8, 9, 20, -1, -9, -20]
    for start, stop, step in itertools.product(bounds, bounds, [None, 1, 2, 5, -1, -3]):
        part = slice(start, stop, step)
        assert tensor[part].tolist() == array[part].tolist(), part
    with pytest.raises(IndexError):
        tensor[9]
    with pytest.raises(TypeError):
        len(pagedkv.empty(()))
    assert list(pagedkv.asarray([1, 2, 3]).tolist()) == [1, 2, 3]


def test_index_of_several_dimensions(rng):
    array = rng.standard_normal((4, 5, 6)).astype(np.float32)
    tensor = pagedkv.asarray(array)
    for key in [(), (1,), (1, 2), (1, 2, 3), (slice(None), 2), (slice(1, 3), slice(None, None, -2)), (-1, slice(4), -6),
                (slice(None), slice(None), slice(1, 5, 3))]:  # fmt: skip
        part = tensor[key]
        assert part.shape == array[key].shape and part.tolist() == array[key].tolist()


def test_bad_indices_are_told_by_the_tensors_own_dimensions():
    tensor = pagedkv.empty((2, 3))
    for key, message in [
        ((0, 5), "index 5 is out of range for dimension 1 of size 3"),
        (5, "index 5 is out of range for dimension 0 of size 2"),
        ((slice(None), -4), "index -4 is out of range for dimension 1 of size 3"),
        ((0, 0, 0), "too many indices: the tensor has 2 dimensions"),
    ]:
        with pytest.raises(IndexError, match=message):
            tensor[key]


def test_rows_between_host_and_gpu(rng, device):
    """Two dimensions with gaps between the rows on either side."""
    array = rng.standard_normal((7, 12)).astype(np.float32)
    there = pagedkv.asarray(np.zeros((9, 20), np.float32), device="cuda" if device != "cpu" else "cpu")
    there[1:8, 3:13].copy_(array[:, :10])
    back = pagedkv.asarray(there, device="cpu").numpy()
    expected = np.zeros((9, 20), np.float32)
    expected[1:8, 3:13] = array[:, :10]
    assert (back == expected).all()
    wide = np.zeros((7, 15), np.float32)
    pagedkv.from_dlpack(wide)[:, :10].copy_(there[1:8, 3:13])
    assert (wide[:, :10] == array[:, :10]).all() and not wide[:, 10:].any()


def test_slices_write_through():
    tensor = pagedkv.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    tensor[::2].copy_(pagedkv.asarray([[10.0, 20.0], [30.0, 40.0]]))
    assert tensor.tolist() == [[10.0, 20.0], [3.0, 4.0], [30.0, 40.0]]


def test_view(rng):
    array = random_array(rng, (4, 6), "int32")
    tensor = pagedkv.asarray(array)
    for shape in [(24,), (2, 12), (3, 2, 4), (-1,), (4, -1), (2, -1, 2), (1, 24, 1), 24]:
        assert tensor.view(shape).tolist() == array.reshape(shape).tolist()
    assert tensor.view(24).data_ptr() == tensor.data_ptr()
    assert pagedkv.empty((0, 3)).view((3, 0)).shape == (3, 0)


def test_transpose(rng):
    array = random_array(rng, (2, 3, 4, 5), "int32")
    tensor = pagedkv.asarray(array)
    for dims in [(0, 1), (1, 2), (3, 1), (-1, 0), (2, -2), (1, 1), (-4, 3)]:
        turned = tensor.transpose(*dims)
        expected = array.swapaxes(*dims)
        assert (turned.shape, turned.data_ptr()) == (expected.shape, tensor.data_ptr())
        assert (turned.numpy() == expected).all() and turned.tolist() == expected.tolist()
    tensor.transpose(0, 1)[2, 1].copy_(pagedkv.asarray(np.full((4, 5), 7, np.int32)))
    assert (tensor.numpy()[1, 2] == 7).all()
    assert pagedkv.empty((0, 3)).transpose(0, 1).shape == (3, 0)
    for dims in [(4, 0), (0, -5)]:
        with pytest.raises(IndexError, match=r"dim[01]: -?\d is none of the 4 dimensions"):
            tensor.transpose(*dims)
    with pytest.raises(TypeError):
        tensor.transpose(0, 1.0)


def test_view_as_another_dtype(rng):
    """The bytes stay what they are."""
    array = random_array(rng, (4, 6), "int32")
    tensor = pagedkv.asarray(array)
    assert tensor.view((4, 6), "float32").numpy().view(np.int32).tolist() == array.tolist()
    assert tensor.view((4, 24), dtype="uint8").numpy().tobytes() == array.tobytes()
    assert tensor.view((4, -1), "int64").tolist() == array.view(np.int64).tolist()
    bf16 = tensor.view(-1, "bfloat16")
    assert (bf16.shape, bf16.dtype, bf16.data_ptr()) == ((48,), "bfloat16", tensor.data_ptr())
    assert tensor.view((24,), None).dtype == "int32"
    with pytest.raises(ValueError, match="does not fit 48 elements"):
        tensor.view((24,), "float16")
    with pytest.raises(ValueError, match="dtype: 12 bytes are no whole number of int64 elements"):
        tensor[0][:3].view(-1, "int64")
    with pytest.raises(TypeError, match="float12"):
        tensor.view((24,), "float12")
    raw = tensor.view(-1, "uint8")
    with pytest.raises(BufferError, match="dtype: the address .* is not aligned to int32"):
        raw[2:-2].view(-1, "int32")


def test_dtype_conversion_of_every_pair(rng):
    """Against NumPy for float16, and against the definition of bfloat16 (cut to 16 bits, ties to even)."""
    array = np.concatenate([rng.standard_normal(1000) * 10.0 ** rng.integers(-6, 6, 1000), [0.0, -0.0, 448.0, 1e-30]])
    array = array.astype(np.float32)
    f32 = pagedkv.asarray(array)
    with np.errstate(over="ignore"):
        assert np.array_equal(pagedkv.asarray(f32, "float16").numpy(), array.astype(np.float16))
    bits = array.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    bf16 = pagedkv.asarray(f32, "bfloat16")
    assert np.array_equal(pagedkv.asarray(bf16, "float32").numpy(), rounded)
    with np.errstate(over="ignore"):
        assert np.array_equal(pagedkv.asarray(bf16, "float16").numpy(), rounded.astype(np.float16))
    f8 = pagedkv.asarray(pagedkv.asarray(f32, "float8_e4m3fn"), "float32").numpy()
    inside = (np.abs(array) >= 2.0**-6) & (np.abs(array) < 448)
    assert np.all(np.abs(f8 - array)[inside] <= np.abs(array)[inside] / 16)
    assert np.array_equal(f8[np.abs(array) >= 448], np.sign(array)[np.abs(array) >= 448] * 448)


def test_copy_between_strides(rng):
    source = random_array(rng, (5, 6, 7), "float32")
    for make in (lambda a: a, lambda a: a.transpose(2, 0, 1), lambda a: a[::-1, ::2], lambda a: a[:, :, 3:4], lambda a: a[:0]):
        view = make(source)
        for dtype in ("float32", "float16"):
            wide = np.full(tuple(2 * n for n in view.shape), np.nan, dtype)
            target = wide[tuple(slice(1, None, 2) for _ in view.shape)]
            returned = pagedkv.from_dlpack(target)
            assert returned.copy_(view) is returned
            assert np.array_equal(target, view.astype(dtype))
            assert np.isnan(wide).sum() == wide.size - target.size


def test_copy_large_uses_threads_and_is_right(rng):
    source = random_array(rng, (513, 1023), "float32")
    target = pagedkv.empty((1023, 513), "float16")
    target.copy_(source.T)
    assert np.array_equal(target.numpy(), source.T.astype(np.float16))


def test_copy_refuses_what_it_cannot_do():
    tensor = pagedkv.asarray([1.0, 2.0, 3.0, 4.0])
    for src, error, text in [
        (np.zeros(3, np.float32), ValueError, "src: dim 0 is 3 but the destination has 4"),
        (np.zeros((4, 1), np.float32), ValueError, "src: has 2 dimensions but the destination has 1"),
        (np.zeros(4, np.int32), TypeError, "src: dtype is int32 but the destination has float32"),
        (tensor[::-1], BufferError, "src: overlaps the memory"),
    ]:
        with pytest.raises(error, match=text):
            tensor.copy_(src)
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    tensor.copy_(tensor)
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_asarray_of_python_numbers():
    assert pagedkv.asarray([1, 2]).dtype == "int64"
    assert pagedkv.asarray([[True, False]]).tolist() == [[1, 0]]
    assert pagedkv.asarray([1, 2.5]).dtype == "float32"
    assert pagedkv.asarray(3).shape == () and pagedkv.asarray(2.5).tolist() == 2.5
    assert pagedkv.asarray([1, 2], dtype="bfloat16").tolist() == [1.0, 2.0]
    assert pagedkv.asarray([], dtype="int32").shape == (0,)
    for numbers in ((), (1,), (1.0, 2.0), ((1, 2), (3, 4)), ((1, 2),), ([1, 2], [3, 4])):
        tensor, array = pagedkv.asarray(numbers), np.asarray(numbers)
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
    assert pagedkv.asarray(pagedkv.asarray([1.0, -2.0], dtype="bfloat16"), dtype="int64").tolist() == [1, -2]
    with pytest.raises(ValueError, match="obj: a number does not fit int32"):
        pagedkv.asarray(pagedkv.asarray([1.5], dtype="float8_e4m3fn"), dtype="int32")
    assert pagedkv.asarray(np.array([1.5, 2.5])).dtype == "float32"  # float64 has no tensor
    assert pagedkv.asarray(pagedkv.asarray([1, 2]), dtype="int32").dtype == "int32"
    for bad in ([2**40], [-1], [1.5], [256]):
        with pytest.raises(ValueError, match="obj: a number does not fit uint8"):
            pagedkv.asarray(bad, dtype="uint8")


def test_asarray_is_the_same_where_it_can():
    tensor = pagedkv.empty(3)
    assert pagedkv.asarray(tensor) is tensor and pagedkv.asarray(tensor, "float32", "cpu") is tensor
    assert pagedkv.from_dlpack(tensor) is tensor


def test_read_only_stays_read_only():
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    tensor = pagedkv.asarray(array)
    with pytest.raises(BufferError, match="read-only"):
        tensor.copy_(np.zeros(4, np.float32))
    with pytest.raises(BufferError, match="read-only"):
        tensor[1:].copy_(np.zeros(3, np.float32))
    assert not tensor.numpy().flags.writeable
    assert pagedkv.asarray(b"\x01\x02").tolist() == [1, 2]


def test_buffer_protocol():
    tensor = pagedkv.asarray([[1, 2, 3], [4, 5, 6]], dtype="int32")
    memory = memoryview(tensor)
    assert (memory.format, memory.shape, memory.strides, memory.readonly) == ("i", (2, 3), (12, 4), False)
    assert memory.tolist() == [[1, 2, 3], [4, 5, 6]] and bytes(tensor) == memory.tobytes()
    assert memoryview(tensor[::-1]).tolist() == [[4, 5, 6], [1, 2, 3]]
    with pytest.raises(BufferError, match="not contiguous"):  # asks for plain bytes
        io.BytesIO().write(tensor[::-1])
    for dtype in ("bfloat16", "float8_e4m3fn"):
        for convert in (memoryview, np.asarray, np.array, lambda t: t.numpy()):
            with pytest.raises(BufferError, match=f"{dtype} has no buffer format"):
                convert(pagedkv.empty(3, dtype))


def test_views_keep_memory_alive(rng):
    tensor = pagedkv.asarray(random_array(rng, (64, 64), "float32").tolist())
    expected = tensor.tolist()
    row, array, memory = tensor[5], tensor.numpy(), memoryview(tensor)
    deep = tensor[1:][2:][0].view((8, 8))[3]
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert row.tolist() == expected[5] and array.tolist() == expected and memory.tolist() == expected
    assert deep.tolist() == expected[3][24:32]
    del row, array, memory, deep
    gc.collect()
    assert gone() is None


def test_tensor_keeps_producer_alive():
    class Owner(np.ndarray):
        pass

    array = np.arange(5, dtype=np.float32).view(Owner)
    gone = weakref.ref(array)
    tensor = pagedkv.from_dlpack(array)[1:]
    del array
    gc.collect()
    assert gone() is not None and tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    del tensor
    gc.collect()
    assert gone() is None


def test_cycle_through_an_array_is_collected():
    class Owner(np.ndarray):
        pass

    array = np.arange(5, dtype=np.float32).view(Owner)
    array.tensor = pagedkv.from_dlpack(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None


def test_type_is_closed():
    with pytest.raises(TypeError):
        pagedkv.Tensor()
    with pytest.raises(TypeError):
        pagedkv.Tensor.shape = 3
    with pytest.raises(TypeError):
        type("Mine", (pagedkv.Tensor,), {})
    with pytest.raises(AttributeError):
        pagedkv.empty(1).shape = (2,)


NOT_OF_A_TENSOR = {
    "sum": lambda t: t + t, "number": lambda t: t * 2, "from the right": lambda t: 1 - t, "in place": lambda t: operator.iadd(t, 1),
    "product": lambda t: t @ t, "sign": lambda t: -t, "order": lambda t: t < 1, "assignment": lambda t: operator.setitem(t, 0, 1.0),
    "iteration": list, "membership": lambda t: 1.0 in t, "mask": lambda t: t[t], "new axis": lambda t: t[None],
}  # fmt: skip


@pytest.mark.parametrize("use", NOT_OF_A_TENSOR.values(), ids=NOT_OF_A_TENSOR)
def test_it_is_no_array(use):
    """As its docstring says; nothing is written."""
    tensor = pagedkv.asarray([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(TypeError):
        use(tensor)
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_what_its_docstring_says():
    for word in ("no arithmetic", "no broadcasting", "no autograd", "not iterable", "DLPack", "t.numpy()"):
        assert word in inspect.getdoc(pagedkv.Tensor)
    tensor = pagedkv.asarray([1.0, 2.0])
    assert tensor == tensor and tensor != pagedkv.asarray([1.0, 2.0]) and not hasattr(tensor, "requires_grad")
    tensor[1:].copy_(np.float32([5.0]))
    assert tensor.numpy().tolist() == [1.0, 5.0] and np.shares_memory(tensor.numpy(), tensor)


def test_one_element_is_a_number():
    tensor = pagedkv.asarray([[1.5, 2.5], [3.5, 4.5]])
    assert float(tensor[0, 1]) == 2.5 and int(tensor[1:, 1:]) == 4 and int(pagedkv.asarray(2**53 + 1)) == 2**53 + 1
    assert float(pagedkv.asarray([0.5], "bfloat16")) == 0.5
    for several in (tensor, tensor[:0], tensor[0]):
        with pytest.raises(TypeError, match="only a tensor of one element is a number"):
            float(several)


def test_view_of_nothing_with_vast_sizes():
    nothing = pagedkv.empty(0)
    assert nothing.view((0, 2**61, 2)).shape == (0, 2**61, 2)
    for shape in ((0, 2**62, 2), (2**62, 0, 2), (2**40, 2**40, 0)):
        with pytest.raises(ValueError, match="does not fit 0 elements"):
            nothing.view(shape)
