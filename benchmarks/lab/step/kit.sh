#!/bin/sh
# Builds what run.sh runs on an H200 into the folder $1, and copies run.sh there: 8 MB, 2 to 5 minutes on two cores.
to=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
cd "$(dirname "$0")" || exit 1
set -e
./build.sh "$to/bench"
FLAGS="-DSTEP_FEW -DSTEP_HOLD=3" ./build.sh "$to/bench_hold3"
FLAGS="-DSTEP_FEW -DSTEP_HOLD=2" ./build.sh "$to/bench_hold2"
FLAGS="-DSTEP_TRACE" ./build.sh "$to/bench_trace"
cp run.sh "$to/run.sh"
