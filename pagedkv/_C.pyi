"""The extension's names and types, held against it by tests/test_stub.py. For the docs: help(ops.<name>)."""

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, final, overload

import numpy as np
import numpy.typing as npt
from _typeshed import structseq

__version__: str

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

class _HasCudaStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

# A torch, NumPy, CuPy, JAX or pagedkv tensor; anything with DLPack or the buffer protocol.
_Tensor: TypeAlias = Tensor | _SupportsDLPack | npt.NDArray[Any] | bytes | bytearray | memoryview
_Scale: TypeAlias = _Tensor | float | None
_Stream: TypeAlias = int | _HasCudaStream | None
_Ints: TypeAlias = Sequence[int] | _Tensor
_Int32: TypeAlias = npt.NDArray[np.int32]
_T = TypeVar("_T")  # torch in, torch out; NumPy in, NumPy out; otherwise a Tensor

class OutOfBlocks(MemoryError): ...
class CudaError(RuntimeError): ...
class GroupError(RuntimeError): ...

@final
class Tensor:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def is_pinned(self) -> bool: ...
    @property
    def ndim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...
    def __getitem__(self, key: SupportsIndex | slice | tuple[SupportsIndex | slice, ...], /) -> Tensor: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]: ...
    def __dlpack__(
        self,
        /,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def copy_(self, src: _Tensor, *, stream: _Stream = None) -> Tensor: ...
    def data_ptr(self) -> int: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def tolist(self) -> Any: ...
    def transpose(self, dim0: int, dim1: int) -> Tensor: ...
    def view(self, shape: int | Sequence[int], dtype: Any = None) -> Tensor: ...

@final
class Stream:
    def __new__(cls, device: Any = "cuda") -> Stream: ...
    @property
    def cuda_stream(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __enter__(self, /) -> Stream: ...
    def __exit__(self, /, *exc: object) -> None: ...
    def synchronize(self, /) -> None: ...
    def wait(self, event: Event) -> None: ...

@final
class Event:
    def __new__(cls, timing: bool = False, device: Any = "cuda") -> Event: ...
    def record(self, stream: _Stream = None) -> Event: ...
    def query(self, /) -> bool: ...
    def synchronize(self, /) -> None: ...
    def elapsed_ms(self, end: Event) -> float: ...

@final
class Graph:
    def __new__(cls) -> Graph: ...
    @property
    def num_nodes(self) -> int: ...
    def __enter__(self, /) -> Graph: ...
    def __exit__(self, /, *exc: object) -> None: ...
    def capture(self, stream: Stream) -> Graph: ...
    def replay(self, stream: _Stream = None) -> None: ...

@final
class ElasticBuffer:
    def __new__(cls, capacity: int, device: Any = "cpu") -> ElasticBuffer: ...
    @property
    def size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    @property
    def device(self) -> str: ...
    def resize(self, num_bytes: int, /) -> None: ...
    def tensor(self, shape: int | Sequence[int], dtype: Any = "float32", *, reserved: bool = False) -> Tensor: ...

@final
class SuffixIndex:
    def __new__(
        cls, capacity: int, *, min_match: int = 3, max_match: int = 64, max_candidates: int = 64
    ) -> SuffixIndex: ...
    def __len__(self) -> int: ...
    def append(self, last: int, token_ids: _Ints, salt: int = 0) -> int: ...
    def propose(self, last: int, count: int) -> tuple[list[int], int]: ...

@final
class Communicator:
    def __new__(
        cls,
        rank: int,
        size: int,
        fd: int,
        device: Any = "cpu",
        *,
        timeout: float = 10.0,
        join_timeout: float = 60.0,
        way: str = "auto",
        memory: str = "auto",
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def memory(self) -> str: ...
    def abort(self, reason: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

def empty(
    shape: int | Sequence[int], dtype: Any = "float32", device: Any = "cpu", *, pinned: bool = False
) -> Tensor: ...
def asarray(obj: Any, dtype: Any = None, device: Any = None) -> Tensor: ...
def from_dlpack(obj: _Tensor, /) -> Tensor: ...
def synchronize(device: Any = "cpu") -> None: ...
def check_errors(device: Any = "cuda:0") -> None: ...
def reload_context(device: Any = "cuda") -> None: ...
def open_ipc(handle: Any, num_bytes: SupportsIndex, device: Any = "cuda") -> Tensor: ...
def memory_info(device: Any = "cuda") -> tuple[int, int]: ...
def num_multiprocessors(device: Any = "cuda") -> int: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int, /) -> None: ...
def build_info() -> dict[str, Any]: ...
def kernel_instances() -> list[dict[str, Any]]: ...
def _pack_ids(ids: Sequence[int], vocab_size: int, /) -> bytes: ...
def store_kvcache(
    key: _Tensor,
    value: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    slot_mapping: _Tensor,
    *,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    stream: _Stream = None,
) -> None: ...
def append_kvcache(
    key: _Tensor,
    value: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    cache_lens: _Tensor,
    *,
    cu_seqlens: _Tensor | None = None,
    key_starts: _Tensor | None = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    stream: _Stream = None,
) -> None: ...
def rope_append_kvcache(
    q: _T,
    cos: _Tensor,
    sin: _Tensor,
    key: _Tensor,
    value: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    cache_lens: _Tensor,
    *,
    cu_seqlens_q: _Tensor | None = None,
    cu_seqlens: _Tensor | None = None,
    key_starts: _Tensor | None = None,
    rotary_starts: _Tensor | None = None,
    interleaved: bool = False,
    q_at_start: bool = False,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
@overload
def paged_attention_fwd(
    q: _T,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    *,
    cu_seqlens_q: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    key_starts: _Tensor | None = None,
    table_starts: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: _Tensor | None = None,
    sinks: _Tensor | None = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: _Tensor | None = None,
    past_is_constant: bool = False,
    out: _T | None = None,
    return_lse: Literal[False] = False,
    stream: _Stream = None,
) -> _T: ...
@overload
def paged_attention_fwd(
    q: _T,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    *,
    cu_seqlens_q: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    key_starts: _Tensor | None = None,
    table_starts: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: _Tensor | None = None,
    sinks: _Tensor | None = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: _Tensor | None = None,
    past_is_constant: bool = False,
    out: _T | None = None,
    return_lse: Literal[True],
    stream: _Stream = None,
) -> tuple[_T, _T]: ...
@overload
def paged_attention_fwd(
    q: _T,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    *,
    cu_seqlens_q: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    key_starts: _Tensor | None = None,
    table_starts: _Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: _Tensor | None = None,
    sinks: _Tensor | None = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: _Tensor | None = None,
    past_is_constant: bool = False,
    out: _T | None = None,
    return_lse: bool = False,
    stream: _Stream = None,
) -> _T | tuple[_T, _T]: ...
def plan_attention(
    q: _T,
    k_cache: _Tensor,
    v_cache: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    *,
    cu_seqlens_q: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    key_starts: _Tensor | None = None,
    table_starts: _Tensor | None = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    num_splits: int = 0,
    batch_invariant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def copy_blocks(caches: _Tensor | Sequence[_Tensor], src_dst_pairs: _Tensor, *, stream: _Stream = None) -> None: ...
def swap_blocks(
    src: _Tensor | Sequence[_Tensor], dst: _Tensor | Sequence[_Tensor], pairs: _Tensor, *, stream: _Stream = None
) -> None: ...
@overload
def merge_attention_states(
    o: _T, lse: _Tensor, *, out: _T | None = None, return_lse: Literal[False] = False, stream: _Stream = None
) -> _T: ...
@overload
def merge_attention_states(
    o: _T, lse: _Tensor, *, out: _T | None = None, return_lse: Literal[True], stream: _Stream = None
) -> tuple[_T, _T]: ...
@overload
def merge_attention_states(
    o: _T, lse: _Tensor, *, out: _T | None = None, return_lse: bool = False, stream: _Stream = None
) -> _T | tuple[_T, _T]: ...
def qk_norm_rope_store(
    qkv: _T,
    q_weight: _Tensor | None,
    k_weight: _Tensor | None,
    cos_sin: _Tensor,
    positions: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    slot_mapping: _Tensor,
    *,
    rms_of: _Tensor | None = None,
    rms_squares: _Tensor | None = None,
    eps: float = 1e-06,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    q_out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def qkv_attention_fwd(
    qkv: _T,
    q_weight: _Tensor | None,
    k_weight: _Tensor | None,
    cos_sin: _Tensor,
    positions: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    slot_mapping: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    *,
    rms_of: _Tensor | None = None,
    rms_squares: _Tensor | None = None,
    eps: float = 1e-06,
    cu_seqlens_q: _Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    plan: _Tensor | None = None,
    past_is_constant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def embedding(
    token_ids: _T,
    weight: _Tensor,
    *,
    first_row: int | None = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def gather_rows(x: _T, indices: _Tensor, *, out: _T | None = None, stream: _Stream = None) -> _T: ...
def rms_norm(
    x: _T,
    weight: _Tensor,
    eps: float = 1e-06,
    *,
    residual: _Tensor | None = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def scale_columns(x: _T, factors: _Tensor, *, out: _T | None = None, stream: _Stream = None) -> _T: ...
def linear(
    x: _T,
    weight: _Tensor,
    bias: _Tensor | None = None,
    *,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    gate_up: _Tensor | None = None,
    rms_eps: float | None = None,
    x_squares: _Tensor | None = None,
    out_squares: _Tensor | None = None,
    add_to_out: bool = False,
    weight_is_constant: bool = False,
    quantize_x: bool = False,
    batch_invariant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def linear_squares(
    x: _Tensor,
    weight: _Tensor,
    *,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    batch_invariant: bool = False,
    out: _Tensor,
) -> int: ...
def linear_algorithms(
    x: _Tensor,
    weight: _Tensor,
    *,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    near: bytes | None = None,
    out: _Tensor,
) -> tuple[str, list[bytes]]: ...
def use_linear_algorithm(
    x: _Tensor,
    weight: _Tensor,
    algorithm: bytes,
    *,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    out: _Tensor,
) -> None: ...
def route_experts(
    logits: _Tensor,
    *,
    normalize: bool = False,
    out_experts: _Tensor,
    out_weights: _Tensor,
    stream: _Stream = None,
) -> None: ...
def expert_linear(
    x: _T,
    weight: _Tensor,
    experts: _Tensor,
    *,
    weights: _Tensor | None = None,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    gated: bool = False,
    add_to_out: bool = False,
    weight_is_constant: bool = False,
    experts_are_constant: bool = False,
    batch_invariant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def moe_mlp(
    x: _T,
    router: _Tensor,
    gate_up: _Tensor,
    down: _Tensor,
    *,
    normalize: bool = False,
    add_to_out: bool = False,
    weight_is_constant: bool = False,
    batch_invariant: bool = False,
    logits: _Tensor,
    experts: _Tensor,
    weights: _Tensor,
    activation: _Tensor,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def lora_add(
    x: _T, a: _Tensor, b: _Tensor, slots: _Tensor, *, out: _Tensor, stream: _Stream = None
) -> None: ...
def all_reduce(
    x: _T,
    comm: Communicator,
    *,
    residual: _Tensor | None = None,
    out_squares: _Tensor | None = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def all_gather(x: _T, comm: Communicator, *, out: _T | None = None, stream: _Stream = None) -> _T: ...
def sample_candidates(
    candidates: _T, comm: Communicator, *, out: _T | None = None, stream: _Stream = None
) -> _T: ...
def silu_and_mul(x: _T, *, out: _T | None = None, stream: _Stream = None) -> _T: ...
def sample(
    logits: _T,
    temperatures: _Tensor,
    seeds: _Tensor,
    positions: _Tensor,
    *,
    top_k: _Tensor | None = None,
    top_p: _Tensor | None = None,
    min_p: _Tensor | None = None,
    repetition_penalties: _Tensor | None = None,
    presence_penalties: _Tensor | None = None,
    frequency_penalties: _Tensor | None = None,
    counts: _Tensor | None = None,
    slots: _Tensor | None = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def sample_linear(
    x: _T,
    weight: _Tensor,
    temperatures: _Tensor,
    seeds: _Tensor,
    positions: _Tensor,
    *,
    logits: _Tensor,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    weight_is_constant: bool = False,
    batch_invariant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def decode_step(
    token_ids: _Tensor,
    sampled: _Tensor,
    positions: _Tensor,
    slot_mapping: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    temperatures: _Tensor,
    seeds: _Tensor,
    next_positions: _Tensor,
    embedding: _Tensor,
    norm: _Tensor,
    head: _Tensor,
    cos_sin: _Tensor,
    qkv_weights: _Tensor | Sequence[_Tensor],
    o_weights: _Tensor | Sequence[_Tensor],
    gate_up_weights: _Tensor | Sequence[_Tensor],
    down_weights: _Tensor | Sequence[_Tensor],
    q_norms: _Tensor | Sequence[_Tensor],
    k_norms: _Tensor | Sequence[_Tensor],
    k_caches: _Tensor | Sequence[_Tensor],
    v_caches: _Tensor | Sequence[_Tensor],
    words: _Tensor,
    in_clusters: bool,
    *,
    eps: float = 1e-06,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    stream: _Stream = None,
) -> None: ...
def decode_step_words(
    token_ids: _Tensor,
    sampled: _Tensor,
    positions: _Tensor,
    slot_mapping: _Tensor,
    block_tables: _Tensor,
    context_lens: _Tensor,
    temperatures: _Tensor,
    seeds: _Tensor,
    next_positions: _Tensor,
    embedding: _Tensor,
    norm: _Tensor,
    head: _Tensor,
    cos_sin: _Tensor,
    qkv_weights: _Tensor | Sequence[_Tensor],
    o_weights: _Tensor | Sequence[_Tensor],
    gate_up_weights: _Tensor | Sequence[_Tensor],
    down_weights: _Tensor | Sequence[_Tensor],
    q_norms: _Tensor | Sequence[_Tensor],
    k_norms: _Tensor | Sequence[_Tensor],
    k_caches: _Tensor | Sequence[_Tensor],
    v_caches: _Tensor | Sequence[_Tensor],
    in_clusters: bool,
    *,
    eps: float = 1e-06,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
) -> int: ...
def linear_candidates(
    x: _T,
    weight: _Tensor,
    temperatures: _Tensor,
    seeds: _Tensor,
    positions: _Tensor,
    first_token: int,
    *,
    logits: _Tensor,
    weight_scales: _Tensor | None = None,
    weight_zeros: _Tensor | None = None,
    weight_block: tuple[int, int] | None = None,
    weight_is_constant: bool = False,
    batch_invariant: bool = False,
    out: _T | None = None,
    stream: _Stream = None,
) -> _T: ...
def count_tokens(prompt_ids: _Tensor, output_ids: _Tensor, counts: _Tensor, *, stream: _Stream = None) -> None: ...
def token_logprobs(
    logits: _T,
    token_ids: _Tensor,
    num_best: int = 0,
    *,
    out_ids: _T | None = None,
    out: _T | None = None,
    stream: _Stream = None,
) -> tuple[_T, _T]: ...
def bias_logits(
    logits: _Tensor, rows: _Tensor, token_ids: _Tensor, values: _Tensor, *, stream: _Stream = None
) -> None: ...
def mask_logits(logits: _Tensor, bitmask: _Tensor, rows: _Tensor | None = None, *, stream: _Stream = None) -> None: ...
def take_sampled(token_ids: _Tensor, sampled: _Tensor, *, stream: _Stream = None) -> None: ...

@final
class Step(structseq[Any], tuple[_Int32, _Int32, _Int32, _Int32, _Int32, int]):
    __match_args__: Final = (
        "slot_mapping",
        "positions",
        "context_lens",
        "cu_seqlens_q",
        "block_tables",
        "max_seqlen_q",
    )
    @property
    def slot_mapping(self) -> _Int32: ...
    @property
    def positions(self) -> _Int32: ...
    @property
    def context_lens(self) -> _Int32: ...
    @property
    def cu_seqlens_q(self) -> _Int32: ...
    @property
    def block_tables(self) -> _Int32: ...
    @property
    def max_seqlen_q(self) -> int: ...

@final
class BlockManager:
    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        watermark: SupportsFloat = 0.0,
        num_host_blocks: int = 0,
        eviction: Literal["reuse", "lru"] = "reuse",
        hash_key: bytes | None = None,
        _hash_bits: int = 64,
    ) -> BlockManager: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int: ...
    @property
    def num_shared_blocks(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def num_free_host_blocks(self) -> int: ...
    @property
    def watermark_blocks(self) -> int: ...
    @watermark_blocks.setter
    def watermark_blocks(self, value: int, /) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def _repr_html_(self) -> str: ...
    def allocate(self, seq_id: int, token_ids: _Ints, *, salt: bytes = b"") -> int: ...
    def allocate_batch(
        self, seq_ids: _Ints, token_ids: Sequence[_Ints], *, salt: bytes = b""
    ) -> npt.NDArray[np.int64]: ...
    def match(self, token_ids: _Ints, *, salt: bytes = b"") -> tuple[int, int]: ...
    def can_allocate(self, token_ids_or_count: int | _Ints, *, salt: bytes = b"") -> bool: ...
    def append(self, seq_id: int, token_ids: int | _Ints) -> _Int32: ...
    def append_batch(self, seq_ids: _Ints, token_ids: _Ints | Sequence[_Ints]) -> _Int32: ...
    def reserve(self, seq_id: int, num_tokens: int) -> _Int32: ...
    def reserve_batch(self, seq_ids: _Ints, num_tokens: _Ints) -> _Int32: ...
    def commit(self, seq_id: int, num_computed_tokens: int) -> None: ...
    def commit_batch(self, seq_ids: _Ints, num_computed_tokens: _Ints) -> None: ...
    def fork(self, parent_id: int, child_id: int) -> None: ...
    def truncate(self, seq_id: int, num_tokens: int) -> None: ...
    def free(self, seq_id: int) -> None: ...
    def free_batch(self, seq_ids: _Ints) -> None: ...
    def swap_out(self, seq_id: int) -> _Int32: ...
    def swap_in(self, seq_id: int) -> _Int32: ...
    def block_table(self, seq_id: int) -> _Int32: ...
    def token_ids(self, seq_id: int) -> _Int32: ...
    def num_tokens(self, seq_id: int) -> int: ...
    def num_computed(self, seq_id: int) -> int: ...
    def prepare(
        self,
        seq_ids: _Ints,
        query_starts: _Ints,
        query_lens: _Ints,
        *,
        max_tokens: int = 0,
        max_seqs: int = 0,
        max_blocks: int = 0,
    ) -> Step: ...
    def resize(self, num_blocks: int) -> None: ...
    def explain(self, token_ids: _Ints, *, salt: bytes = b"") -> dict[str, Any]: ...
    def export_cache(self) -> tuple[_Int32, _Int32, _Int32, list[bytes], _Int32]: ...
    def import_cache(self, parents: _Ints, salt_indices: _Ints, salts: list[bytes], token_ids: _Ints) -> _Int32: ...
    def reset_prefix_cache(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def check(self) -> None: ...
