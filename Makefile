# Every target does its own set-up in .venv; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKDIR ?= runs/quickstart
# Of the tests: one more than there are cores, since many of them wait for processes.
WORKERS ?= $(shell expr 1 + $$(nproc 2>/dev/null || echo 1))
# Hundreds of processes import the package: without bytecode each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test-tools test-models test-appworld test-libtpu quickstart bfcl test lint docs clean

help:
	@echo "make quickstart   train the bundled example policy and show its learning curve (about 5 minutes)"
	@echo "make bfcl         the same loop on the real BFCL v4 tasks (about 20 minutes)"
	@echo "make test         every test"
	@echo "make lint         ruff format, ruff check, shellcheck, and the site's links"
	@echo "make docs         the documentation as a site, in site/"

$(VENV)/runtime: requirements.txt pyproject.toml
	@echo "Setting up $(VENV) with what requirements.txt names ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# What the tests need beside it; the parts fetch and unpack side by side.
$(VENV)/development: $(VENV)/runtime third_party/bfcl/setup.sh third_party/models/setup.sh \
		third_party/appworld/setup.sh third_party/libtpu/setup.sh
	@echo "Adding what the tests need ..."
	@$(MAKE) --no-print-directory --jobs=4 test-tools test-models test-appworld test-libtpu
	@touch $@

test-tools:
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
		--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	sh third_party/bfcl/setup.sh $(RUN)

test-models test-appworld test-libtpu: test-%:
	sh third_party/$*/setup.sh $(RUN)

setup: $(VENV)/development

quickstart: $(VENV)/runtime
	@echo "Training: configs/quickstart.py -> $(WORKDIR)"
	$(RUN) -m seeupo_jax.train --config=configs/quickstart.py --workdir=$(WORKDIR)

bfcl: $(VENV)/development
	@echo "Training: configs/bfcl_tiny.py -> runs/bfcl_tiny"
	$(RUN) -m seeupo_jax.train --config=configs/bfcl_tiny.py --workdir=runs/bfcl_tiny

test: $(VENV)/development
	@echo "Running every test ..."
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

lint: $(VENV)/development
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/shellcheck -x launch/*.sh third_party/*/*.sh
	@$(MAKE) --no-print-directory docs

# Fails at a broken link or anchor and at a page outside the navigation; --quiet would not count them.
docs: $(VENV)/development
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs site
