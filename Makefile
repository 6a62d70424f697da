# Two commands do everything on a machine with Python and a C compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.[ch]')
export OMP_NUM_THREADS := 1

.PHONY: demo test lint bench faults clean

# The example on two ranks, exact and with 8-bit communication.
demo: $(VENV)/built
	$(BIN)/baguarun -np 2 $(BIN)/python examples/torch_digits.py
	$(BIN)/baguarun -np 2 $(BIN)/python examples/torch_digits.py --algorithm bytegrad

# Everything: pytest runs the C tests too, under the sanitizers.
test: $(VENV)/built lint
	$(BIN)/python -m pytest

lint: $(VENV)/built
	$(BIN)/ruff check .

# Latency and bandwidth beside torch.distributed's gloo on this machine.
bench: $(VENV)/built
	$(BIN)/python -m bagua_hvd.bench

# What happens when processes, links, disks and memory fail: the table of docs/reliability.md. As root, on a quiet machine.
faults: $(VENV)/built
	$(BIN)/python tests/faults/measure.py

$(VENV)/built: pyproject.toml setup.py build.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build bagua_hvd/_native.c bagua_hvd/*.so bagua_hvd.egg-info $(VENV)
