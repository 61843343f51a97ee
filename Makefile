# make train [ARGS="loss=gspo seed=1"]   install, then run the main job
# make install EXTRA=cpu                 install the CPU packages even if there is a GPU; EXTRA=gpu: the GPU packages even if there is none
# make test                              install, then run every test; as root on Debian also the SLURM tests, on a SLURM that it
#                                        installs, starts and stops
# make test-fast                         install, then run the tests that do not need vLLM
SHELL := /bin/bash
ARGS ?=
# The first of these that is Python 3.11, 3.12 or 3.13. An existing .venv keeps its Python unless PYTHON names another.
PYTHON ?= $(shell for p in .venv/bin/python python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)

.PHONY: install train test test-fast lint docs

install:
	@[ -n "$(PYTHON)" ] || { echo "rlx needs Python 3.11, 3.12 or 3.13; none was found. Name one: make train PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/install.py $(if $(EXTRA),--extra $(EXTRA))

train: install
	@.venv/bin/python train.py $(ARGS)

test: install
	.venv/bin/python -m pytest -n 2 -m "not slow and not slurm and not gpu"
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "slow and not gpu and not slurm"
	.venv/bin/python -m pytest -m "slurm and not gpu"

test-fast: install
	.venv/bin/python -m pytest -n 2 -m "not slow and not slurm and not gpu"

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: install
	.venv/bin/python -m rlx.config.docs
	.venv/bin/python tools/metrics_doc.py
