"""Times of sample beside a kernel that only reads the logits (read.cu), on one GPU: us a call in a CUDA graph, burst.

nvcc -O3 -arch=sm_90a -Xcompiler -fPIC -shared benchmarks/lab/sample/read.cu -o read.so
PYTHONPATH=.:benchmarks python benchmarks/lab/sample/times.py read.so
"""

import ctypes
import sys

import dense_cuda
import torch


def read_us(read_only, rows: int, dtype: torch.dtype) -> float:
    """Of the best launch shape."""
    num_bytes = rows * dense_cuda.VOCAB * dtype.itemsize
    sink = torch.empty(4, dtype=torch.int32, device="cuda")

    def measure(ctas: int, units: int) -> float:
        def make():
            x = dense_cuda.normal(rows, dense_cuda.VOCAB, dtype=dtype)
            stream = torch.cuda.current_stream
            return lambda _: read_only(
                x.data_ptr(),
                num_bytes,
                sink.data_ptr(),
                ctas,
                units,
                stream().cuda_stream,
            )

        return dense_cuda.measure("", make, num_bytes)["us"]

    return min(measure(ctas, units) for ctas, units in ((264, 4), (528, 2)))


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.read_only.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    print("rows dtype      read  greedy   T 0.6  T 0.6 / read")
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8, 32, 64, 256):
            read = read_us(library.read_only, rows, dtype)
            greedy, drawn = (
                dense_cuda.sample_row(rows, dtype, t)["us"] for t in (0.0, 0.6)
            )
            print(
                f"{rows:4} {dense_cuda.name_of(dtype):9} {read:6.2f} {greedy:7.2f} {drawn:7.2f} {drawn / read:7.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
