# make train [ARGS="loss=gspo seed=1"]   install, then run the main job
# make install EXTRA=cpu                 install the CPU packages even if there is a GPU; EXTRA=gpu: the GPU packages even if there is none
# make test-fast                         install, then run the quick tests, of which none starts vLLM or SLURM (under 2 minutes on two cores)
# make test                              these, then one of each kind on real vLLM, real processes and, as root on Debian, on a real SLURM
#                                        that the tests install, start and stop
# make test-long                         what make test leaves out: every role killed, every kind of requeue, a walk-through, TRL
# make test-nightly                      more cases of the same kinds that take minutes each: a walk-through on a real model, learning curves, 20,000 rollouts
# make test-engines                      the engine's tests with each minor version of vLLM that rlx allows; of those that are not installed, on the source
SHELL := /bin/bash
ARGS ?=
# The first of these that is Python 3.11, 3.12 or 3.13. An existing .venv keeps its Python unless PYTHON names another.
PYTHON ?= $(shell for p in .venv/bin/python python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)

# Where this is set, every process that a test starts compiles rlx anew, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test test-fast test-long test-nightly test-engines lint docs

install:
	@[ -n "$(PYTHON)" ] || { echo "rlx needs Python 3.11, 3.12 or 3.13; none was found. Name one: make train PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/install.py $(if $(EXTRA),--extra $(EXTRA))

train: install
	@.venv/bin/python train.py $(ARGS)

# Parts of a tier all run, also when one before them failed; the exit code says whether all passed.
PYTEST = .venv/bin/python -m pytest
# A third of the fast tests' time is waiting, so three processes keep two cores busy; with more cores as many, up to eight. Each reads all
# files, so not those without a fast test. One that is done takes tests of the others: tests that wait stand together, and the process that
# had them was half a minute longer at work.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN || echo 2); echo $$((cores < 3 ? 3 : cores > 8 ? 8 : cores)))
FAST = $(PYTEST) $(patsubst %,--ignore=%,$(shell grep -lE '^pytestmark = .*mark\.(slow|slurm)' tests/test_*.py)) -n $(PROCESSES) --dist worksteal -m "not slow and not slurm and not gpu"
# A file's tests run in one process, so the longest files begin: at the end both processes then have something to do.
LONGEST = $(patsubst %,tests/test_%.py,examples engine_damage engine_flight run_weights run_resume run_main_job train_ranks run_env_faults sft_run eval_command run_teachers run_failures acceptance)
# Of the other tiers only their own files are read: collecting all of them takes ten seconds.
SLOW = $(PYTEST) --durations=15 $(LONGEST) $(filter-out $(LONGEST),$(shell grep -l 'mark\.slow' tests/test_*.py)) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not slurm and not gpu
SLURM = $(PYTEST) $(shell grep -l 'mark\.slurm' tests/test_*.py) -m "slurm and not gpu
# Tests on SLURM mostly wait for SLURM, so they run beside the slow ones, and are printed after them. Both use the models that one has made.
# $(call both,LAST WORDS OF THE SELECTION)
define both
	export TESTS_CACHE=$${TESTS_CACHE:-$$made}; \
	$(SLURM)$(1)" >$$made/slurm.log 2>&1 & \
	$(SLOW)$(1)" || failed=1; \
	wait $$! || failed=1; \
	cat $$made/slurm.log; \
	{ set +x; } 2>/dev/null; if [ -s $$TESTS_FAILED ]; then echo "What failed in this tier:"; cat $$TESTS_FAILED; fi; \
	exit $$failed
endef

test: install
	@failed=0; made=$$(mktemp -d); export TESTS_FAILED=$$made/failed; trap 'rm -rf "$$made"' EXIT; set -x; \
	$(FAST) || failed=1; \
	$(call both, and not long and not nightly)

test-long: install
	@failed=0; made=$$(mktemp -d); export TESTS_FAILED=$$made/failed; trap 'rm -rf "$$made"' EXIT; set -x; \
	$(call both, and long and not nightly)

test-nightly: install
	@failed=0; made=$$(mktemp -d); export TESTS_FAILED=$$made/failed; trap 'rm -rf "$$made"' EXIT; set -x; \
	$(call both, and nightly)

test-fast: install
	$(FAST)

test-engines: install
	.venv/bin/python tools/engines.py $(ARGS)

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/codespell README.md CONTRIBUTING.md CHANGELOG.md docs examples benchmarks environments conf rlx tools charts slurm
	.venv/bin/mkdocs build --strict --quiet --site-dir .site

docs: install
	.venv/bin/python tools/config_doc.py
	.venv/bin/python tools/commands_doc.py
	.venv/bin/python tools/metrics_doc.py
