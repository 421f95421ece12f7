# Needs Python 3.11 or later and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

VLLM := .venv-vllm

.PHONY: train remote test vllm chaos check fmt docs clean
.DEFAULT_GOAL := train

train: $(VENV)/.train  ## a tiny model learns the echo task on the CPU
	$(BIN)/python -m retrain.run configs/quickstart.yaml

remote: $(VENV)/.remote  ## install what the tinker and weaver backends need

test: $(VENV)/.test  ## the whole suite, in a few processes
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

vllm: $(VENV)/.test $(VLLM)/.installed  ## tests against a real vLLM server on the CPU (4 minutes)
	$(BIN)/python -m pytest -m vllm tests/test_vllm_*.py

chaos: $(VENV)/.test  ## kills, faults and simulated histories, with a score; CHAOS=--seed=1 draws others
	$(BIN)/python -m tests.chaos $(CHAOS)

check: $(VENV)/.test  ## lint, format, types, licences, versions that fit every extra, known vulnerabilities
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/licences.py --check
	$(BIN)/uv pip compile --quiet --no-header --all-extras -c constraints.txt pyproject.toml > /dev/null
	$(BIN)/python .ci/audit.py $(AUDIT)

fmt: $(VENV)/.test  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## write the tables of the pages that have a script in docs/
	$(BIN)/python docs/configuration.py
	$(BIN)/python docs/scaling.py
	$(BIN)/python docs/licences.py

clean:
	rm -rf $(VENV) $(VLLM) runs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "retrain needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# A stamp says that its set of packages is installed; the larger sets hold the smaller ones.
$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[trl]'
	@touch $@

$(VENV)/.remote: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[trl,remote,service]'
	@touch $@ $(VENV)/.train

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[trl,remote,service,test,dev]'
	@touch $@ $(VENV)/.train $(VENV)/.remote

$(VLLM)/.installed: vllm-requirements.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $< torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@
