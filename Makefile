# A menu: `make help`. Nothing here is needed to install or to use pagedkv.
SHELL := /bin/bash
PYTHON ?= python3
FUZZ_SECONDS ?= 60
FUZZ_CALLS ?= 20000
CLANG ?= $(firstword $(shell command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14 2>/dev/null))
CLANG_FORMAT ?= $(firstword $(shell command -v clang-format-14 clang-format 2>/dev/null))
C_SOURCES := $(filter-out csrc/py/dlpack.h,$(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/cpu/*.inc csrc/cuda/*.cu csrc/cuda/*/*.cu \
    csrc/cuda/*/*.h csrc/cuda/*/*/*.h csrc/cuda/*/*/*.cu tests/*.c tests/*.cpp tests/*.h benchmarks/lab/*/*.cu))
# The tests of the operations: each topic of csrc/ops has one (tests/test_layout.py).
TOPIC_TESTS := $(wildcard $(patsubst csrc/ops/%.c,tests/test_%.py,$(wildcard csrc/ops/*.c)))

help: ## this text
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

build: ## the extension, in place (PAGEDKV_CUDA=0 leaves CUDA out)
	$(PYTHON) setup.py build_ext --inplace

test: build ## the tests, of the extension in place (`pytest` by itself tests the installed package)
	$(PYTHON) -m pytest

# A copy of the package in build/asan, so that the checkout's own extension stays as it is. The tests chosen are those of the
# C code itself; leaks are tests/test_leaks.py's, because the interpreter never frees everything. The long lists of cases run
# by the best instructions and by AVX2's, whose code is another; of the code for any CPU test_fuzz_calls.py runs all operations.
ASAN := $(CURDIR)/build/asan
ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
ASAN_TESTS := $(TOPIC_TESTS) $(wildcard tests/test_block_manager*.py) $(patsubst %,tests/test_%.py,tensor interop bad_calls \
              overlap overlap_views hostile_views all_parameters fuzz_calls threads elastic elastic_tensors communicator suffix_index)
ASAN_PYTHON := PYTHONPATH=$(ASAN)/lib PYTHONMALLOC=malloc OMP_NUM_THREADS=2 \
               ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
               LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" $(PYTHON)
build-asan:
	PAGEDKV_CUDA=0 CFLAGS="-O1 -g $(ASAN_FLAGS) $(CFLAGS) -Wno-error" LDFLAGS="$(ASAN_FLAGS)" \
	    $(PYTHON) setup.py -q build --build-base=$(ASAN) --build-lib=$(ASAN)/lib

asan: build-asan ## the C core and the extension's tests under ASan and UBSan; PROCESSES=2 at once needs pytest-xdist
	PYTHONSAFEPATH=1 $(ASAN_PYTHON) -m pytest -x -m "not gpu" -k "not qwen3s and not (every_instruction_set and (generic or avx512))" --durations=5 $(if $(PROCESSES),-n $(PROCESSES)) $(ASAN_TESTS)

fuzz-calls: build-asan ## FUZZ_CALLS random calls of everything (default 20000) under ASan and UBSan, against the oracles
	$(ASAN_PYTHON) tests/fuzz_calls.py --calls $(FUZZ_CALLS)

fuzz: ## the BlockManager core under libFuzzer for FUZZ_SECONDS (default 60); needs clang
	@test -n "$(CLANG)" || { echo "make fuzz: no clang found (CLANG=...)"; exit 1; }
	mkdir -p .fuzz/corpus
	$(CLANG) -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icsrc \
	    tests/fuzz_block_manager.c $(wildcard csrc/block_manager/*.c) csrc/pk.c -o .fuzz/block_manager
	.fuzz/block_manager -max_total_time=$(FUZZ_SECONDS) -max_len=512 -print_final_stats=1 -artifact_prefix=.fuzz/ .fuzz/corpus

bench: build ## the short CPU benchmarks; all but replay_trace, which wants a trace, write to benchmarks/results
	for name in attention block_manager engine_step linear overhead replay_trace; do \
	    PYTHONPATH=. $(PYTHON) benchmarks/$$name.py || exit 1; done

bench-growth: build ## on a GPU: decode steps and decode attention as sequences, keys and queries grow
	for name in "batch_sizes.py --models 0.6B 8B --contexts 640 1128" \
	    "batch_sizes.py --kv-cache-dtype fp8 --contexts 640 1128" growth.py queries.py; do \
	    PYTHONPATH=. $(PYTHON) benchmarks/$$name || exit 1; done

docs: ## the API reference, from the docstrings, in build/docs; needs pdoc (pip install '.[docs]')
	$(PYTHON) tools/api_docs.py build/docs

report: ## the tables of README.md and docs/ from the recorded figures
	$(PYTHON) benchmarks/report.py --write

plots: ## docs/plots from the recorded figures; needs matplotlib (pip install '.[plots]')
	$(PYTHON) benchmarks/plots.py

OLD_URL = $(shell sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)
urls: ## URL=https://...: the project's address, in pyproject.toml and README.md
	@test -n "$(URL)" || { echo "make urls URL=https://... (now $(OLD_URL))"; exit 1; }
	sed -i 's|$(OLD_URL)|$(URL)|g' pyproject.toml README.md

format: ## C and CUDA sources by clang-format 14
	$(CLANG_FORMAT) -i $(C_SOURCES)

lint: ## what .ci/run says of the sources: clang-format 14, ruff, mypy
	$(CLANG_FORMAT) --dry-run --Werror $(C_SOURCES)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# Small cases, each line less than a minute. initcheck sees nothing of what cuBLAS's kernels write by bulk copies, hence
# not linear. synccheck has room for few barriers unless it is told how many: sampling has two per warp. The tools run one
# kernel at a time, hence only the tests of streams that wait for nothing to be pending. Attention under racecheck runs
# with Hopper's kernels and with those of older devices.
SANITIZE = compute-sanitizer --error-exitcode 1 --tool $(1) $(PYTHON) -m pytest -x -p no:cacheprovider -m gpu
BARRIERS := --num-cuda-barriers 65536
ATTENTION := $(patsubst %,tests/test_%.py,attention attention_cuda attention_mixed_cuda qkv_attention)
OPERATIONS := $(filter-out $(ATTENTION),$(TOPIC_TESTS)) tests/test_zero_rows.py
STREAMS := $(patsubst %,tests/test_%.py,graph device_memory streams streams_graphs)
SMALL := not large and (bfloat16 or not sample and not linear)
LIFETIMES := (repeats or give or holds or replay or gone or programs) and not given_stream
CASES := (case or oracle) and (cuda:0 or fp8 or bfloat16)
sanitize-gpu: build ## small GPU tests under compute-sanitizer: memory, uninitialised memory, races, barriers
	$(call SANITIZE,memcheck) $(OPERATIONS) -k "$(SMALL)"
	$(call SANITIZE,memcheck) $(ATTENTION) -k "$(CASES)"
	$(call SANITIZE,memcheck) tests/test_cuda_limits.py -k "bad or graph"
	$(call SANITIZE,memcheck) tests/test_elastic.py tests/test_elastic_tensors.py -k "not gigabytes and not comes_back"
	$(call SANITIZE,memcheck) $(STREAMS) -k "$(LIFETIMES)"
	$(call SANITIZE,initcheck) $(OPERATIONS) -k "$(SMALL) and not linear"
	$(call SANITIZE,initcheck) $(ATTENTION) -k "$(CASES)"
	$(call SANITIZE,racecheck) $(OPERATIONS) -k "$(SMALL)"
	$(call SANITIZE,racecheck) $(ATTENTION) -k "$(CASES) and (chunks or ragged or oracle and decode)"
	$(call SANITIZE,synccheck $(BARRIERS)) $(OPERATIONS) -k "$(SMALL)"
	$(call SANITIZE,synccheck $(BARRIERS)) $(ATTENTION) -k "$(CASES)"
	PAGEDKV_CUDA_MAX_CC=80 $(call SANITIZE,racecheck) $(ATTENTION) -k "$(CASES) and (chunks or ragged or oracle and decode)"

clean: ## what was built
	rm -rf build dist .fuzz .mypy_cache .ruff_cache *.egg-info pagedkv/_C*.so

.PHONY: help build test build-asan asan fuzz-calls fuzz bench bench-growth docs report plots urls format lint sanitize-gpu clean
