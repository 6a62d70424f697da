# Two commands do most on a machine with Python and a C compiler: `make demo` and `make test`. The others take longer, or
# look closer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.[ch]')
# torch as pyproject.toml pins it. TORCH_INDEX may name PyTorch's index for CPUs: only torch is taken from there.
TORCH := $(shell sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml | head -n 1)
define prepare
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet 'pip>=25.1'
endef
# Versions that are known to work together, for every Python: `make constraints` renews them.
CONSTRAINTS := .ci/constraints.txt
install_torch = $(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) $(TORCH))
export OMP_NUM_THREADS := 1

# How long and how much the commands below do: make fuzz FUZZ_SECONDS=60, make soak SOAK_OPERATIONS=2000.
FUZZ_SECONDS ?= 600
FUZZ_RUNS ?= 10000000
API_CALLS ?= 100000
SOAK_OPERATIONS ?= 200000
# What Python's coverage is measured with; all of it: make coverage COVERAGE_TESTS=tests
COVERAGE_TESTS ?= tests/common tests/collectives tests/elastic tests/runner tests/hostile

FILES := --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-long lint asan tsan ubsan fuzz soak coverage bench faults wheels docs constraints clean

# A small network on two ranks over an emulated network of 100 Mbit/s, with three algorithms: a table and a picture.
demo: $(VENV)/tried
	$(BIN)/python examples/demo.py

# Everything but what takes long: .github/CONTRIBUTING.md says what that is, tests/conftest.py which files are begun first.
# pytest runs the C tests too, under a sanitizer. Three files at a time: ranks often wait, for each other or for a limit.
test: $(VENV)/built lint
	$(BIN)/python -m pytest -m 'not long' -n 3 $(FILES)

test-long: $(VENV)/built lint
	BHVD_SCHEDULES=10000 $(BIN)/python -m pytest -n 2 $(FILES)

lint: $(VENV)/built
	$(BIN)/ruff check .
	# NumPy for Python 3.10 has no defaults for the parameters of its types.
	$(BIN)/mypy $$($(BIN)/python -c 'import sys; print("--disable-error-code=type-arg" * (sys.version_info < (3, 11)))')
	$(BIN)/cppcheck --enable=warning,performance --std=c11 --platform=unix64 --inline-suppr --quiet --error-exitcode=1 \
		--suppressions-list=native/cppcheck.txt -j2 -D__x86_64__ -I native/include -I native native

# The C tests under one sanitizer: address (with undefined behaviour), thread, or undefined behaviour alone.
asan tsan ubsan: $(VENV)/built
	BHVD_NATIVE_CONFIGURATIONS=$@ $(BIN)/python -m pytest tests/native

# Each fuzz target for FUZZ_SECONDS or FUZZ_RUNS executions, whichever is first; and API_CALLS hostile calls of collectives.
fuzz: $(VENV)/built
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_RUNS=$(FUZZ_RUNS) $(BIN)/python -m pytest -s tests/fuzz
	API_CALLS=$(API_CALLS) $(BIN)/python -m pytest -s tests/hostile/test_api.py

# Mixed operations of four ranks, every result compared with NumPy's.
soak: $(VENV)/built
	$(BIN)/python tests/soak/soak.py $(SOAK_OPERATIONS)

# C: what the C tests run. Python: what COVERAGE_TESTS run, in all their processes.
coverage: $(VENV)/built
	find build/native-tests/coverage -name '*.gcda' -delete 2>/dev/null || true
	BHVD_NATIVE_CONFIGURATIONS=coverage $(BIN)/python -m pytest tests/native
	$(BIN)/gcovr --root . --filter native/ --gcov-ignore-errors=no_working_dir_found build/native-tests/coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(COVERAGE_TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Latency and bandwidth beside torch.distributed's gloo on this machine.
bench: $(VENV)/built
	$(BIN)/python -m bagua_hvd.bench

# What happens when processes, links, disks and memory fail: the table of docs/results/faults.md. As root, on a quiet machine.
faults: $(VENV)/built
	$(BIN)/python tests/faults/measure.py

# build/site: the documentation. Its tutorials are run, its reference is read from the modules, and warnings are errors.
docs: $(VENV)/built
	NO_MKDOCS_2_WARNING=1 TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m mkdocs build --strict --config-file .ci/mkdocs.yml

# dist/: the sdist and a wheel for each machine, checked. Needs no C compiler: zig comes from the package index.
wheels: $(VENV)/release/built
	.ci/wheels

# .ci/constraints.txt: the newest versions of all groups, for every Python at once.
constraints:
	$(call prepare,$(VENV)/constraints)
	$(VENV)/constraints/bin/python -m pip install --quiet uv
	$(VENV)/constraints/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-annotate --no-header \
		--group demo --group dev --group docs --group release --output-file $(CONSTRAINTS)

$(VENV)/release/built: pyproject.toml $(CONSTRAINTS)
	$(call prepare,$(VENV)/release)
	$(VENV)/release/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --group release
	touch $@

# Less than $(VENV)/built, and quicker to build.
$(VENV)/tried: pyproject.toml $(CONSTRAINTS) setup.py build.py $(NATIVE)
	$(call prepare,$(VENV))
	$(install_torch)
	@echo "Installing torch (about 200 MB) and building the core: a minute or two ..."
	BHVD_BUILD_LTO=0 $(BIN)/python -m pip install --progress-bar on --constraint $(CONSTRAINTS) --group demo --editable .
	touch $@

$(VENV)/built: pyproject.toml $(CONSTRAINTS) setup.py build.py $(NATIVE)
	$(call prepare,$(VENV))
	$(install_torch)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group dev --group docs --editable .
	# By itself: it would bring another TensorFlow along, the one for GPUs.
	$(BIN)/python -m pip install --quiet --no-deps "tf_keras==2.21.0; python_version < '3.14'"
	# A PyTorch for GPUs brings it along: it and TensorFlow each have an LLVM, and a process that loads both crashes.
	$(BIN)/python -m pip uninstall --quiet --yes triton
	touch $@

clean:
	rm -rf build dist bagua_hvd/_native.c bagua_hvd/_native.pyi bagua_hvd/*.so bagua_hvd.egg-info $(VENV)
