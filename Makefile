# make train [ARGS="loss=gspo seed=1"]   install, then run the main job
# make install EXTRA=cpu                 install the CPU packages even if there is a GPU; EXTRA=gpu: the GPU packages even if there is none
# make test-fast                         install, then run the tests that start neither vLLM nor SLURM (3 minutes)
# make test                              these, then one of each kind on real vLLM, real processes and, as root on Debian, on a real SLURM
#                                        that the tests install, start and stop
# make test-long                         what make test leaves out: every role killed, every kind of requeue, the comparison with TRL
SHELL := /bin/bash
ARGS ?=
# The first of these that is Python 3.11, 3.12 or 3.13. An existing .venv keeps its Python unless PYTHON names another.
PYTHON ?= $(shell for p in .venv/bin/python python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)

.PHONY: install train test test-fast test-long lint docs

install:
	@[ -n "$(PYTHON)" ] || { echo "rlx needs Python 3.11, 3.12 or 3.13; none was found. Name one: make train PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/install.py $(if $(EXTRA),--extra $(EXTRA))

train: install
	@.venv/bin/python train.py $(ARGS)

# Parts of a tier all run, also when one before them failed; the exit code says whether all passed.
PYTEST = .venv/bin/python -m pytest
FAST = $(PYTEST) -n 2 -m "not slow and not slurm and not gpu"
SLOW = $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not slurm and not gpu
# Only its own files are read: collecting all of them takes ten seconds.
SLURM = $(PYTEST) $(shell grep -l 'mark\.slurm' tests/test_*.py) -m "slurm and not gpu

test: install
	@failed=0; set -x; \
	$(FAST) || failed=1; \
	$(SLOW) and not long" || failed=1; \
	$(SLURM) and not long" || failed=1; \
	exit $$failed

test-long: install
	@failed=0; set -x; \
	$(SLOW) and long" || failed=1; \
	$(SLURM) and long" || failed=1; \
	exit $$failed

test-fast: install
	$(FAST)

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: install
	.venv/bin/python -m rlx.config.docs
	.venv/bin/python tools/metrics_doc.py
