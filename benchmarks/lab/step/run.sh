#!/bin/bash
# One H200, about 100 s, at most 180 by the limits. Every step is a process of its own with a time limit, the most important
# ones first; every wait in the kernel ends after 1 s. kit.sh builds what is run.
cd "$(dirname "$0")" || exit 1
end=$((SECONDS + 180))
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm,power.draw,power.limit --format=csv,noheader
b() {
    local from=$SECONDS most=$1
    shift
    [ $((end - from)) -lt "$most" ] && most=$((end - from))
    [ "$most" -le 0 ] && { echo "-- no time left: $*"; return; }
    timeout -s KILL "$most" "$@" 2>&1
    echo "-- $((SECONDS - from)) s, exit $?: $*"
}
{
    # right, and how fast as it is planned
    b 15 ./bench check 0.6B mode=E rows=1 lens=400 runs=200
    b 10 ./bench time 0.6B mode=E rows=1 lens=400 flying=3,2,5 stages=5,4,3
    b 12 ./bench_trace time 0.6B mode=E rows=1 lens=400
    b 15 ./bench check 0.6B mode=F rows=1 lens=400 runs=200
    b 10 ./bench time 0.6B mode=F rows=1 lens=400 flying=3,2,4,12 prefetch=8,0,16
    b 10 ./bench_trace time 0.6B mode=F rows=1 lens=400
    # what a part is worth: keys not asked for ahead (8); fewer chunks held
    b 8 ./bench time 0.6B mode=E rows=1 lens=400 flags=0,8
    b 8 ./bench_hold3 time 0.6B mode=E rows=1 lens=400
    b 8 ./bench_hold2 time 0.6B mode=E rows=1 lens=400 flying=3,5
    # 7/8 of the model on 7 clusters: two CTAs may share an SM (the probe: 357), or not, with 12 stages (the probe: 298)
    b 8 ./bench time 0.6B-7 mode=E rows=1 lens=400 flying=3,5
    b 8 ./bench time 0.6B-7 mode=E rows=1 lens=400 alone=1 flying=3
    b 8 ./bench_trace time 0.6B-7 mode=E rows=1 lens=400 alone=1
    # 8B
    b 25 ./bench time 8B mode=F rows=1 lens=400 steps=10 flying=3,6 prefetch=8,0
    b 20 ./bench time 8B mode=E rows=1 lens=400 steps=10 flying=3,4
    b 15 ./bench_trace time 8B mode=F rows=1 lens=400 steps=10
    # right everywhere, and a fault
    b 20 ./bench check 0.6B mode=E rows=1,2,4 lens=1,16,17,400,4000 runs=24
    b 20 ./bench check 0.6B mode=F rows=1,2,4 lens=1,16,17,400,4000 runs=24
    b 10 ./bench check 0.6B mode=E rows=1 lens=400,1000 fp8=1
    b 10 ./bench check 0.6B mode=F rows=1 lens=400,1000 fp8=1
    b 8 ./bench missing 0.6B mode=E
    b 8 ./bench missing 0.6B mode=F
    # other shapes
    b 10 ./bench time 0.6B mode=E rows=1,2,4 lens=128,400,1000,4000
    b 10 ./bench time 0.6B mode=F rows=1,2,4 lens=400,4000
    b 8 ./bench time 0.6B mode=E rows=1 lens=400 page=1
    b 8 ./bench time 0.6B mode=E rows=1 lens=400 cooperative=1
    # last, because what it computes is nothing: without any wait for other CTAs
    b 8 ./bench time 0.6B mode=F rows=1 lens=400 flags=4
    b 8 ./bench time 0.6B mode=E rows=1 lens=400 flags=4
} | tee "${OUT:-.}/log.txt"
