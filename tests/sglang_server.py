"""A server's part of SGLang's attention: a runner with its pools, requests, steps with and without a graph, and beside
them what each layer should give, in float64 over each request's own keys.

Requests lie in random pages of poisoned pools, and the rows of the page tables hold what former requests left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fake_sglang import ForwardBatch, ForwardMode, KVPool, Layer, ReqToTokenPool, WindowPools, make_runner, torch

CONTEXT_LEN, NUM_ROWS, MOST = 333, 8, 6  # no multiple of a page; rows of requests; sequences of the graph
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
F8 = torch.float8_e4m3fn


@dataclass
class Kind:
    """Two layers and a pool."""

    layers: list[Layer]
    dtype: object = torch.float32
    cache_dtype: object = None
    has_window_pool: bool = False
    is_heads_first: bool = False
    has_sinks: bool = False
    lens_dtype: object = torch.int64


WINDOWED = replace(Layer(layer_id=1), sliding_window_size=37)
KINDS = {
    "float32": Kind([Layer(), Layer(1, tp_q_head_num=6, tp_k_head_num=2)], lens_dtype=torch.int32),
    "bfloat16": Kind([Layer(), Layer(1, scaling=0.2)], torch.bfloat16),
    "float16, one key head": Kind([Layer(tp_k_head_num=1), Layer(1, tp_k_head_num=1)], torch.float16),
    "window": Kind([Layer(), WINDOWED]),
    "window None": Kind([Layer(), replace(WINDOWED, sliding_window_size=None)]),
    "window pool": Kind([Layer(), WINDOWED], has_window_pool=True),
    "window pool, bfloat16": Kind([Layer(), WINDOWED], torch.bfloat16, has_window_pool=True, has_sinks=True),
    "logit cap, sinks": Kind([Layer(logit_cap=3.0), WINDOWED], has_sinks=True),
    "fp8": Kind([Layer(k_scale_float=0.03, v_scale_float=0.5), WINDOWED], torch.bfloat16, F8),
    "fp8 of float32": Kind([Layer(), Layer(1, k_scale_float=1.7, v_scale_float=0.02)], torch.float32, F8),
    "fp8, scales of a file": Kind([Layer(k_scale=0.03, v_scale=0.5), WINDOWED], torch.bfloat16, F8),
    "heads first": Kind([Layer(), WINDOWED], is_heads_first=True),
    "heads first, fp8": Kind([Layer(), Layer(1, k_scale_float=0.03, v_scale_float=0.5)], torch.bfloat16, F8,
                             is_heads_first=True),
}  # fmt: skip


def attention(layer: Layer, q, k, v, sinks, *, is_causal: bool = True):
    """q: [n, heads, dim], the last n of the positions of k and v, [length, key heads, dim]; all of float64."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    k, v = (x.repeat_interleave(group, 1).movedim(0, 1) for x in (k, v))
    logits = q.movedim(0, 1) @ k.mT * layer.scaling
    if layer.logit_cap > 0:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    length = k.shape[1]
    distance = torch.arange(length - len(q), length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    is_seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if (layer.sliding_window_size or -1) >= 0:
        is_seen &= distance.abs() <= layer.sliding_window_size
    logits = logits.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return (logits.softmax(-1)[..., :length] @ v).movedim(0, 1)


@dataclass
class Request:
    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    keys: dict = field(default_factory=dict)  # of each layer: what its cache holds of k and v, [length, heads, dim]


def quotient(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Rounded once: by a Python number a GPU's PyTorch multiplies with the reciprocal."""
    return x.float() / torch.tensor(scale, device=x.device)


class Server:
    """A runner with its pools, and what they should hold."""

    def __init__(self, sglang, seed: int, device: str, page_size: int, kind: Kind, **runner) -> None:
        self.sglang, self.device, self.page_size, self.kind = sglang, device, page_size, kind
        self.rng = torch.Generator(device).manual_seed(seed)
        self.layers = [replace(layer, attn_type=sglang.AttentionType.DECODER) for layer in kind.layers]
        self.cache_dtype = kind.cache_dtype or kind.dtype
        num_pages = 1 + NUM_ROWS * -(-CONTEXT_LEN // page_size)
        self.num_slots = num_pages * page_size
        self.free = (torch.randperm(num_pages - 1, generator=self.rng, device=device) + 1).tolist()
        self.requests: list[Request] = []
        table = torch.randint(0, self.num_slots, (NUM_ROWS + 1, CONTEXT_LEN), generator=self.rng, device=device)
        table[0] = 0
        self.req_to_token = table.int()  # rows hold what former requests left
        buffers = {layer.layer_id: (self.buffer(layer), self.buffer(layer)) for layer in self.layers}
        pool = KVPool(buffers)
        if kind.has_window_pool:
            base = type("Pool", (WindowPools, sglang.SWAKVPool), {"__abstractmethods__": frozenset()})
            window_pages = 1 + torch.randperm(num_pages - 1, generator=self.rng, device=device)
            self.window_pages = torch.cat([torch.zeros_like(window_pages[:1]), window_pages])
            layers = {layer.layer_id: (0, layer is self.layers[1]) for layer in self.layers}
            pool = base(buffers, layers, torch.zeros(self.num_slots, dtype=torch.int64, device=device))
        self.pool = pool
        arguments = device, page_size, CONTEXT_LEN, ReqToTokenPool(self.req_to_token), pool, self.cache_dtype
        self.backend = sglang.PagedKVBackend(make_runner(*arguments, **runner))

    def buffer(self, layer: Layer):
        """NaN but for the page of padding. In front of it and behind it lies other memory."""
        heads, dim, size = layer.tp_k_head_num, layer.qk_head_dim, self.page_size
        shape = (self.num_slots // size, heads, size, dim) if self.kind.is_heads_first else (self.num_slots, heads, dim)
        buffer = torch.full(shape, torch.nan, device=self.device).to(self.cache_dtype)
        buffer[: 1 if self.kind.is_heads_first else size].view(torch.uint8).zero_()
        return buffer

    def slots(self, request: Request, first: int, end: int):
        position = torch.arange(first, end, device=self.device)
        pages = torch.tensor(request.pages, device=self.device, dtype=torch.int64)
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def add(self, prefix_of: Request | None = None, num_pages: int = 0) -> Request:
        """A request; its first pages may be those of another."""
        request = Request(len(self.requests) + 1)
        if prefix_of is not None:
            request.pages, request.length = prefix_of.pages[:num_pages], num_pages * self.page_size
            request.keys = {i: [x[: request.length] for x in pair] for i, pair in prefix_of.keys.items()}
            self.req_to_token[request.row, : request.length] = self.slots(request, 0, request.length).int()
        self.requests.append(request)
        return request

    def grow(self, request: Request, num_tokens: int):
        """New slots, in pages that are new where they have to be."""
        first, request.length = request.length, request.length + num_tokens
        while len(request.pages) * self.page_size < request.length:
            request.pages.append(self.free.pop())
        slots = self.slots(request, first, request.length)
        self.req_to_token[request.row, first : request.length] = slots.int()
        return slots

    def move_windows(self) -> None:
        """Before a step: pages that no window reaches any more leave the pool of the windows."""
        window, size = self.layers[1].sliding_window_size, self.page_size
        needed = {page for each in self.requests for page in each.pages[max(0, each.length - window) // size :]}
        for page in {page for each in self.requests for page in each.pages} - needed:
            self.pool.full_to_swa_index_mapping[page * size : (page + 1) * size] = 0
            for buffer in self.pool.buffers[1]:
                slot = int(self.window_pages[page]) * size
                buffer[slot : slot + size] = torch.nan

    def open_windows(self, slots) -> None:
        if self.kind.has_window_pool:
            moved = self.window_pages[slots // self.page_size] * self.page_size + slots % self.page_size
            self.pool.full_to_swa_index_mapping[slots] = moved

    def random(self, *shape: int):
        return torch.randn(shape, generator=self.rng, device=self.device).to(self.kind.dtype)

    def inputs(self, num_tokens: int):
        """q, k, v of both layers, as slices of a fused projection, and sinks."""
        result = []
        for layer in self.layers:
            q_size, k_size = (n * layer.qk_head_dim for n in (layer.tp_q_head_num, layer.tp_k_head_num))
            q, k, v = self.random(num_tokens, q_size + 2 * k_size).split([q_size, k_size, k_size], -1)
            shape = -1, layer.tp_k_head_num, layer.qk_head_dim
            sinks = self.random(layer.tp_q_head_num).bfloat16() if self.kind.has_sinks else None
            result.append((q, k.view(shape), v.view(shape), sinks))
        return result

    def scales(self, layer: Layer) -> tuple[float, float]:
        if self.cache_dtype != F8:
            return 1.0, 1.0
        return layer.k_scale_float or layer.k_scale or 1.0, layer.v_scale_float or layer.v_scale or 1.0

    def remember(self, request: Request, layer: Layer, k, v) -> None:
        """The keys of float64 that the cache should hold."""
        for i, (x, scale) in enumerate(zip((k, v), self.scales(layer))):
            x = quotient(x, scale).to(self.cache_dtype).double() * scale
            pair = request.keys.setdefault(layer.layer_id, [x[:0], x[:0]])
            pair[i] = torch.cat([pair[i], x])

    def batch(self, mode, work: list[tuple[Request, int]]) -> ForwardBatch:
        if self.kind.has_window_pool:
            self.move_windows()
        slots = torch.cat([self.grow(*each) for each in work])
        self.open_windows(slots)
        lens = torch.tensor([request.length for request, _ in work], dtype=self.kind.lens_dtype)
        rows, counts = [request.row for request, _ in work], [count for _, count in work]
        extend = {} if mode == ForwardMode.DECODE else {
            "extend_seq_lens": torch.tensor(counts, dtype=torch.int32, device=self.device), "extend_seq_lens_cpu": counts
        }  # fmt: skip
        mode = self.sglang.ForwardMode[mode.name]
        rows = torch.tensor(rows, device=self.device)
        return ForwardBatch(mode, len(work), rows, lens.to(self.device), slots, lens, **extend)

    def check(self, work, layer: Layer, given, out) -> None:
        q, k, v, sinks = given
        first = 0
        for request, count in work:
            rows = slice(first, first := first + count)
            self.remember(request, layer, k[rows], v[rows])
            heads = q[rows].double().view(count, layer.tp_q_head_num, -1)
            expected = attention(layer, heads, *request.keys[layer.layer_id], sinks)
            error = TOLERANCES[self.kind.dtype]
            torch.testing.assert_close(out[rows].double().view_as(expected), expected, atol=error, rtol=error)

    def run(self, mode, work, *, is_saved: bool = True, has_out: bool = False) -> None:
        """One step of both layers without a graph."""
        batch = self.batch(mode, work)
        self.backend.init_forward_metadata(batch)
        self.req_to_token_is_gone(batch)
        for layer, (q, k, v, sinks) in zip(self.layers, given := self.inputs(len(batch.out_cache_loc))):
            if not is_saved:  # a fused kernel of the model's has stored them
                self.put(layer, batch.out_cache_loc, k, v)
            batch._attn_output = torch.empty_like(q.contiguous()) if has_out else None
            sinks = {} if sinks is None else {"sinks": sinks}
            pair = (k, v) if is_saved else (None, None)
            out = self.backend.forward(q, *pair, layer, batch, save_kv_cache=is_saved, **sinks)
            assert out.shape == q.shape and (not has_out or out.data_ptr() == batch._attn_output.data_ptr())
            self.check(work, layer, given[layer.layer_id], out)

    def put(self, layer: Layer, slots, k, v) -> None:
        if self.kind.has_window_pool and layer.layer_id == 1:
            slots = self.pool.full_to_swa_index_mapping[slots]
        for buffer, x, scale in zip(self.pool.buffers[layer.layer_id], (k, v), self.scales(layer)):
            x = quotient(x, scale).to(self.cache_dtype)
            if self.kind.is_heads_first:
                buffer = buffer.transpose(1, 2)
                buffer.view(torch.uint8)[slots // self.page_size, slots % self.page_size] = x.view(torch.uint8)
            else:
                buffer.view(torch.uint8)[slots] = x.view(torch.uint8)

    def req_to_token_is_gone(self, batch) -> None:
        """The metadata are copies: the scheduler may write its tables while the layers run."""
        rows = self.req_to_token[batch.req_pool_indices].clone()
        self.req_to_token[batch.req_pool_indices] = 2147480000
        batch.seq_lens.fill_(-1)
        self.restore = batch.req_pool_indices, rows

    def put_back(self) -> None:
        self.req_to_token[self.restore[0]] = self.restore[1]


def serve(server: Server) -> list[Request]:
    """Prompts, a chunk of one of them, a prefix of another, and decodes."""
    size = server.page_size
    a, b, c = (server.add() for _ in range(3))

    def run(mode, work, **options) -> None:
        server.run(mode, work, **options)
        server.put_back()

    run(ForwardMode.EXTEND, [(a, 37), (b, 1), (c, 130)])
    d = server.add(prefix_of=c, num_pages=100 // size)
    run(ForwardMode.MIXED, [(a, 20), (b, 1), (d, 51)], has_out=True)
    for step in range(3):
        run(ForwardMode.DECODE, [(d, 1), (a, 1), (c, 1), (b, 1)], is_saved=step != 1, has_out=step == 2)
    run(ForwardMode.EXTEND, [(a, 3)], is_saved=False)
    return [d, a, c, b]


class Graph:
    """Decodes of up to MOST sequences from memory that stays where it is: on a GPU, a torch.cuda.CUDAGraph."""

    def __init__(self, server: Server) -> None:
        self.server, device = server, server.device
        backend, self.mode = server.backend, server.sglang.ForwardMode.DECODE
        backend.init_cuda_graph_state(MOST, MOST)
        self.fill = backend.get_cuda_graph_seq_len_fill_value()
        assert self.fill == 1  # SGLang also takes it for the length of prompts to warm up with
        self.rows, self.slots = (torch.zeros(MOST, dtype=torch.int64, device=device) for _ in range(2))
        self.lens = torch.full((MOST,), self.fill, device=device)
        self.lens_cpu = self.lens.cpu()
        self.given, self.graph = server.inputs(MOST), None
        backend.init_forward_metadata_out_graph(self.view(), in_capture=True)
        if device != "cpu":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.layers()  # a warm-up
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.layers()

    def view(self, slots=None) -> ForwardBatch:
        slots = self.slots if slots is None else slots
        return ForwardBatch(self.mode, MOST, self.rows, self.lens, slots, self.lens_cpu)

    def layers(self) -> None:
        batch, backend = self.view(), self.server.backend
        backend.init_forward_metadata_in_graph(batch)
        self.outs = [
            backend.forward(q, k, v, layer, batch, **({} if sinks is None else {"sinks": sinks}))
            for layer, (q, k, v, sinks) in zip(self.server.layers, self.given)
        ]

    def replay(self, work) -> None:
        server, count = self.server, len(work)
        batch = server.batch(ForwardMode.DECODE, work)
        for buffer, values, padding in (
            (self.rows, batch.req_pool_indices, 0), (self.slots, batch.out_cache_loc, 0), (self.lens, batch.seq_lens, self.fill),
            (self.lens_cpu, batch.seq_lens_cpu, self.fill),
        ):  # fmt: skip
            buffer.fill_(padding)[:count].copy_(values)
        for given, new in zip(self.given, server.inputs(MOST)):
            for tensor, values in zip(given, new):
                if tensor is not None:
                    tensor.copy_(values)
        server.backend.init_forward_metadata_out_graph(self.view(batch.out_cache_loc))
        server.req_to_token_is_gone(batch)
        if self.graph is None:
            self.layers()
        else:
            self.graph.replay()
        for layer, given, out in zip(server.layers, self.given, self.outs):
            server.check(work, layer, given, out)
            assert out.isfinite().all()  # padding, too
        server.put_back()
