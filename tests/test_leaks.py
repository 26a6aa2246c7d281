"""References and memory that a call forgets, on its good path and on its error paths, in fresh interpreters.

Each case runs many times; what grows with the number of runs leaks. Counted are the allocated blocks of Python
(sys.getallocatedblocks: a lost reference shows as blocks), the references of the arguments and of shared objects, and for
memory outside of Python the resident size.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv

HERE = Path(__file__).parent
WHERE = Path(pagedkv.__file__).parent.parent

HARNESS = """
import gc, sys
sys.path[:0] = [{where!r}, {here!r}]
import numpy as np
import pagedkv

def check(name, case, shared=(), runs=200):
    case()
    gc.collect()
    for _ in range(20): case()
    best = None
    for attempt in range(40):  # caches may still be filling; a leak grows by a block or more each run, for ever
        gc.collect()
        references = [sys.getrefcount(o) for o in shared]
        before = sys.getallocatedblocks()
        for _ in range(runs): case()
        gc.collect()
        grown = sys.getallocatedblocks() - before
        drift = [sys.getrefcount(o) - r for o, r in zip(shared, references)]
        best = grown if best is None else min(best, grown)
        if best < runs * 3 // 4 and not any(abs(d) >= runs * 3 // 4 for d in drift): break
    if best >= runs * 3 // 4 or any(abs(d) >= runs * 3 // 4 for d in drift):
        print(f'{{name}}: {{best}} blocks, {{drift}} references after {{runs}} runs')

def fails(function, *args, **options):
    try: function(*args, **options)
    except Exception: return
    raise AssertionError('did not raise')
"""


def run(code: str) -> None:
    program = HARNESS.format(where=str(WHERE), here=str(HERE)) + code
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_operations():
    run("""
from test_bad_calls import OPS, TABLE, TENSOR_TABLE, good
shared = [None, True, pagedkv.Tensor, np.ndarray, np.dtype('float32'), pagedkv._C]
for op, function in OPS.items():
    arguments = vars(good())[op]
    check(op, lambda: function(**arguments), [*arguments.values(), *shared])
    check(op + ' unknown', lambda: fails(function, **arguments, unknown=1), arguments.values())
    check(op + ' missing', lambda: fails(function), shared)
    check(op + ' stream', lambda: fails(function, **arguments, stream='x'), arguments.values())
    own = {k: [pagedkv.asarray(x) for x in v] if isinstance(v, list) else pagedkv.asarray(v) for k, v in arguments.items()}
    check(op + ' on Tensor', lambda: function(**own), [*own.values(), *shared])
for row, (op, change, error, message) in enumerate(TABLE):
    if error is None: continue
    arguments = vars(good())[op] | change
    check(f'{op}-{row}', lambda: fails(OPS[op], **arguments), [*arguments.values(), *shared], runs=50)
tensor = pagedkv.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
for row, (call, error, message) in enumerate(TENSOR_TABLE):
    check(f'tensor-{row}', lambda: fails(call, tensor), [tensor, *shared], runs=50)
""")


def test_tensor():
    run("""
import io
array = np.arange(24, dtype=np.float32).reshape(4, 6)
tensor = pagedkv.asarray(array)
shared = [tensor, array, pagedkv.Tensor, None]
class Old:
    def __dlpack_device__(self): return (1, 0)
    def __dlpack__(self, stream=None): return tensor.__dlpack__()
class New(Old):
    def __dlpack__(self, **options): return tensor.__dlpack__(**options)
class Broken(Old):
    def __dlpack__(self, **options): raise BufferError('no')
old, new, broken = Old(), New(), Broken()
for name, case in {
    'empty': lambda: pagedkv.empty((3, 4), 'bfloat16'),
    'attributes': lambda: (tensor.shape, tensor.strides, tensor.dtype, tensor.device, tensor.nbytes, repr(tensor)),
    'index': lambda: tensor[1][2], 'slice': lambda: tensor[::-1][1:3], 'view': lambda: tensor.view((2, 12)).view(24),
    'reread': lambda: tensor.view(-1, 'uint8'),
    'tolist': lambda: tensor.tolist(), 'numpy': lambda: tensor.numpy(), 'memoryview': lambda: memoryview(tensor[1:]),
    'refused': lambda: fails(io.BytesIO().write, tensor[::-1]),
    'bf16': lambda: fails(np.asarray, pagedkv.empty(3, 'bfloat16')),
    'from numpy': lambda: pagedkv.from_dlpack(array), 'list': lambda: pagedkv.asarray([[1, 2], [3, 4]]),
    'float64': lambda: pagedkv.asarray(np.ones(3)), 'convert': lambda: pagedkv.asarray(array, 'float16'),
    'to int': lambda: pagedkv.asarray(array, 'int32'), 'does not fit': lambda: fails(pagedkv.asarray, [300], 'uint8'),
    'copy': lambda: tensor.copy_(array), 'capsule': lambda: tensor.__dlpack__(),
    'capsule 1': lambda: tensor.__dlpack__(max_version=(1, 0)), 'capsule copy': lambda: tensor.__dlpack__(copy=True),
    'np.from_dlpack': lambda: np.from_dlpack(tensor), 'old': lambda: pagedkv.from_dlpack(old),
    'new': lambda: pagedkv.from_dlpack(new), 'broken': lambda: fails(pagedkv.from_dlpack, broken),
    'dtype': lambda: fails(pagedkv.from_dlpack, np.ones(3)), 'info': pagedkv.ops.build_info,
    'threads': lambda: pagedkv.ops.set_num_threads(pagedkv.ops.get_num_threads()),
    'ids': lambda: pagedkv._C._pack_ids(list(range(300)), 300),
    'ids out of range': lambda: fails(pagedkv._C._pack_ids, list(range(300)), 299),
}.items():
    check(name, case, shared)
""")


def test_block_manager():
    run("""
tokens = list(range(40))
array = np.arange(40, dtype=np.int32)
salt = b'tenant'
manager = pagedkv.BlockManager(64, 4, num_host_blocks=16)
shared = [tokens, array, salt, None, pagedkv.BlockManager]
def life():
    manager.allocate(1, tokens, salt=salt); manager.commit(1, 40); manager.fork(1, 2); manager.append(2, 7)
    manager.append(1, [1, 2]); manager.truncate(1, 20); manager.reserve(1, 30); manager.block_table(2); manager.token_ids(2)
    manager.match(array); manager.can_allocate(5); manager.free(1); manager.swap_out(2); manager.swap_in(2); manager.free(2)
    manager.allocate_batch([3, 4], [tokens, array]); manager.append_batch([3, 4], [5, 6]); manager.commit_batch([3, 4], [9, 9])
    manager.prepare([3, 4], [9, 9], [1, 2]); manager.stats(); repr(manager); manager._repr_html_(); manager.free_batch([3, 4])
    manager.reset_prefix_cache(); manager.check(); len(manager); 3 in manager
check('life', life, shared)
check('new', lambda: pagedkv.BlockManager(8, 4).allocate(1, [1, 2]), shared)
manager.allocate(1, tokens)
for name, case in {
    'no room': lambda: fails(manager.allocate, 2, [9] * 1000), 'twice': lambda: fails(manager.allocate, 1, tokens),
    'unknown': lambda: fails(manager.free, 99), 'salt': lambda: fails(manager.allocate, 2, tokens, salt='x'),
    'token': lambda: fails(manager.append, 1, [1, 2, -3]), 'tokens': lambda: fails(manager.append, 1, [1, 'a']),
    'text': lambda: fails(manager.append, 1, 'abc'), 'float': lambda: fails(manager.append, 1, np.ones(3, np.float32)),
    'batch': lambda: fails(manager.append_batch, [1, 99], [1, 2]), 'lengths': lambda: fails(manager.commit_batch, [1], [1, 2]),
    'prepare': lambda: fails(manager.prepare, [1], [0], [99]), 'arguments': lambda: fails(pagedkv.BlockManager, 0, 0),
}.items():
    check(name, case, shared)
step = manager.prepare([1], [0], [4])
check('steps', lambda: manager.prepare([1], [0], [4]), shared)
""")


def test_torch():
    pytest.importorskip("torch")
    run("""
import torch
x, weight, out = torch.randn(4, 8), torch.ones(8), torch.empty(4, 8)
tensor = pagedkv.from_dlpack(x)
watched = torch.randn(4, 8, requires_grad=True)
shared = [x, weight, out, tensor, watched, torch.Tensor, None]
for name, case in {
    'torch out': lambda: pagedkv.ops.rms_norm(x, weight), 'given': lambda: pagedkv.ops.rms_norm(x, weight, out=out),
    'grad': lambda: fails(pagedkv.ops.rms_norm, x, weight, out=watched), 'read': lambda: pagedkv.ops.rms_norm(watched, weight),
    'dtype': lambda: fails(pagedkv.ops.rms_norm, x.double(), weight), 'from': lambda: pagedkv.from_dlpack(x),
    'to': lambda: torch.from_dlpack(tensor), 'to old': lambda: torch.from_dlpack(tensor.__dlpack__()),
    'shape': lambda: fails(pagedkv.ops.rms_norm, x, x),
    'meta': lambda: fails(pagedkv.ops.rms_norm, torch.empty(2, 8, device='meta'), weight),
}.items():
    check(name, case, shared)
""")


def test_memory_outside_of_python():
    """Resident size: a megabyte a round that is not given back would be 400 MB."""
    run("""
import resource
array = np.zeros((512, 512), np.float32)
def rounds():
    for _ in range(100):
        tensor = pagedkv.empty((512, 512)); view = tensor[3:]; del tensor
        capsule = view.__dlpack__(); del view
        pagedkv.asarray(array, 'float32').__dlpack__(copy=True)
        pagedkv.asarray(pagedkv.asarray(array, 'float16'), 'float32')
        pagedkv.ops.rms_norm(array, array[0]); pagedkv.ops.linear(array, array)
        pagedkv.BlockManager(20000, 16).allocate(1, np.zeros(1000, np.int32))
rounds()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(4): rounds()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
if grown > 60_000: print(f'{grown} KiB')
""")


def test_the_harness_finds_a_leak():
    with pytest.raises(AssertionError):
        run("kept = []\ncheck('leaky', lambda: kept.append(pagedkv.empty(3)), [pagedkv.Tensor])")


def test_elastic_buffers():
    run("""
def make():
    buffer = pagedkv.ops.ElasticBuffer(1 << 30)
    buffer.resize(1 << 20)
    view = buffer.tensor((4, 4))[1:]
    buffer.tensor(16, reserved=True).numpy()
    del buffer
    view.numpy()
def wrong():
    buffer = pagedkv.ops.ElasticBuffer(8192)
    fails(buffer.resize, 8193)
    fails(buffer.resize, 'x')
    fails(buffer.tensor, 1)
    fails(buffer.tensor, 1, 'int7')
    buffer.resize(4096)
    kept = buffer.tensor(1)
    fails(buffer.resize, 0)
    fails(pagedkv.ops.ElasticBuffer, 0)
    fails(pagedkv.ops.ElasticBuffer, 2**63 - 1)
    fails(pagedkv.ops.ElasticBuffer, 1, 'tpu')
check('elastic', make, shared=[pagedkv.ops.ElasticBuffer])
check('elastic errors', wrong, shared=[pagedkv.ops.ElasticBuffer])
""")


def test_suffix_index():
    run("""
def make():
    index = pagedkv.ops.SuffixIndex(1000)
    last = index.append(0, list(range(50)) * 3, 7)
    index.propose(last, 9)
def wrong():
    fails(pagedkv.ops.SuffixIndex, 0)
    index = pagedkv.ops.SuffixIndex(10)
    fails(index.append, 0, [1, -1])
    fails(index.append, 0, 1)
    fails(index.propose, 0, 5000)
check('suffix index', make, shared=[pagedkv.ops.SuffixIndex])
check('suffix index errors', wrong, shared=[pagedkv.ops.SuffixIndex])
""")
