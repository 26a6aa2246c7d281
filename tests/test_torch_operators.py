"""pagedkv.torch: the same numbers as pagedkv's own functions, whatever compiles or exports the code around them."""

import copy
import inspect
import subprocess
import sys

import numpy as np
import pytest

import pagedkv

torch = pytest.importorskip("torch", reason="pagedkv.torch is for PyTorch")
import fuzz_calls  # noqa: E402
from fuzz_calls_memory import View  # noqa: E402
from fuzz_calls_ops import Draw  # noqa: E402

import pagedkv.torch as ops  # noqa: E402

FLAGS = ("causal", "add_to_out", "weight_is_constant", "quantize_x", "normalize", "gated", "experts_are_constant", "past_is_constant", "batch_invariant",
         "return_lse", "interleaved", "q_at_start")  # fmt: skip


def as_torch(value, device):
    """A drawn argument as a tensor of its own memory."""
    if isinstance(value, View):
        codes = torch.from_numpy(value.of(value.memory.bytes).copy())
        memory = torch.empty(
            codes.shape, dtype=codes.dtype, device=device
        )  # which has the usual strides of 1 element, too
        return memory.copy_(codes).view(getattr(torch, value.dtype))
    if isinstance(value, np.generic):
        return value.item()
    return [as_torch(each, device) for each in value] if isinstance(value, list) else value


def plan_of(arguments: dict):
    """The plan for a call of the attention: on a GPU its size is the device's own."""
    names = inspect.signature(pagedkv.plan_attention).parameters
    q = arguments["q"] if "q" in arguments else ops.queries(arguments)[0]
    given = {key: value for key, value in arguments.items() if key in names and key != "out"}
    return pagedkv.plan_attention(**given | {"q": q})


def draw(name: str, rng, device: str) -> dict:
    """Random arguments that fit, tensors as torch's."""
    while True:
        drawn = fuzz_calls.OPERATIONS[name].draw(Draw(rng, everything=rng.random() < 0.3))
        drawn.pop("stream", None)
        arguments = {key: bool(value) if key in FLAGS else as_torch(value, device) for key, value in drawn.items()}
        for key in ("caches", "src", "dst"):  # any sequence, for pagedkv
            if isinstance(arguments.get(key), tuple):
                arguments[key] = [as_torch(value, device) for value in arguments[key]]
        for key in ("src_dst_pairs", "pairs"):
            if key in arguments:
                arguments[key] = arguments[key].cpu()
        if "plan" in arguments:
            arguments["plan"] = plan_of(arguments)
        if name == "plan_attention" and "out" in arguments:
            arguments["out"] = plan_of(arguments).zero_()
        num_outs = sum(arguments.get(out) is not None for out in ops.OPERATIONS[name].outs)
        is_complete = num_outs in ((1,) if name == "plan_attention" else (0, len(ops.OPERATIONS[name].outs)))
        starts, num_tokens = arguments.get("cu_seqlens_q"), len(arguments.get("q", arguments.get("qkv", ())))
        has_padding = starts is not None and (starts[0] != 0 or starts[-1] != num_tokens)  # rows that are not written
        if is_complete and not has_padding:
            return arguments


def tensors_of(value) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def assert_same_bits(got, expected):
    got, expected = tensors_of(got), tensors_of(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and a.stride() == b.stride()
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def with_streams() -> set[str]:
    functions = [name for name in dir(pagedkv._C) if inspect.isbuiltin(getattr(pagedkv._C, name))]
    return {name for name in functions if "stream" in inspect.signature(getattr(pagedkv._C, name)).parameters}


def operators():
    packets = [getattr(torch.ops.pagedkv, name) for name in dir(torch.ops.pagedkv) if name[0] != "_" and name != "name"]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def test_every_operation_is_there():
    of_groups = {"all_reduce", "all_gather", "sample_candidates"}  # a schema can hold no Communicator
    assert set(ops.__all__) == with_streams() - of_groups - {"decode_step"}  # a model as a whole
    for name in ops.__all__:
        own = [p for p in inspect.signature(getattr(pagedkv._C, name)).parameters.values() if p.name != "stream"]
        assert list(inspect.signature(getattr(ops, name)).parameters.values()) == own


@pytest.mark.parametrize("name", ops.OPERATIONS)
def test_the_same_as_pagedkvs(rng, device, name):
    for _ in range(12):
        arguments = draw(name, rng, device)
        other = copy.deepcopy(arguments)
        expected = getattr(pagedkv._C, name)(**arguments)
        assert_same_bits(getattr(ops, name)(**other), expected)
        assert_same_bits(other, arguments)


@pytest.mark.parametrize("name", ops.OPERATIONS)
def test_compiled(rng, device, name):
    """Traced with fake tensors and made functional; what is written in place comes out as it would have."""
    for _ in range(3):
        arguments = draw(name, rng, device)
        other = copy.deepcopy(arguments)
        expected = getattr(ops, name)(**arguments)
        torch._dynamo.reset()
        compiled = torch.compile(lambda given: getattr(ops, name)(**given), fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(other), expected)
        assert_same_bits(other, arguments)


def reach(tensor):
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@pytest.mark.parametrize("operator", list(operators()), ids=str)
def test_what_pytorch_asks_of_an_operator(rng, operator):
    """Its schema tells the truth, and its fake gives the shapes."""
    name = next(each for each in sorted(ops.OPERATIONS, key=len, reverse=True) if operator.name()[9:].startswith(each))
    names = {argument.name for argument in operator._schema.arguments}
    for _ in range(2000):
        arguments = draw(name, rng, "cpu")
        if arguments.pop("return_lse", False) != ("_lse" in operator.name()):
            continue
        arguments = {key: value for key, value in arguments.items() if value is not None}
        for scale in ops.SCALES:
            if isinstance(arguments.get(scale), (int, float)):
                arguments[scale + ops.NUMBER] = float(arguments.pop(scale))
        for key in ops.LISTS:
            if isinstance(arguments.get(key), torch.Tensor):
                arguments[key] = [arguments[key]]
        needed = {argument.name for argument in operator._schema.arguments if not argument.has_default_value()}
        # opcheck's own arithmetic lacks the dtype, and it copies as many elements as an empty view seems to reach
        is_taken = all(each.dtype != torch.float8_e4m3fn and reach(each) >= 0 for each in tensors_of(arguments))
        if set(arguments) <= names and needed - {"q_weight", "k_weight"} <= set(arguments) and is_taken:
            break
    else:
        raise AssertionError("never drawn")
    arguments |= dict.fromkeys(needed - set(arguments))
    torch.library.opcheck(operator, (), arguments, test_utils=("test_schema", "test_faketensor"))


class Attention(torch.nn.Module):
    """As somebody would write it: one tensor for K and V, whose halves are written and read."""

    def __init__(self, hidden: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 16):
        super().__init__()
        self.shape = heads, kv_heads, head_dim
        self.qkv = torch.nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim)
        self.norm = torch.nn.Parameter(torch.rand(hidden))
        self.out = torch.nn.Linear(heads * head_dim, hidden)

    def forward(self, x, kv_cache, slots, tables, lens, cu_seqlens_q):
        heads, kv_heads, head_dim = self.shape
        qkv = self.qkv(ops.rms_norm(x, self.norm)).view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        k_cache, v_cache = kv_cache.unbind(0)
        ops.store_kvcache(k, v, k_cache, v_cache, slots)
        attended, lse = ops.paged_attention_fwd(
            q, k_cache, v_cache, tables, lens, cu_seqlens_q=cu_seqlens_q, window_size=(20, 0), return_lse=True
        )
        return self.out(attended.flatten(1)), lse * 2


def batch_of(rng, device: str, num_tokens: int) -> tuple:
    lens = torch.tensor([num_tokens - 1, 1, 0], dtype=torch.int32)
    tables = torch.from_numpy(rng.permutation(24).reshape(3, 8).astype(np.int32))
    slots = torch.cat(
        [tables[0].repeat_interleave(4)[: num_tokens - 1] * 4 + torch.arange(num_tokens - 1) % 4, tables[1, :1] * 4]
    )
    starts = torch.tensor([0, num_tokens - 1, num_tokens, num_tokens], dtype=torch.int32)
    x = torch.from_numpy(rng.standard_normal((num_tokens, 64)).astype(np.float32))
    kv_cache = torch.full((2, 24, 4, 2, 16), float("nan"))
    return tuple(each.to(device) for each in (x, kv_cache, slots.int(), tables, lens, starts))


@pytest.fixture
def module(seed, device):
    torch.manual_seed(seed)
    return Attention().to(device).requires_grad_(False)


def test_a_compiled_module(rng, device, module):
    """By PyTorch's own compiler, for another number of tokens than it was compiled for, too."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    for num_tokens in (7, 19, 5):
        arguments = batch_of(rng, device, num_tokens)
        others = copy.deepcopy(arguments)
        for got, expected in zip(compiled(*others), module(*arguments), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=False)
        torch.testing.assert_close(others[1], arguments[1], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_an_exported_module(rng, device, module):
    exported = torch.export.export(module, batch_of(rng, device, 9))
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    for name in ("rms_norm", "store_kvcache", "paged_attention_fwd_lse"):
        assert f"pagedkv.{name}.default" in calls
    arguments = batch_of(rng, device, 9)
    others = copy.deepcopy(arguments)
    for got, expected in zip(exported.module()(*others), module(*arguments), strict=True):
        torch.testing.assert_close(got, expected)
    assert_same_bits(others[1], arguments[1])


def test_there_are_no_gradients():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    with pytest.raises(NotImplementedError, match="silu_and_mul: pagedkv computes no gradients"):
        ops.silu_and_mul(x).sum().backward()
    with torch.no_grad():
        assert not ops.rms_norm(x, weight).requires_grad


def test_bad_arguments():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="weight: "):
        ops.rms_norm(x, torch.ones(9))
    with pytest.raises(BufferError, match="out: overlaps weight"):
        ops.rms_norm(x, x[0], out=x)
    with pytest.raises(TypeError, match="plan_attention: out must be given"):
        ops.plan_attention(x, x, x, x, x)
    with pytest.raises(TypeError, match="token_logprobs: out_ids and out must be given"):
        ops.token_logprobs(x, x, out=x)
    with pytest.raises((TypeError, RuntimeError), match="nonsense"):
        ops.rms_norm(x, x, nonsense=1)


@pytest.mark.parametrize(
    "code",
    [
        "import pagedkv, sys; assert 'torch' not in sys.modules",
        "import sys; sys.modules['torch'] = None\ntry: import pagedkv.torch\nexcept ImportError as e: assert 'package torch' in str(e)",
    ],
    ids=["not loaded", "missing"],
)
def test_only_this_module_needs_pytorch(code):
    subprocess.run([sys.executable, "-c", code], check=True)
