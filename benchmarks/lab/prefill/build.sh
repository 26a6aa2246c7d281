#!/bin/sh
# Builds the lab: build.sh OUTPUT [nvcc flags]
set -e
cd "$(dirname "$0")/../../.."
output=$1
shift
cc -O2 -fPIC -Icsrc -c csrc/pk.c -o "$output.check.o"
exec nvcc -std=c++17 -O3 --expt-relaxed-constexpr -lineinfo -gencode=arch=compute_90a,code=sm_90a -Icsrc \
    -DPAGEDKV_WITH_CUDA "$@" benchmarks/lab/prefill/lab.cu $(find csrc/cuda -name "*.cu") "$output.check.o" -o "$output"
