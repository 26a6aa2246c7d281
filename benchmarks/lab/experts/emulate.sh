#!/bin/sh
# The kernels of many.h and layer.h on a CPU: emulate.sh many|layer|lists OUTPUT, then run OUTPUT
set -e
cd "$(dirname "$0")"
mkdir -p "$2.sources"
cp *.h emulate_*.cpp "$2.sources"
for header in many_kernel.h layer.h; do # shared memory is a CTA's own
    sed -e 's/extern __shared__ char dynamic_smem\[\];/char *const dynamic_smem = emulated_dynamic();/' \
        -e 's/__shared__ \(.*\) shared;/auto \&shared = emulated_static<\1>();/' "$header" >"$2.sources/$header"
done
sed 's/STACK_BYTES = 1 << 16/STACK_BYTES = 1 << 15/' ../../../tests/emulated_gpu.h >"$2.sources/emulated_gpu.h" # there are many
exec g++ -std=c++17 -O2 -w -U_FORTIFY_SOURCE -I../../../csrc -I"${CUDA_HOME:?}/include" \
    -DPAGEDKV_WITH_CUDA "$2.sources/emulate_$1.cpp" -x c++ ../../../csrc/pk.c -o "$2"
