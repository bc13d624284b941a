# Two commands: `make lab` opens the lessons, `make test` runs every test and every notebook.
# Both make .venv when it is missing and do nothing but their work the second time.

VENV     ?= .venv
BIN      := $(VENV)/bin
LAB_ARGS ?=
# As vllm_teach/openmp.py has it: threads that wait for others give their core away after some microseconds.
ifndef OMP_WAIT_POLICY
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT ?= 5000
endif

# The first Python on the PATH that pyproject.toml allows; `make lab PYTHON=...` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: lab test test-plain lint notebooks clean

lab: $(VENV)/.lab-installed
	$(BIN)/vllm-teach fetch
	$(BIN)/vllm-teach lab $(LAB_ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/vllm-teach fetch
	$(BIN)/python -m vllm_teach.teaching.notebooks build --check
	$(BIN)/python -m pytest tests
	$(BIN)/python -m vllm_teach.teaching.notebooks compare

# What an older processor, and a machine without a compiler, run instead of the fastest path. Triton's and CUDA's tests
# depend on neither. The second run needs a cache of its own, as a kernel that was built before needs no compiler.
PLAIN_TESTS = $(BIN)/python -m pytest -q tests/attention tests/kernels tests/backends \
	--deselect tests/kernels/test_triton_ahead_of_time.py --deselect tests/kernels/test_triton_interpreted.py \
	--deselect tests/backends/test_triton.py --deselect tests/kernels/test_triton_norms.py \
	--deselect tests/kernels/test_cuda_compiler.py --deselect tests/kernels/test_cuda_emulated.py
test-plain: $(VENV)/.dev-installed
	ATEN_CPU_CAPABILITY=avx2 $(PLAIN_TESTS)
	empty=$$(mktemp -d) && trap 'rm -r "$$empty"' EXIT && \
	env -u CC -u CXX PATH="$(abspath $(BIN))" VLLM_TEACH_HOME="$$empty" $(PLAIN_TESTS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Rewrites the committed outputs; look at every figure before you commit.
notebooks: $(VENV)/.dev-installed
	$(BIN)/vllm-teach fetch
	$(BIN)/python -m vllm_teach.teaching.notebooks build

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed and none is on the PATH."; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# A .venv of your own may have been made without pip, as uv does.
PIP = { $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; } && $(BIN)/python -m pip

$(VENV)/.lab-installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[lab]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[dev]'
	touch $@ $(VENV)/.lab-installed

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
