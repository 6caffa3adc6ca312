# Every target does its own set-up in .venv; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
UV := $(VENV)/bin/uv
WORKDIR ?= runs/quickstart
# Of the tests: one more than there are cores, since many of them wait for processes.
WORKERS ?= $(shell expr 1 + $$(nproc 2>/dev/null || echo 1))
# Where it is there: a learner's tests, which compile, take 0.85 of the CPU time that they take with
# glibc's malloc.
JEMALLOC := $(firstword $(wildcard /usr/lib/*/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2))
# Hundreds of processes import the package: without bytecode each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

# uv has variables of its own; what pip's say holds for it too. It reads no file of pip's: where that
# matters, pip installs.
settings = $(and $(PIP_$(1)),$(eval export UV_$(2) ?= $(PIP_$(1))))
$(call settings,INDEX_URL,DEFAULT_INDEX)
$(call settings,EXTRA_INDEX_URL,INDEX)
$(call settings,FIND_LINKS,FIND_LINKS)
$(call settings,DEFAULT_TIMEOUT,HTTP_TIMEOUT)
# As pip, not only the first index that has a package is asked for its versions.
export UV_INDEX_STRATEGY ?= unsafe-best-match
install = $(UV) pip install --quiet --python $(RUN) $(1) \
	|| { echo "uv could not install this; trying pip."; \
	$(RUN) -m pip install --quiet --disable-pip-version-check $(1); }

# The parts that tests need, each a target; they fetch and unpack side by side.
FIRST_PARTS := part-python part-smollm2
OTHER_PARTS := part-tools part-models part-appworld part-libtpu part-agents part-tau2 part-tinker

.PHONY: help setup lock part-torch $(FIRST_PARTS) $(OTHER_PARTS) quickstart bfcl harnesses test test-all test-durations test-harnesses check lint lint-style lint-types lint-scripts lint-house docs clean

help:
	@echo "make quickstart   train the bundled example policy and show its learning curve (about 2 minutes)"
	@echo "make bfcl         the same loop on the real BFCL v4 tasks (about 20 minutes)"
	@echo "make test         the tests of the product"
	@echo "make test-all     every test: also instruments, other projects' packages, browsers, every seed"
	@echo "make harnesses    the coding agents of config.agent.harness (2.1 GB; needs npm)"
	@echo "make check        style, the rules of imports, and the tests of changed files (FILES='a.py b.py')"
	@echo "make lint         ruff format, ruff check, pyright, shellcheck, and the site's links"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make clean        remove $(VENV) and site/; what runs have written stays"

$(UV):
	@echo "Making $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "uv>=0.8"

$(VENV)/runtime: $(UV) requirements.lock requirements.txt pyproject.toml
	@echo "Setting up $(VENV) with what requirements.lock names ..."
	@$(call install,--require-hashes --requirement requirements.lock)
	@$(call install,--no-deps --editable .)
	@touch $@

# What the first tier of the tests needs beside it.
$(VENV)/first: requirements.lock requirements.txt pyproject.toml third_party/install.sh \
		third_party/bfcl/setup.sh third_party/models/setup.sh
	@echo "Setting up $(VENV) and what make test needs ..."
	@$(MAKE) --no-print-directory --jobs=3 $(FIRST_PARTS)
	@touch $@

# What the second tier and `make lint` need beside that.
$(VENV)/development: requirements.lock requirements.txt pyproject.toml third_party/install.sh \
		third_party/bfcl/setup.sh third_party/models/setup.sh third_party/appworld/setup.sh \
		third_party/libtpu/setup.sh third_party/agents/setup.sh third_party/agents/requirements.txt \
		third_party/agents/verifiers/requirements.txt third_party/tau2/setup.sh \
		third_party/tinker/setup.sh third_party/tinker/requirements.txt
	@echo "Setting up $(VENV) and what every test needs ..."
	@$(MAKE) --no-print-directory --jobs=7 $(FIRST_PARTS) $(OTHER_PARTS)
	@touch $(VENV)/first $(VENV)/bfcl $(VENV)/site $@

part-torch: $(UV)
	. third_party/install.sh && install_torch $(RUN)

part-python: $(VENV)/runtime part-torch
	@$(call install,--editable ".[test]")
	sh third_party/bfcl/setup.sh $(RUN)

part-smollm2: $(UV)
	sh third_party/models/setup.sh $(RUN) smollm2

part-tools: part-python
	@$(call install,--editable ".[test-all]" --group site)

part-libtpu: $(VENV)/runtime
part-models: part-smollm2
part-appworld part-agents part-tau2 part-tinker: $(UV)
part-models part-appworld part-libtpu part-agents part-tau2 part-tinker: part-%:
	sh third_party/$*/setup.sh $(RUN)

# Pins what requirements.txt allows, with hashes, for Python 3.11 and later on every system.
lock: $(UV)
	$(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate \
		--python-version 3.11 --custom-compile-command "make lock" \
		requirements.txt --output-file requirements.lock

setup: $(VENV)/development

quickstart: $(VENV)/runtime
	@echo "Training: configs/quickstart.py -> $(WORKDIR)"
	$(RUN) -m seeupo_jax.train --config=configs/quickstart.py --workdir="$(WORKDIR)"

$(VENV)/bfcl: $(VENV)/runtime third_party/bfcl/setup.sh third_party/install.sh
	sh third_party/bfcl/setup.sh $(RUN)
	@touch $@

harnesses: $(UV)
	sh third_party/harnesses/setup.sh $(RUN)

test-harnesses: $(VENV)/first harnesses
	$(PYTEST) tests/agents/harnesses tests/agents/sandboxes

bfcl: $(VENV)/bfcl
	@echo "Training: configs/bfcl_tiny.py -> runs/bfcl_tiny"
	$(RUN) -m seeupo_jax.train --config=configs/bfcl_tiny.py --workdir=runs/bfcl_tiny

FIRST_TIER := -m "not exhaustive"
PYTEST = LD_PRELOAD="$${LD_PRELOAD:-$(JEMALLOC)}" $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

test: $(VENV)/first-collected
	@echo "Running the first tier of the tests ..."
	$(PYTEST) $(FIRST_TIER)

# SHARE=1/3: the first tier and a third of the second one.
test-all: $(VENV)/collected
	@echo "Running $(if $(SHARE),the first tier and share $(SHARE) of the second one,every test) ..."
	$(PYTEST) $(if $(SHARE),--share=$(SHARE))

# Renews tests/durations.json, which orders the files: on a quiet machine, now and then.
test-durations: $(VENV)/collected
	$(PYTEST) --record-durations

# The bytecode of the tests and of all that they import, made once: workers that begin together would
# each make it.
$(VENV)/first-collected: $(VENV)/first
$(VENV)/collected: $(VENV)/development
$(VENV)/first-collected: SELECTED := $(FIRST_TIER)
$(VENV)/first-collected $(VENV)/collected:
	@echo "Collecting the tests ..."
	@$(RUN) -m pytest --collect-only -qq $(SELECTED) > $@.log || { cat $@.log; exit 1; }
	@touch $@

# Of a file: itself where it is a test, else the test that mirrors it; and the rules of the house.
FILES ?= $(shell git diff --name-only HEAD; git ls-files --others --exclude-standard)
PYTHON_FILES = $(wildcard $(filter %.py,$(FILES)))
MIRRORS = $(foreach file,$(filter seeupo_jax/%,$(PYTHON_FILES)),\
	$(patsubst seeupo_jax/%,tests/%,$(dir $(file)))test_$(notdir $(file)))
CHECKED = $(foreach file,$(PYTHON_FILES) $(wildcard $(MIRRORS)),$(if $(filter test_%,$(notdir $(file))),$(file)))

# Every test of those files where `make setup` was run, else their tests of the first tier.
check: $(VENV)/first
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pytest $(if $(wildcard $(VENV)/development),,$(FIRST_TIER)) tests/test_imports.py $(sort $(CHECKED))

lint: lint-style lint-types lint-scripts lint-house docs

lint-style: $(VENV)/development
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

lint-types: $(VENV)/development
	$(RUN) -m pyright --warnings

lint-scripts: $(VENV)/development
	$(VENV)/bin/shellcheck -x launch/*.sh third_party/*/*.sh

# A report to read: long files, large folders, names that are used twice. It fails at nothing.
lint-house: $(UV)
	@$(RUN) tests/support/house_report.py

$(VENV)/site: $(UV) pyproject.toml
	@echo "Setting up $(VENV) with what builds the site ..."
	@$(call install,--group site)
	@touch $@

# Fails at a broken link or anchor and at a page outside the navigation; --quiet would not count them.
docs: $(VENV)/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf $(VENV) site
