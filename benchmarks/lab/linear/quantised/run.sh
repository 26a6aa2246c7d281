#!/bin/bash
# About 100 s on one H200: builds the comparison where there is no program yet, and lets each design run in a process of its own,
# so that one that hangs takes nothing with it.     run.sh [FOLDER]
cd "$(dirname "$0")"
folder=${1:-.}
[ -x "$folder/bench" ] || ./build.sh "$(realpath "$folder")" || exit 1
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm --format=csv,noheader
b() { timeout -s KILL "$1" "$folder/bench" "${@:2}"; r=$?; [ $r -ne 0 ] && echo "EXIT $r: ${*:2}"; }
b 15 library 4
b 20 int4 C 15
b 15 int4 E 10
b 15 int4 B 10
b 15 int4 A 10
b 15 int4 FH 10
b 10 trace int4
b 15 library 8
b 20 fp8 C 15
b 15 fp8 BAR 12
b 10 trace fp8
b 15 zeros C 10
b 15 library 16
b 20 mix int4 12
b 15 mix fp8 8
