# Two commands for a fresh machine: `make train` and `make test`. Each installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
CXX_SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(wildcard core_kernels/*.h core_kernels/cpu/* cpp_bindings/*.cc)

.PHONY: train test lint format benchmark clean

# Both frontends, one config, four runs: each framework in MXFP8 and in bf16. `plot_curves` fails
# when the curves disagree.
train: .venv/.train
	$(BIN)/python -m examples.train_all --out runs/small

# Triton's interpreter is chosen before triton is imported and a process in that mode cannot compile:
# the kernels' numerics and everything else are two runs. A file stays with one worker: process groups
# and compiled programs are made once per file.
test: .venv/.dev
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 --dist loadfile tests/conformance tests/kernels
	$(BIN)/pytest -n 2 --dist loadfile

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/basedpyright

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

benchmark: .venv/.dev
	$(BIN)/python -m benchmarks

# Torch first, alone: anything else that needs it would otherwise choose its build.
.venv/.base: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja jaxlib
	touch $@

.venv/.train: .venv/.base $(CXX_SOURCES)
	$(PIP) --no-build-isolation --editable '.[train]'
	touch $@

# The CUDA plugin without its run time: enough for jax-triton to import and to lower for a GPU.
.venv/.dev: .venv/.base $(CXX_SOURCES)
	$(PIP) --no-deps jax-cuda13-plugin
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@ .venv/.train

clean:
	rm -rf .venv build runs
