"""The attention backend PAGEDKV as vLLM drives it: builder, store and forward over steps of a server, against the float64
oracle. Where vLLM is installed its classes are used, and asked; elsewhere those of vllm_stand_in.py."""

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import vllm_stand_in

import pagedkv
from pagedkv import ops

torch = pytest.importorskip("torch", reason="vLLM's backends take torch tensors")
HAS_VLLM = importlib.util.find_spec("vllm") is not None
NAMES = "vllm", "vllm.backend", "vllm.v0_26"
BLOCK = 16


@pytest.fixture(scope="module", params=["0.33.0", "0.26.0"])
def integration(request):
    """pagedkv.integrations.vllm beside that release of vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_VLLM:
            registry = importlib.import_module("vllm.v1.attention.backends.registry")
            if hasattr(registry.AttentionBackendEnum, "register") == (request.param == "0.26.0"):
                pytest.skip("another release of vllm is installed")
        else:
            for name, module in vllm_stand_in.modules(request.param).items():
                patch.setitem(sys.modules, name, module)
        module = importlib.import_module("pagedkv.integrations.vllm")
        module.register()
        yield module
    for name in NAMES:
        sys.modules.pop(f"pagedkv.integrations.{name}", None)
    vars(pagedkv.integrations).pop("vllm", None)


def registry():
    return sys.modules["vllm.v1.attention.backends.registry"]


def backend_class():
    """The class that vLLM finds behind the name."""
    path, _, name = registry().AttentionBackendEnum["PAGEDKV"].get_path().rpartition(".")
    return getattr(importlib.import_module(path), name)


# --- a server of one or more layers


class Layer:
    """One attention layer: pages in vLLM's shape and one of its layouts, and the keys and values that were stored, in
    float64 and apart, for the oracle."""

    def __init__(self, integration, device, layout, dtype, heads, kv_heads, dim, kv_cache_dtype, scales, **options):
        shape = (NUM_BLOCKS, kv_heads, BLOCK, 2 * dim)
        held = torch.uint8 if kv_cache_dtype == "fp8" else dtype
        if layout == "NHD":
            self.kv_cache = torch.zeros(shape[0], BLOCK, kv_heads, 2 * dim, dtype=held, device=device).transpose(1, 2)
        else:
            self.kv_cache = torch.zeros(shape, dtype=held, device=device)
        assert self.kv_cache.shape == shape
        self.impl = backend_class().get_impl_cls()(
            heads, dim, dim**-0.5, kv_heads, kv_cache_dtype=kv_cache_dtype, **options
        )
        self.impl.process_weights_after_loading(dtype)
        if self.impl.alibi_slopes is not None:  # made where the model is made, which vLLM does on its device
            self.impl.alibi_slopes = self.impl.alibi_slopes.to(device)
        self.scales = scales
        self._k_scale, self._v_scale = (torch.tensor(scale, dtype=torch.float32, device=device) for scale in scales)
        self.shape, self.dtype, self.options, self.past = (heads, kv_heads, dim), dtype, options, {}

    def store(self, request, new):
        """Notes what the cache must hold of these keys and values."""
        held = []
        for x, scale in zip(new, self.scales, strict=True):
            x = x.float().cpu().numpy().astype(np.float64)
            if self.impl.kv_cache_dtype == "fp8":
                scale = np.asarray(scale, np.float32).reshape(-1, 1)
                x = oracle.rounded(x.astype(np.float32) / scale, "float8_e4m3fn") * scale
            held.append(x)
        past = self.past.get(request)
        self.past[request] = held if past is None else [np.concatenate(pair) for pair in zip(past, held, strict=True)]

    def expected(self, request, q, causal):
        k, v = self.past[request]
        window = self.options.get("sliding_window")
        sinks = self.options.get("sinks")
        return oracle.paged_attention_fwd(
            q.float().cpu().numpy(), k[None], v[None], np.zeros((1, 1), int), [len(k)], cu_seqlens_q=[0, len(q)],
            causal=causal, window_size=(-1, -1) if window is None else (window - 1, window - 1),
            softcap=self.options.get("logits_soft_cap") or 0.0, alibi_slopes=self.options.get("alibi_slopes"),
            sinks=None if sinks is None else sinks.float().cpu().numpy(),
        )[0]


NUM_BLOCKS = 60
NUM_REQUESTS = 5


class Server:
    """Requests whose pages lie anywhere in the pool; block 0 is nobody's, as in vLLM."""

    def __init__(self, rng, device):
        self.rng, self.device = rng, device
        self.tables = 1 + rng.permutation(NUM_BLOCKS - 1)[: NUM_REQUESTS * 8].reshape(NUM_REQUESTS, 8)
        self.lens = np.zeros(NUM_REQUESTS, int)

    def batch(self, new, padded_requests=0, padded_tokens=0, causal=True):
        """CommonAttentionMetadata of a step with new[i] tokens of request i, padded as for a CUDA graph."""
        requests = np.flatnonzero(new)
        before, after = self.lens[requests], (self.lens + new)[requests]
        slots = [
            self.tables[r, position // BLOCK] * BLOCK + position % BLOCK
            for r, first, end in zip(requests, before, after, strict=True)
            for position in range(first, end)
        ]
        self.lens = self.lens + new
        starts = np.concatenate([[0], np.cumsum(new[requests]), np.full(padded_requests, new.sum())])
        tables = np.concatenate([self.tables[requests], np.zeros((padded_requests, 8), int)])

        def ints(x, dtype=torch.int32):
            return torch.tensor(np.asarray(x), dtype=dtype, device=self.device)

        common = dict(
            query_start_loc=ints(starts), query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=ints(np.concatenate([after, np.zeros(padded_requests, int)])),
            num_reqs=len(requests) + padded_requests, num_actual_tokens=len(slots) + padded_tokens,
            max_query_len=int(new.max()) + int(self.rng.integers(0, 2)), max_seq_len=int(after.max()),
            block_table_tensor=ints(tables), slot_mapping=ints(slots + [-1] * padded_tokens, torch.int64),
            causal=causal,
        )
        if HAS_VLLM:
            return sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata(**common)
        return SimpleNamespace(**common)


def make_builder(device):
    return backend_class().get_builder_cls()(SimpleNamespace(), ["0"], SimpleNamespace(), torch.device(device))


def run_layer(rng, layer, metadata, new, causal=True):
    """Stores and attends as vLLM does, with rows of padding behind the batch; checks every request's rows."""
    heads, kv_heads, dim = layer.shape
    num_tokens, device = metadata.num_actual_tokens + 2, layer.kv_cache.device
    qkv = torch.tensor(rng.standard_normal((num_tokens, heads + 2 * kv_heads, dim)), dtype=layer.dtype, device=device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    output = torch.full((num_tokens, heads, dim), 7.0, dtype=layer.dtype, device=device)
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, metadata.slot_mapping)
    assert layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output) is output
    limit, first = oracle.tolerance(str(layer.dtype).removeprefix("torch.")), 0
    for request in np.flatnonzero(new):
        rows = slice(first, first := first + new[request])
        layer.store(request, (k[rows], v[rows]))
        expected = layer.expected(request, q[rows], causal)
        np.testing.assert_allclose(output[rows].float().cpu().numpy(), expected, rtol=limit, atol=limit)
    assert (output[first:] == 7).all()


FEATURES = {
    "plain": {},
    "window": dict(sliding_window=9),
    "softcap, alibi": dict(logits_soft_cap=8.0, alibi_slopes=[0.5, 0.25, 0.125, 0.0625]),
    "sinks": dict(sinks=torch.tensor([1.5, -2.0, 0.0, 4.0], dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_steps(integration, rng, device, layout, features, kv_cache_dtype, dtype):
    """Prefill, chunks of it, decode and their mixes, padded and not, in layers that differ in heads and window."""
    options = {key: x.to(device) if key == "sinks" else x for key, x in FEATURES[features].items()}
    scales = ([0.02, 0.05], [0.03, 0.01]) if rng.random() < 0.5 else (0.02, 0.03)  # of each head, or of all
    layers = [
        Layer(integration, device, layout, dtype, 4, 2, 64, kv_cache_dtype, scales, **options),
        Layer(integration, device, layout, dtype, 4, 2, 64, kv_cache_dtype, scales),
        Layer(integration, device, layout, dtype, 8, 2, 64, kv_cache_dtype, scales),
    ]
    server, builder = Server(rng, device), make_builder(device)
    for step in range(6):
        new = rng.integers(0, 20, NUM_REQUESTS) if step < 3 else rng.integers(0, 2, NUM_REQUESTS)
        new[rng.integers(NUM_REQUESTS)] = 1
        common = server.batch(new, *rng.integers(0, 3, 2) * (step % 2))
        metadata = builder.build(0, common)
        for layer in layers:
            run_layer(rng, layer, metadata, new)
        assert len(metadata.plans) == (3 if features == "window" else 2)


def test_not_causal(integration, rng, device):
    """A window then reaches to both sides."""
    layer = Layer(integration, device, "NHD", torch.float32, 4, 2, 64, "auto", (1, 1), sliding_window=5)
    server, new = Server(rng, device), np.array([12, 0, 3, 1, 7])
    run_layer(rng, layer, make_builder(device).build(0, server.batch(new, causal=False)), new, causal=False)


def test_one_order_whatever_the_batch(integration, rng, device, monkeypatch):
    """VLLM_BATCH_INVARIANT: a request's rows have the same bits alone and among others."""
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True, raising=False)
    layer = Layer(integration, device, "NHD", torch.bfloat16, 4, 2, 64, "auto", (1, 1))
    assert layer.impl.num_splits == 1
    server, builder = Server(rng, device), make_builder(device)
    run_layer(rng, layer, builder.build(0, server.batch(lens := rng.integers(1, 100, NUM_REQUESTS))), lens)
    metadata = builder.build(0, server.batch(np.ones(NUM_REQUESTS, int)))
    q = torch.randn(NUM_REQUESTS, 4, 64, dtype=torch.bfloat16, device=device)
    together = layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, torch.empty_like(q))
    for i in range(NUM_REQUESTS):
        server.lens[i] -= 1
        one = builder.build(0, server.batch(np.eye(NUM_REQUESTS, dtype=int)[i]))
        alone = layer.impl.forward(layer, q[i : i + 1], None, None, layer.kv_cache, one, torch.empty_like(q[:1]))
        assert torch.equal(alone[0], together[i])


@pytest.mark.gpu
def test_a_graph_serves_every_batch_that_fits(integration, torch, rng):
    """Captured behind a run with the same metadata, then replayed for other lengths, tables and numbers of requests."""
    layers = [Layer(integration, "cuda:0", "HND", torch.bfloat16, 4, 2, 128, "fp8", (0.02, 0.03)) for _ in range(2)]
    for layer in layers:
        layer.kv_cache.copy_(torch.randint(0, 0x48, layer.kv_cache.shape, dtype=torch.uint8))
    server, builder = Server(rng, "cuda:0"), make_builder("cuda:0")
    server.lens[:] = 20
    common = server.batch(np.ones(NUM_REQUESTS, int))
    common.max_query_len = NUM_REQUESTS
    metadata = builder.build(0, common)
    q = torch.randn(NUM_REQUESTS, 4, 128, dtype=torch.bfloat16, device="cuda")
    outputs = [torch.empty_like(q) for _ in layers]

    def step(batch, outputs):
        for layer, output in zip(layers, outputs, strict=True):
            layer.impl.forward(layer, q, None, None, layer.kv_cache, batch, output)

    step(metadata, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(metadata, outputs)
    for _ in range(5):
        server.lens = rng.integers(0, 100, NUM_REQUESTS)
        new = np.array([[1, 1, 1, 1, 1], [5, 0, 0, 0, 0], [0, 2, 0, 3, 0]][rng.integers(3)])
        other = server.batch(new, padded_requests=int((new == 0).sum()))
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(common, name).copy_(getattr(other, name))
        graph.replay()
        fresh = [torch.empty_like(q) for _ in layers]
        step(builder.build(0, other), fresh)
        for output, expected in zip(outputs, fresh, strict=True):
            torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


# --- what vLLM asks, and what is refused


def test_refusals(integration, rng):
    impl, builder, server = integration.backend.PagedKVImpl, make_builder("cpu"), Server(rng, "cpu")
    common = server.batch(np.ones(NUM_REQUESTS, int))
    with pytest.raises(NotImplementedError, match="(?i)attn_type is .*encoder_only"):
        impl(4, 64, 1.0, 2, attn_type=sys.modules["vllm.v1.attention.backend"].AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match=r"sinks: shape is \(3,\) but must be \(4,\)"):
        impl(4, 64, 1.0, 2, sinks=torch.zeros(3))
    with pytest.raises(NotImplementedError, match="common_prefix_len is 32"):
        builder.build(32, common)
    layer = Layer(integration, "cpu", "NHD", torch.float32, 4, 2, 64, "auto", (1, 1))
    q = torch.zeros(NUM_REQUESTS, 4, 64)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward(layer, q, None, None, layer.kv_cache, None, q, output_scale=torch.ones(1))
    common.causal = torch.ones(NUM_REQUESTS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="causal: PAGEDKV takes one bool"):
        builder.build(0, common)


def test_profiling_run(integration):
    """No metadata: the output is zeros."""
    layer = Layer(integration, "cpu", "NHD", torch.float32, 4, 2, 64, "auto", (1, 1))
    q = torch.randn(3, 4, 64)
    output = torch.full_like(q, float("nan"))
    assert layer.impl.forward(layer, q, q, q, layer.kv_cache, None, output) is output and not output.any()


def test_what_vllm_asks(integration):
    backend = backend_class()
    assert issubclass(backend, integration.PagedKVBackend) and backend.get_name() == "PAGEDKV"
    assert backend.get_builder_cls()._cudagraph_support.name == "ALWAYS"
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    assert [size for size in range(1, 300) if backend.supports_head_size(size)] == list(range(8, 257, 8))
    capability = SimpleNamespace(major=8, minor=0)
    assert backend.supports_compute_capability(capability)
    assert not backend.supports_compute_capability(SimpleNamespace(major=7, minor=5))
    assert "fp8_e5m2" not in backend.supported_kv_cache_dtypes

    def why_not(dtype, kv_cache_dtype):
        return backend.supports_combination(64, dtype, kv_cache_dtype, 16, False, False, False, False, capability)

    assert "kv_cache_dtype float16 with a model of torch.bfloat16" in why_not(torch.bfloat16, "float16")
    problem = ops.build_info()["cuda_problem"]
    for kv_cache_dtype in ("auto", "bfloat16", "fp8"):
        assert why_not(torch.bfloat16, kv_cache_dtype) == (problem and f"pagedkv cannot use the GPU: {problem}")


def test_the_name(integration):
    """Registered once whatever the calls; and vLLM's configuration is pickled with it."""
    enum = registry().AttentionBackendEnum
    before = enum["PAGEDKV"], enum["PAGEDKV"].get_path()
    integration.register()
    assert (enum["PAGEDKV"], enum["PAGEDKV"].get_path()) == before
    assert integration.registered() is enum["PAGEDKV"]
    if hasattr(enum, "register"):
        assert pickle.loads(pickle.dumps(enum["PAGEDKV"])) is enum["PAGEDKV"]


def test_graphs_of_0_26(integration, rng):
    """Whatever a graph for all kinds of batches was captured with, it is made for one request with all tokens."""
    if not hasattr(backend_class(), "get_kv_cache_shape"):
        pytest.skip("0.33.0 captures with such a batch")
    common = Server(rng, "cpu").batch(np.ones(NUM_REQUESTS, int))
    common.max_query_len = 1
    modes = sys.modules["vllm.config"].CUDAGraphMode
    for mode, longest in [(modes.FULL, NUM_REQUESTS), (modes.FULL_AND_PIECEWISE, 1), (modes.PIECEWISE, 1)]:
        builder = make_builder("cpu")
        builder.vllm_config.compilation_config = SimpleNamespace(cudagraph_mode=mode)
        assert builder.build_for_cudagraph_capture(common).max_query_len == longest
        assert builder.build(0, common).max_query_len == 1


def test_the_shape_of_0_26(integration):
    """The logical shape is that of the tests above; its order in memory puts tokens before heads in NHD."""
    backend = backend_class()
    if not hasattr(backend, "get_kv_cache_shape"):
        pytest.skip("0.33.0 does not ask a backend")
    shape = (3, 5, 16, 128)
    assert backend.get_kv_cache_shape(3, 16, 5, 64) == shape
    for layout, in_memory, with_layers in [
        ("NHD", (3, 16, 5, 128), (3, 7, 16, 5, 128)), ("HND", (3, 5, 16, 128), (3, 5, 7, 16, 128))
    ]:  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[backend.__module__], "get_kv_cache_layout", lambda layout=layout: layout)
            assert tuple(shape[i] for i in backend.get_kv_cache_stride_order()) == in_memory
            assert tuple((7, *shape)[i] for i in backend.get_kv_cache_stride_order(True)) == with_layers


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_the_interface_of_vllm(integration):
    """What we override takes what vLLM's own method takes, in its order, and what it validates is what we say."""
    backend = backend_class()
    for ours in (backend, backend.get_impl_cls(), backend.get_builder_cls()):
        theirs = next(each for each in ours.__mro__ if each.__module__ == "vllm.v1.attention.backend")
        overridden = {name for each in ours.__mro__ if each.__module__.startswith("pagedkv.") for name in vars(each)}
        for name in overridden & set(dir(theirs)):
            if inspect.isroutine(getattr(theirs, name)) and not name.startswith("__"):
                own, base = (list(inspect.signature(getattr(each, name)).parameters) for each in (ours, theirs))
                assert own[: len(base)] == base, name
    common = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=True, attn_type="decoder",
        device_capability=SimpleNamespace(major=9, minor=0), has_sliding_window=True, use_batch_invariant=True,
        use_non_causal=True, use_kv_connector=True,
    )  # fmt: skip
    no_gpu = ops.build_info()["cuda_problem"] is not None
    reasons = backend.validate_configuration(**common)
    assert len(reasons) == no_gpu, reasons
    for wrong in (dict(head_size=512), dict(kv_cache_dtype="fp8_e5m2"), dict(use_mla=True), dict(use_pcp=True),
                  dict(attn_type="encoder_only"), dict(use_mm_prefix=True), dict(block_size=24)):
        assert len(backend.validate_configuration(**common | wrong)) == 1 + no_gpu, wrong


def test_the_entry_point():
    """It names the function, and the package that is tested has the module."""
    root = Path(__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("the sources are not here")
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["vllm.general_plugins"] == {"pagedkv": "pagedkv.integrations.vllm:register"}
    assert importlib.util.find_spec("pagedkv.compat.vllm_ops")
    (folder,) = importlib.util.find_spec("pagedkv.integrations.vllm").submodule_search_locations
    assert {path.name for path in Path(folder).glob("*.py")} == {"__init__.py", "backend.py", "v0_26.py"}


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_without_vllm():
    code = "import pagedkv.integrations.vllm"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode and "ImportError: pagedkv.integrations.vllm needs vLLM (package vllm)" in ran.stderr
