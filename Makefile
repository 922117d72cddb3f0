PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8888
WORKERS ?= 2
# test-gpu: another interpreter than .venv's, as in PYTHON_GPU=python3; how many processes share the GPU, by its memory.
PYTHON_GPU ?=
WORKERS_GPU ?= auto
GPU_TESTS = $(sort $(shell grep -lrE 'mark\.gpu|MARKS' tests --include='test_*.py'))
NOTEBOOKS = $(shell ls -r notebooks/*.ipynb)
BIN = .venv/bin
# JupyterLab refuses to run as root, as in a container, unless told to.
ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

# Each run has a folder of its own for temporary files, and none of them stays.
OWN_TMPDIR = TMPDIR=$$(mktemp -d) && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT INT TERM;

.PHONY: lab book test compiled tests executed test-gpu bench grade notebooks clean

# Opens the reader's own copies, which it makes where there are none, and never overwrites.
lab: .venv/installed
	$(BIN)/python -m exercises stubs
	$(BIN)/python -m sage_course start
	$(BIN)/jupyter lab --ip=$(HOST) --port=$(PORT) $(ROOT) --LabApp.default_url=/lab/tree/my/00_start_here.ipynb

# HTML in build/book, from the notebooks as committed: nothing is executed. Stops at any warning.
book: .venv/book
	rm -rf build/book
	$(BIN)/python -m sphinx -b html -c notebooks/book -d build/book-doctrees -E -W --keep-going --quiet . build/book
	@echo "Open build/book/index.html"

# Kernels are compiled beside the rest, while that waits: for a browser, say, or for its last test.
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs=2 compiled executed

# Says nothing but its last line, or everything if a kernel is at fault.
compiled:
	@$(OWN_TMPDIR) log=$$(nice $(BIN)/python -m sage_lab compile --workers $(WORKERS) 2>&1) \
		&& echo "$$log" | tail -n 1 || { echo "$$log"; exit 1; }

# In the order of the folders: tests/browser, where a few tests take long, begins, and small modules end. One worker more
# than there are cores, since a fifth of the time tests wait: for a browser, or for a limit of time.
tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest -p no:nbval -n $$(($(WORKERS) + 1)) --dist loadscope --no-loadscope-reorder

# Backwards, since the notebooks that take longest are late ones: at the end there is little to wait for.
executed: tests
	@$(OWN_TMPDIR) OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --nbval --nbval-current-env --nbval-cell-timeout=120 -p no:cacheprovider $(NOTEBOOKS)

# Where readers' own functions are saved: nowhere, so that no output depends on them.
executed notebooks: export SAGE_REF_YOURS = $(CURDIR)/build/nobody
# What runs on a GPU, on one of them. Needs PyTorch, Triton, pytest, pytest-xdist and hypothesis, no notebooks.
# Neighbours share kernels, which one worker then compiles for all: each worker gets a stretch of tests.
test-gpu: $(if $(PYTHON_GPU),,.venv/installed)
	PYTHONPATH=.:kernels:lab:notebooks OMP_NUM_THREADS=1 $(or $(PYTHON_GPU),$(BIN)/python) -m pytest -p no:benchmark -p no:nbval \
		-m gpu -n $(WORKERS_GPU) --dist worksteal $(GPU_TESTS)

bench: .venv/installed
	$(BIN)/python -m sage_lab bench

grade: .venv/installed
	$(BIN)/python -m exercises stubs
	$(BIN)/python -m exercises grade --all

# Run every notebook from top to bottom and keep its outputs. Parts of one stream are joined afterwards, by a second run:
# nbconvert joins before it executes.
notebooks: .venv/installed
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.timeout=300 \
		--ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
		--ClearMetadataPreprocessor.clear_cell_metadata=False \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask='[("kernelspec",), ("language_info", "name")]' $(NOTEBOOKS)
	$(BIN)/jupyter nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS)

.venv/installed: pyproject.toml lab/pyproject.toml notebooks/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --editable lab --editable notebooks
	touch $@

.venv/book: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable notebooks[book,browser]
	touch $@

clean:
	rm -rf .venv build *.egg-info */*.egg-info
