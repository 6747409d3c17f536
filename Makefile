# make demo   environment, build, main job          make test   environment, build, tests
# make lint   formatting and static checks          make clean  removes what these made
# make gpu    gpu-test and gpu-bench, on an H100 or H200
# make mutants  the tests, asked to notice one fault after the other (tests/mutants); an hour
# make gpu-mutants  the same for faults of kernels
#
# The active environment is used if its PyTorch is new enough; otherwise .venv is made and PyTorch
# installed there. TORCH_INDEX=URL takes PyTorch from another package index (a CPU-only one, say).
# FLASH_CSA_CPU_ONLY=1 builds without the kernels although a CUDA toolkit is there.
# The GPU targets install nothing: they take the active environment as it is, and build in place or
# use the library that FLASH_CSA_PREBUILT names. FLASH_CSA_PEERS: see bench/peers.py.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test mutants lint build clean gpu gpu-test gpu-bench gpu-library gpu-mutants

PYTHON ?= python3
TORCH := torch>=2.11,<2.14
BUILD_TOOLS := 'setuptools>=77' wheel 'ninja>=1.11' 'numpy>=1.26'
CUTLASS := 'nvidia-cutlass>=4.2,<5'
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

NEW_ENOUGH := import re, torch; v = re.findall(r'\d+', torch.__version__); \
    raise SystemExit((int(v[0]), int(v[1])) < (2, 11))
ACTIVE := $(shell $(PYTHON) -c "$(NEW_ENOUGH)" 2>/dev/null && echo yes)
ifeq ($(ACTIVE),yes)
PY := $(PYTHON)
# A stamp of its own for each environment: what one has, another may lack.
ENV := build/.environment-$(shell $(PYTHON) -c "import sys, zlib; print(zlib.crc32(sys.prefix.encode()))")
else
PY := .venv/bin/python
ENV := .venv/.ready
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif
PIP := $(PY) -m pip --disable-pip-version-check

demo: build
	$(PY) -m flash_csa demo $(ARGS)

test: build
	$(PY) -m pytest $(ARGS)

mutants: build
	$(PY) tests/mutants/run.py $(ARGS)

# A stamp is written last, so an interrupted run is taken up again.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("flash_csa: needs Python >= 3.10, found " + sys.version.split()[0])'
	$(PYTHON) -m venv --clear .venv
	$(PIP) install -q $(BUILD_TOOLS)
	$(PIP) install -q --no-deps $(CUTLASS)
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	touch $@

build/.environment-%: pyproject.toml
	@mkdir -p build
	$(PIP) install -q $(BUILD_TOOLS)
	$(PIP) install -q --no-deps $(CUTLASS)
	touch $@

build: build/.built-$(if $(FLASH_CSA_CPU_ONLY),cpu,all)

build/.built-%: $(ENV) $(SOURCES)
	@mkdir -p build && rm -f build/.built-*
	$(PIP) install -q --no-build-isolation -e '.[cli,plots,test]'
	@$(PY) -c "from flash_csa import _C; print('flash_csa: built', 'for CPU and sm_90a' if _C.HAS_CUDA else 'the CPU half only (no CUDA toolkit in use)')"
	touch $@

gpu: gpu-test gpu-bench

# With pytest-xdist, processes share the GPU; each has few threads for the CPU side of a comparison.
gpu-test gpu-bench: export PYTHONPATH := python
WORKERS := $(shell $(PYTHON) -c "import xdist" 2>/dev/null && printf -- '-n 8')
gpu-test: gpu-library
	$(PYTHON) tests/sanitize.py
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest --device=cuda $(WORKERS) $(ARGS)

gpu-bench: gpu-library
	$(PYTHON) -m bench.run --budget 420 --dram $(ARGS)

gpu-mutants:
	$(PYTHON) tests/mutants/run.py --device cuda --jobs 8 --timeout 120 $(ARGS)

gpu-library:
	@$(PYTHON) -c "import torch; torch.cuda.is_available() or exit('flash_csa: there is no GPU here')"
ifdef FLASH_CSA_PREBUILT
	cp $(FLASH_CSA_PREBUILT) python/flash_csa/_C.abi3.so
else
	MAX_JOBS=$$(nproc) $(PYTHON) setup.py -q build_ext --inplace
endif
	@PYTHONPATH=python $(PYTHON) -c "from flash_csa import _C; _C.HAS_CUDA or exit('flash_csa: this library has no kernels')"

lint: $(ENV)
	$(PIP) install -q 'ruff>=0.5' 'clang-format>=18,<24'
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find csrc tests bench cmake -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
	    | xargs $(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run --Werror

clean:
	rm -rf build dist .venv python/*.egg-info python/flash_csa/*.so
