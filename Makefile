# make setup | make quickstart | make test | make test-slow | make lint
PYTHON ?= python3
RUN := HF_HUB_OFFLINE=1 WANDB_MODE=offline .venv/bin/python

.PHONY: setup quickstart test test-slow lint

setup: .venv/installed

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

quickstart: setup
	.venv/bin/python train.py --config configs/quickstart.yaml --run.overwrite true

test: setup
	$(RUN) -m pytest -m "not slow"

test-slow: setup
	$(RUN) -m pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
