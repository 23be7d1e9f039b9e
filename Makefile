# make demo   watch DDTree work on a real model
# make test   lint, types, tests
# make serve  an OpenAI-compatible server with DDTree on http://127.0.0.1:30000

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test serve clean

demo: $(VENV)/.has-sglang
	$(BIN)/ddtree demo

test: $(VENV)/.has-peers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

serve: $(VENV)/.has-sglang
	$(BIN)/ddtree serve

clean:
	rm -rf $(VENV)

# One stamp for each extra; made anew when pyproject.toml changes.
$(VENV)/.has-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# z-lab's own package, a peer in the tests; its exact pins make it unfit as a dependency.
$(VENV)/.has-peers: $(VENV)/.has-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'dflash>=0.1.0'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
