#!/bin/sh
# Builds a bench of this folder: build.sh bench|many_bench OUTPUT [nvcc flags]
set -e
cd "$(dirname "$0")/../../.."
name=$1 output=$2
shift 2
exec nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Icsrc -DPAGEDKV_WITH_CUDA "$@" \
    "benchmarks/lab/experts/$name.cu" csrc/cuda/experts/*.cu csrc/cuda/device.cu csrc/cuda/scratch.cu csrc/cuda/sm90.cu \
    csrc/cuda/linear/few.cu -o "$output"
