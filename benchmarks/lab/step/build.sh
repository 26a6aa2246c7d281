#!/bin/sh
# Builds the bench beside itself, or where $1 says.
cd "$(dirname "$0")/../../.." || exit 1
python=$(python3 -c "import sysconfig; print(sysconfig.get_path('include'))")
exec nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 --expt-relaxed-constexpr -cudart static -DPAGEDKV_WITH_CUDA \
    -Icsrc -I"$python" $FLAGS -Ibenchmarks/lab/step -o "${1:-benchmarks/lab/step/bench}" benchmarks/lab/step/bench.cu
