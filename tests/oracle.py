"""What every operation must compute, in NumPy float64, written from the definitions. Never imports pagedkv.

Numbers of the narrow dtypes are held as the float64 values that they stand for; `rounded` rounds to a dtype.
"""

import numpy as np

# All finite non-negative float8_e4m3fn numbers in order: code 0x00 to 0x7e (0x7f is NaN).
_F8_VALUES = np.array([(c & 7) * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(0x7F)])


def rounded(x, dtype: str) -> np.ndarray:
    """x rounded to nearest even in `dtype`, as float64. float8_e4m3fn saturates at 448; NaN stays NaN."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("float32", "float16"):
            return x.astype(dtype).astype(np.float64)
        if dtype == "bfloat16":
            bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            return np.where(np.isnan(x), np.nan, bits.astype(np.uint32).view(np.float32).astype(np.float64))
        assert dtype == "float8_e4m3fn", dtype
        magnitude = np.minimum(np.abs(x), 448.0)
        high = np.clip(np.searchsorted(_F8_VALUES, magnitude), 1, len(_F8_VALUES) - 1)
        below, above = magnitude - _F8_VALUES[high - 1], _F8_VALUES[high] - magnitude
        code = np.where((below < above) | ((below == above) & (high % 2 == 1)), high - 1, high)
        return np.where(np.isnan(x), np.nan, np.copysign(_F8_VALUES[code], x))


def tolerance(dtype: str) -> float:
    """Allowed error of a result of size about 1 in `dtype`, fp32 inside: a few last places."""
    return {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]


def store_kvcache(key, value, k_cache, v_cache, slot_mapping, *, cache_dtype, k_scale=None, v_scale=None):
    """Returns copies of the caches after the store. Caches [blocks, block_size, heads, dim], slots [tokens]."""
    results = []
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        cache = cache.copy()
        rows = cache.reshape(cache.shape[0] * cache.shape[1], *cache.shape[2:])
        for token, slot in enumerate(slot_mapping):
            if slot >= 0:
                new = np.asarray(x[token], np.float64)
                if scale is not None:  # the division is fp32, as on the devices
                    new = new.astype(np.float32) / np.asarray(scale, np.float32).reshape(-1, 1)
                rows[slot] = rounded(new, cache_dtype)
        results.append(cache)
    return results


def _scale_of(scale, seq, num_kv_heads):
    """A scale (None, number, [1], [heads] or [seqs, heads]) for one sequence, as [heads]."""
    scale = np.asarray(1.0 if scale is None else scale, np.float64)
    return np.broadcast_to(scale[seq] if scale.ndim == 2 else scale, (num_kv_heads,))


def paged_attention_fwd(
    q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, softmax_scale=None, causal=True,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, key_starts=None,
    table_starts=None,
):  # fmt: skip
    """Attention over pages, one query at a time. Returns out [tokens, heads, dim] and lse [heads, tokens]; rows that
    no sequence owns are NaN. Only what a query may see is read, so poison anywhere else shows."""
    q = np.asarray(q, np.float64)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    num_seqs = len(context_lens)
    if cu_seqlens_q is None:
        cu_seqlens_q = np.arange(num_seqs + 1) * (num_tokens // max(num_seqs, 1))
    scale = 1 / np.sqrt(head_dim) if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    group = num_q_heads // num_kv_heads
    out = np.full(q.shape, np.nan)
    lse = np.full((num_q_heads, num_tokens), np.nan)
    for s in range(num_seqs):
        first, end, context = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]), int(context_lens[s])
        start = 0 if key_starts is None else int(key_starts[s])
        table = block_tables[s, 0 if table_starts is None else int(table_starts[s]) :]
        places = start + np.arange(context)
        pages, slots = table[places // block_size], places % block_size
        for token in range(first, end):
            position = token - first + context - (end - first)
            is_seen = pages >= 0
            if left >= 0:
                is_seen[: max(position - left, 0)] = False
            if right >= 0:
                is_seen[max(position + right + 1, 0) :] = False
            seen = np.flatnonzero(is_seen)
            keys = k_cache[pages[seen], slots[seen]] * _scale_of(k_scale, s, num_kv_heads)[:, None]
            values = v_cache[pages[seen], slots[seen]] * _scale_of(v_scale, s, num_kv_heads)[:, None]
            queries = q[token].reshape(num_kv_heads, group, head_dim)
            logits = scale * (queries @ keys.transpose(1, 2, 0)).reshape(num_q_heads, len(seen))
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            if alibi_slopes is not None:
                slopes = np.asarray(alibi_slopes, np.float64)
                slopes = slopes[s] if slopes.ndim == 2 else slopes
                logits = logits - slopes[:, None] * np.abs(position - seen)
            with_sink = logits if sinks is None else np.concatenate([logits, np.asarray(sinks)[:, None]], axis=1)
            lse[:, token] = log_sum_exp(with_sink, axis=1)
            weights = np.exp(logits - np.where(np.isneginf(lse[:, token]), 0, lse[:, token])[:, None])
            sums = weights.reshape(num_kv_heads, group, len(seen)) @ values.transpose(1, 0, 2)
            out[token] = sums.reshape(num_q_heads, head_dim)
    return out, lse


def log_sum_exp(x, axis):
    """log(sum(exp(x))), -inf where there is nothing or all is -inf."""
    x = np.asarray(x, np.float64)
    if x.shape[axis] == 0:
        return np.full(np.delete(x.shape, axis), -np.inf)
    highest = x.max(axis, keepdims=True)
    origin = np.where(np.isneginf(highest), 0, highest)
    with np.errstate(divide="ignore"):
        return np.squeeze(origin, axis) + np.log(np.exp(x - origin).sum(axis))


def merge_attention_states(o, lse):
    """o [parts, tokens, heads, dim], lse [parts, heads, tokens]; a part with lse -inf counts nothing."""
    merged = log_sum_exp(lse, axis=0)
    weights = np.exp(lse - np.where(np.isneginf(merged), 0, merged)).transpose(0, 2, 1)[..., None]
    return np.where(weights > 0, weights * np.where(weights > 0, o, 0), 0).sum(0), merged


# --- dense operations


def rms_norm(x, weight, eps, dtype: str, *, residual=None):
    """Returns out and the new residual (None without one). Rounds where the definition does: the sum with the residual,
    the normalised row, the product with the weight."""
    if residual is not None:
        residual = x = rounded(np.asarray(x) + residual, dtype)
    return rounded(rounded(over_rms(x, x, eps), dtype) * weight, dtype), residual


def over_rms(rows, x, eps):
    """rows, each divided by the root mean square of its row of x; not rounded."""
    return np.asarray(rows, np.float64) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)


def silu_and_mul(x, dtype: str):
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        return rounded(rounded(gate / (1 + np.exp(-gate)), dtype) * up, dtype)


def linear(x, weight, bias=None):
    """In float64, not rounded."""
    product = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return product if bias is None else product + bias


INT4_BITS = 0, 16, 4, 20, 8, 24, 12, 28  # where each of 8 neighbours begins in a little-endian word of 32 bits


def packed_int4(values) -> np.ndarray:
    """[rows, columns] of 0 to 15 as uint8 [rows, columns / 2]."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for i, bit in enumerate(INT4_BITS):
        words |= values[:, i::8].astype(np.uint32) << bit
    return words.astype("<u4").view(np.uint8).reshape(len(values), values.shape[1] // 2)


def unpacked_int4(packed) -> np.ndarray:
    words = np.ascontiguousarray(packed, np.uint8).view("<u4")[..., None] >> np.array(INT4_BITS, np.uint32)
    return (words & 15).reshape(len(packed), 2 * packed.shape[1])


def dequantized(weight, scales, block, zeros=None) -> np.ndarray:
    """weight [rows, columns], numbers of float8 or of int4, with a scale for each block of it, in float64. `zeros`: those of
    the blocks, or one number."""
    rows, columns = weight.shape
    spread = lambda x: np.repeat(np.repeat(np.asarray(x, np.float64), block[0], 0), block[1], 1)[:rows, :columns]
    return (np.asarray(weight, np.float64) - (spread(zeros) if np.ndim(zeros) else zeros or 0)) * spread(scales)


def rotate_halves(x, cos_sin):
    """x [..., dim], cos_sin [..., dim]: cos of every pair (i, i + dim / 2), then sin."""
    (low, high), (cosine, sine) = np.split(x, 2, axis=-1), np.split(np.asarray(cos_sin, np.float64), 2, axis=-1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def qk_norm_rope_store(
    qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps, dtype, *, rms_of=None,
    cache_dtype=None, k_scale=None, v_scale=None,
):
    """Returns q [tokens, heads, dim] and copies of the caches after the store."""
    qkv = qkv if rms_of is None else over_rms(qkv, rms_of, eps)
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = np.asarray(qkv, np.float64).reshape(len(qkv), qkv.shape[1] // head_dim, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, eps, dtype)[0], rms_norm(k, k_weight, eps, dtype)[0]
    q, k = (rounded(rotate_halves(x, cos_sin[positions][:, None]), dtype) for x in (q, k))
    return q, *store_kvcache(
        k, rounded(v, dtype), k_cache, v_cache, slot_mapping, cache_dtype=cache_dtype or dtype, k_scale=k_scale,
        v_scale=v_scale,
    )


def rotated(x, cos, sin, interleaved: bool):
    """x [..., dim]; cos, sin [..., rotary_dim / 2] of pairs (i, i + rotary_dim / 2), or neighbours."""
    pairs = cos.shape[-1]
    low = np.arange(pairs) * 2 if interleaved else np.arange(pairs)
    high = low + (1 if interleaved else pairs)
    result = np.array(x, np.float64)
    result[..., low] = x[..., low] * cos - x[..., high] * sin
    result[..., high] = x[..., high] * cos + x[..., low] * sin
    return result


def append_kvcache(
    key, value, k_cache, v_cache, block_tables, cache_lens, *, cache_dtype, cu_seqlens=None, key_starts=None,
    k_scale=None, v_scale=None, q=None, cos=None, sin=None, cu_seqlens_q=None, rotary_starts=None, interleaved=False,
    q_at_start=False, dtype=None,
):
    """Returns copies of the caches after it, q rotated (NaN where nobody owns a row), and the slots of the tokens, -1 for
    none. `dtype`: of key, with q."""
    num_seqs, size = len(cache_lens), k_cache.shape[1]
    each = lambda starts, x: np.arange(num_seqs + 1) * (len(x) // max(num_seqs, 1)) if starts is None else starts
    key, slots = np.array(key, np.float64), np.full(len(key), -1)
    out = None if q is None else np.full(q.shape, np.nan)
    for s in range(num_seqs):
        rotary_start = cache_lens[s] if rotary_starts is None else rotary_starts[s]
        turned = lambda x, at: rounded(rotated(x, cos[at], sin[at], interleaved), dtype) if cos.shape[1] else x
        first, end = each(cu_seqlens, key)[s : s + 2]
        for i, token in enumerate(range(first, end)):
            at = (0 if key_starts is None else key_starts[s]) + cache_lens[s] + i
            page = block_tables[s, at // size]
            slots[token] = -1 if page < 0 else page * size + at % size
            if q is not None:
                key[token] = turned(key[token], rotary_start + i)
        if q is not None:
            first, end = each(cu_seqlens_q, q)[s : s + 2]
            for i, token in enumerate(range(first, end)):
                out[token] = turned(q[token], rotary_start + (0 if q_at_start else i))
    caches = store_kvcache(key, value, k_cache, v_cache, slots, cache_dtype=cache_dtype, k_scale=k_scale, v_scale=v_scale)
    return *caches, out, slots


# --- mixture of experts


def route_experts(logits, num_chosen: int, normalize: bool = False):
    """The experts [tokens, num_chosen] of the greatest logits, the lowest first of equals, and softmax(logits) of them."""
    logits = np.asarray(logits, np.float64)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :num_chosen]
    weights = np.exp(np.take_along_axis(logits - log_sum_exp(logits, 1)[:, None], experts, 1))
    return experts, weights / weights.sum(1, keepdims=True) if normalize else weights


def expert_linear(x, weight, experts, weights=None):
    """x [tokens, in], or with weights [tokens, chosen, in]; weight [experts, out, in], of which only what is used is read."""
    num_tokens, num_chosen = experts.shape
    products = np.zeros((num_tokens, num_chosen, weight.shape[1]))
    for t, j in np.ndindex(num_tokens, num_chosen):
        products[t, j] = weight[experts[t, j]] @ (x[t] if weights is None else x[t, j])
    return products if weights is None else (products * np.asarray(weights)[..., None]).sum(1)


def moe_mlp(x, router, gate_up, down, num_chosen: int, dtype: str, normalize: bool = False):
    """The sums [tokens, hidden], the experts and their weights; what lies in between is rounded as the modules round it."""
    experts, weights = route_experts(x @ router.T, num_chosen, normalize)
    product = rounded(expert_linear(x, gate_up, experts), dtype)
    act = silu_and_mul(product.reshape(experts.size, gate_up.shape[1]), dtype).reshape(*experts.shape, gate_up.shape[1] // 2)
    return expert_linear(act, down, experts, weights), experts, weights


def lora(x, a, b, slots):
    """What adapters add: b[slots[t]] @ (a[slots[t]] @ x[t]), zeros where the slot is negative. Only what is used is read."""
    added = np.zeros((len(x), b.shape[1]))
    for t in np.flatnonzero(np.asarray(slots) >= 0):
        added[t] = b[slots[t]] @ (a[slots[t]] @ x[t])
    return added


# --- sampling


def philox4x32(counter, key) -> list:
    """Philox4x32 of Salmon et al. 2011: 4 words from 4 words of counter, integers or arrays of uint64, and 2 of key."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def gumbel(vocab_size: int, seed: int, position: int, first: int = 0) -> np.ndarray:
    """The variate of every token from `first` on, -log of an exponential one. In every block of 16 tokens the least of these is an
    exponential variate / 16 on one of them, and each of the others has an exponential variate more than it."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)

    def words(count, stream, before):
        counters = np.arange(-(-count // 4), dtype=np.uint64) + before // 4
        return np.stack(philox4x32((counters, position, stream, 0), key), axis=-1).reshape(-1)[:count].astype(np.int64)

    def exponential(word):
        return -np.log1p(-np.minimum((word + 0.5) * 2.0**-32, 1 - 2.0**-24))

    num_blocks = -(-vocab_size // 16)
    y, z = words(num_blocks, 0, first // 16), words(16 * num_blocks, 1, first)
    more = exponential(z)
    more[np.arange(num_blocks) * 16 + (y * 0x9E3779B9 % 2**32 >> 28)] = 0
    return -np.log(np.repeat(exponential(y) / 16, 16) + more)[:vocab_size]


def sample_keys(logits, temperature: float, seed: int, position: int, first: int = 0) -> np.ndarray:
    """What a row's tokens are compared by, over the temperature: the greatest wins, the lowest index among equals."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0 or logits.max() == np.inf:
        return logits
    return (logits - logits.max()) / temperature + gumbel(len(logits), seed, position, first)


def token_counts(prompt_ids, output_ids, vocab_size: int) -> np.ndarray:
    """Twice the times that a token was generated, plus 1 where the prompt holds it."""
    counts = 2 * np.bincount(output_ids, minlength=vocab_size)
    counts[prompt_ids] += 1  # once, however often it is there
    return counts


def penalized(logits, counts, repetition: float, presence: float, frequency: float) -> np.ndarray:
    x, seen, times = np.asarray(logits, np.float64), np.asarray(counts) > 0, np.maximum(counts, 0) // 2
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * times - presence * (times > 0)


def kept(x, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, slack: float = 0.0) -> np.ndarray:
    """Which tokens min-p, top-k and top-p leave, by sorting. With `slack`, also those that numbers so much off would
    (relative, of what is compared); a negative one: only those that they would, too."""
    x = np.asarray(x, np.float64)
    order = np.argsort(-x, kind="stable")
    with np.errstate(divide="ignore"):
        z = (x[order] - x.max()) / temperature
    weights = np.exp(z)
    left = (weights >= min_p * (1 - slack)) | (z == 0) if min_p > 0 else np.isfinite(z)
    if 0 < top_k < len(x):
        left &= z >= z[top_k - 1]
    if top_p < 1:
        share = np.where(left, weights, 0) / weights[left].sum()
        sums = np.concatenate([[0], np.cumsum(share)])
        greater = sums[np.searchsorted(-z, -z, side="left")]  # before the first of its equals
        left &= (greater < top_p * (1 + slack)) | (z == 0)
    mask = np.zeros(len(x), bool)
    mask[order[left]] = True
    return mask


def token_logprobs(logits, token: int, num_best: int):
    """ids and log softmax of the token and of the best."""
    logits = np.asarray(logits, np.float64)
    ids = [token, *np.argsort(-logits, kind="stable")[:num_best]]
    return ids, (logits - log_sum_exp(logits, 0))[ids]
