# make setup | make quickstart | make test | make test-slow | make lint | make browser
PYTHON ?= python3
RUN := HF_HUB_OFFLINE=1 WANDB_MODE=offline .venv/bin/python

.PHONY: setup quickstart test test-slow lint browser

setup: .venv/installed

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# One thread: two are a third faster where nothing else runs, and many times slower where something does.
quickstart: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python train.py --config configs/quickstart.yaml --run.overwrite true
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m scripts.eval_heads runs/quickstart

# A worker per core, which takes whole files: their fixtures, small trained runs, are made once.
test: setup
	$(RUN) -m pytest -n auto --dist loadfile -m "not slow"

test-slow: setup
	$(RUN) -m pytest -n auto --dist loadfile

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# For the tests of the report page; without a browser they are skipped.
browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; \
	else \
		echo "no browser and no way to install one: as root on Debian or Ubuntu run 'make browser', elsewhere install Chromium so that 'chromium' is on the path" >&2; exit 1; \
	fi
