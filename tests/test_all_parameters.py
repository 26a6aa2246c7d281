"""Every function that takes tensors, with every parameter that it has given at once, against the oracle.

The arguments are drawn by the fuzzer of calls (fuzz_calls.py), which knows how they must fit.
"""

import fuzz_calls
import pytest
from fuzz_calls_memory import View
from fuzz_calls_ops import Draw

import pagedkv

# What takes no tensor, or one beside nothing else; and what only a Hopper GPU computes.
WITHOUT = {
    "empty", "open_ipc", "from_dlpack", "synchronize", "check_errors", "reload_context", "memory_info",
    "num_multiprocessors", "get_num_threads", "set_num_threads", "build_info", "kernel_instances", "_pack_ids",
    "decode_step", "decode_step_words",
}
GIVEN_NOWHERE_ELSE = {"linear_algorithms": {"near"}}  # what only a GPU has


def functions_of_the_extension() -> set[str]:
    return {
        name for name in dir(pagedkv._C) if type(getattr(pagedkv._C, name)).__name__ == "builtin_function_or_method"
    }


def test_the_fuzzer_knows_every_function():
    assert functions_of_the_extension() - WITHOUT == {name for name in fuzz_calls.OPERATIONS if "." not in name}


def draw_everything(name: str, rng) -> dict:
    """Arguments with a tensor wherever one may be; drawn again until there is enough of everything."""
    missing = set(fuzz_calls.PARAMETERS[name]) - GIVEN_NOWHERE_ELSE.get(name, set())
    for _ in range(2000):
        arguments = fuzz_calls.OPERATIONS[name].draw(Draw(rng, everything=True))
        has_tensor_scales = "k_scale" not in arguments or isinstance(arguments["k_scale"], View)
        if has_tensor_scales and not missing - set(arguments):
            return arguments
    raise AssertionError(f"{name}: {missing - set(arguments)} is never drawn")


@pytest.mark.parametrize("name", fuzz_calls.OPERATIONS)
def test_every_parameter_at_once(rng, name):
    operation = fuzz_calls.OPERATIONS[name]
    for _ in range(5):
        arguments = draw_everything(name, rng)
        views = [holder[key] for holder, key in fuzz_calls.views_in(arguments)]
        for view in views:
            view.memory.remember()
        if operation.expect is None:
            with pytest.raises(NotImplementedError):
                fuzz_calls.call(name, arguments, rng)
            continue
        fuzz_calls.judge(name, arguments, views, fuzz_calls.call(name, arguments, rng))


def test_a_projection_with_every_tensor(rng):
    """The call that takes the most, of the operations."""
    arguments = draw_everything("qkv_attention_fwd", rng)
    while arguments["q_weight"] is None:
        arguments = draw_everything("qkv_attention_fwd", rng)
    views = [value for value in arguments.values() if isinstance(value, View)]
    assert len(views) >= 16
    for view in views:
        view.memory.remember()
    fuzz_calls.judge("qkv_attention_fwd", arguments, views, fuzz_calls.call("qkv_attention_fwd", arguments, rng))
