# Two commands: `make demo` and `make test`. The first use of each installs what it needs into .venv, and later uses do not.

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo test

help:
	@echo "make demo   train, kill, resume and open a checkpoint, checked step by step (about a minute)"
	@echo "make test   lint, types and tests"

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# torch comes first and by itself: a requirement that any build satisfies may choose a far larger one than is wanted here.
$(VENV)/.torch:
	@echo "making $(VENV) and installing $(TORCH), once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "installing what make $* needs, once"
	@$(PIP) install --editable '.[$*]'
	@touch $@
