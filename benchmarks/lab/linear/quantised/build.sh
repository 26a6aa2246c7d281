#!/bin/sh
# Builds the comparison: build.sh FOLDER [nvcc flags]. The library's own kernels come from csrc/.
set -e
cd "$(dirname "$0")/../../../.."
folder=$1
shift
mkdir -p "$folder"
here=benchmarks/lab/linear/quantised
for each in $here/variants_int4.cu $here/variants_int4_more.cu $here/variants_fp8.cu $here/bench.cu $here/library.cu csrc/cuda/linear/few.cu \
    csrc/cuda/linear/few_quantised.cu csrc/cuda/device.cu csrc/cuda/scratch.cu; do
    echo "$each"
done | xargs -P "$(nproc)" -I{} sh -c 'nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Icsrc -I'$here' \
    -DPAGEDKV_WITH_CUDA '"$*"' -c {} -o '"$folder"'/$(basename {} .cu).o'
nvcc "$folder"/*.o -o "$folder/bench"
