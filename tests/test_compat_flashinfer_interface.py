"""The interface of pagedkv.compat.flashinfer: what plans and runs refuse, what bad calls raise, and the signatures.

PAGEDKV_FLASHINFER=FOLDER, an unpacked wheel of flashinfer-python, adds a comparison of the signatures with its files.
"""

import ast
import inspect
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat.flashinfer is for PyTorch's tensors")

from flashinfer_batches import Batch, graph_buffers, workspace  # noqa: E402

from pagedkv.compat import flashinfer as fi  # noqa: E402


@pytest.fixture
def planned(rng):
    batch = Batch(rng, "cpu", [3, 20], 4, dtype="float16")
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(*batch.pages, 4, 2, 64, 4)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    prefill.plan(torch.tensor([0, 1, 2]), *batch.pages, 4, 2, 64, 4, causal=True)
    return batch, decode, prefill, batch.queries(rng, 2, 4), batch.caches("NHD", True)


def refused(name):
    return pytest.raises(NotImplementedError, match=name)


def test_what_plans_refuse(planned):
    batch, decode, prefill, _, _ = planned
    for options in (
        dict(pos_encoding_mode="ROPE_LLAMA"), dict(window_right=1), dict(is_causal=True), dict(kv_data_type="float8_e5m2"),
        dict(kv_data_type="uint8"), dict(q_data_type="float8_e4m3fn"), dict(o_data_type="bfloat16"),
    ):  # fmt: skip
        with refused(next(iter(options))):
            decode.plan(*batch.pages, 4, 2, 64, 4, **options)
    mask = torch.ones(23, dtype=torch.bool)
    for options in (
        dict(custom_mask=mask), dict(packed_custom_mask=mask), dict(prefix_len_ptr=mask), dict(head_dim_vo=32),
        dict(token_pos_in_items_ptr=mask), dict(max_item_len_ptr=mask), dict(pos_encoding_mode="ROPE_LLAMA"),
    ):  # fmt: skip
        with refused(next(iter(options))):
            prefill.plan(torch.tensor([0, 1, 2]), *batch.pages, 4, 2, 64, 4, **options)
    for cls, name in (
        (fi.BatchDecodeWithPagedKVCacheWrapper, "jit_args"), (fi.BatchPrefillWithPagedKVCacheWrapper, "jit_kwargs"),
        (fi.BatchPrefillWithPagedKVCacheWrapper, "custom_mask_buf"), (fi.BatchPrefillWithPagedKVCacheWrapper, "variant_owns_mask"),
    ):  # fmt: skip
        with refused(name):
            cls(workspace("cpu"), **{name: True})


def test_what_runs_refuse(planned):
    _, decode, prefill, q, caches = planned
    for wrapper in (decode, prefill):
        for options in (dict(kv_cache_sf=caches), dict(skip_softmax_threshold_scale_factor=1.0)):
            with refused(next(iter(options))):
                wrapper.run(q, caches, **options)
        with refused("args"):
            wrapper.run(q, caches, 1.0)
        with refused("k_scale"):
            wrapper.run(q, caches, k_scale=torch.tensor(1.0))


def test_run_before_plan(planned):
    *_, q, caches = planned
    for cls in (fi.BatchDecodeWithPagedKVCacheWrapper, fi.BatchPrefillWithPagedKVCacheWrapper):
        with pytest.raises(RuntimeError, match=f"{cls.__name__}: run\\(\\) was called before plan\\(\\)"):
            cls(workspace("cpu")).run(q, caches)


def test_bad_calls(planned):
    batch, decode, prefill, q, caches = planned
    for call, error, message in (
        (lambda: decode.run(q.float(), caches), ValueError, "dtype of q torch.float32 does not match the q_data_type"),
        (lambda: decode.run(q, caches.float()), ValueError, "dtype of k torch.float32 does not match the kv_data_type"),
        (lambda: decode.run(q[:1], caches), ValueError, "q has 1 rows but plan() was given 2 sequences with 1 each"),
        (lambda: decode.run(q, caches, q_len_per_req=2), ValueError, "q has 2 rows but plan() was given 2 sequences"),
        (lambda: decode.run(q[:, :3], caches), ValueError, "were planned as"),
        (lambda: decode.run(q, caches[:, :, :3]), ValueError, "were planned as"),
        (lambda: decode.run(q, caches, out=q[:1]), ValueError, "out: shape is"),
        (lambda: decode.run(q, caches, lse=torch.empty(4, 2), return_lse=True), ValueError, "lse: shape is (4, 2)"),
        (lambda: decode.run(q, caches[0, 0]), ValueError, "paged_kv_cache: has 3 dimensions but must have 4 or 5"),
        (lambda: decode.run(q, (caches, caches)), ValueError, "paged_kv_cache: K has 5 dimensions but must have 3 or 4"),
        (lambda: decode.run(q, [caches, caches]), KeyError, "must be a tensor or a tuple of two, not list"),
        (lambda: prefill.run(q[:1], caches), ValueError, "q.shape[0] (1) does not match qo_indptr[-1] (2)"),
        (lambda: prefill.run(q, caches, lse_base="log10"), ValueError, "lse_base must be one of"),
        (lambda: prefill.run(q, caches, lse_layout="TH"), ValueError, "lse_layout must be one of"),
        (lambda: decode.plan(*batch.pages, 4, 2, 64, 4, pos_encoding_mode="SIN"), KeyError, "Invalid pos_encoding_mode SIN"),
        (lambda: decode.plan(batch.indptr[:1], *batch.pages[1:], 4, 2, 64, 4), ValueError,
         "indptr of the pages has 1 entries but must have 3, batch_size + 1"),
        (lambda: decode.plan(*batch.pages, 4, 2, 64, 4, seq_lens=torch.tensor([3])), ValueError,
         "seq_lens has 1 entries but must have 2, batch_size"),
        (lambda: prefill.plan(torch.tensor([0]), *batch.pages, 4, 2, 64, 4), ValueError,
         "qo_indptr has 1 entries but must have 3, batch_size + 1"),
        (lambda: decode.plan(*batch.pages, 4, 2, 64, 4, q_len_per_req=0), ValueError, "q_len_per_req must be >= 1, got 0"),
        (lambda: fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "DNH"), KeyError, "Invalid kv_layout DNH"),
        (lambda: fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_cuda_graph=True), ValueError,
         "paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode"),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            call()
        assert message in str(raised.value)


def test_fixed_sizes_of_graphs(planned):
    batch = planned[0]
    for buffers, message in (
        (graph_buffers(3, 9, "cpu"), "it is 2 but was 3 at initialization"),
        (graph_buffers(2, 5, "cpu"), "indices has 6 pages but its buffer holds 5"),
    ):
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *buffers)
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*batch.pages, 4, 2, 64, 4)
    indptr, indices, last = graph_buffers(2, 9, "cpu")
    with pytest.raises(ValueError, match="The size of paged_kv_indptr_buffer should be batch_size \\+ 1"):
        fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), indptr[1:], indices, last)
    with pytest.raises(ValueError, match="The size of qo_indptr_buf should be batch_size \\+ 1"):
        fi.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, last, indptr, indices, last)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, indptr.clone(), indptr, indices, last)
    with pytest.raises(ValueError, match="qo_indptr has 1 entries but must have 3"):  # it would have filled the buffer
        wrapper.plan(torch.tensor([0]), *batch.pages, 4, 2, 64, 4)


# --- signatures


def parameters_of(function):
    """(name, default) of a parsed function, in order; defaults as text."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(given) - len(arguments.defaults)) + arguments.defaults
    pairs = list(zip(given, defaults)) + list(zip(arguments.kwonlyargs, arguments.kw_defaults))
    pairs = [(name.arg, default and ast.unparse(default)) for name, default in pairs]
    return [each for each in pairs if each[0] != "self"]


def own_parameters(function):
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        (each.name, None if each.default is each.empty else repr(each.default))
        for each in parameters if each.kind not in kinds and not each.name.startswith("_")
    ]  # fmt: skip


def test_signatures_are_theirs():
    if "PAGEDKV_FLASHINFER" not in os.environ:
        pytest.skip("PAGEDKV_FLASHINFER names no unpacked wheel of flashinfer-python")
    folder = Path(os.environ["PAGEDKV_FLASHINFER"], "flashinfer")
    num_compared = 0
    for module in ("decode", "prefill", "page"):
        ours = getattr(fi, module)
        for node in ast.parse((folder / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in fi.__all__:
                assert own_parameters(getattr(ours, node.name)) == parameters_of(node), node.name
                num_compared += 1
            if not isinstance(node, ast.ClassDef) or node.name not in fi.__all__:
                continue
            theirs = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            for name, method in theirs.items():
                own = getattr(getattr(ours, node.name), "plan" if name == "_plan_impl" else name, None)
                if not inspect.isfunction(own) or (name == "plan" and "_plan_impl" in theirs):
                    continue
                given, wanted = own_parameters(own), parameters_of(method)
                # 0.7.2 has this method's options by keyword alone; run of 0.6.14 has three options fewer.
                if name == "_plan_impl":
                    assert sorted(given) == sorted(wanted)
                else:
                    assert [each for each in given if each in wanted] == wanted, f"{node.name}.{name}"
                num_compared += 1
    assert num_compared >= 15
