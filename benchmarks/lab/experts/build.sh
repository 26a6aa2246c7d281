#!/bin/sh
# Builds the bench: build.sh OUTPUT [nvcc flags]
set -e
cd "$(dirname "$0")/../../.."
output=$1
shift
exec nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Icsrc -DPAGEDKV_WITH_CUDA "$@" \
    benchmarks/lab/experts/bench.cu csrc/cuda/experts/*.cu csrc/cuda/device.cu csrc/cuda/scratch.cu csrc/cuda/sm90.cu \
    csrc/cuda/linear/few.cu -o "$output"
