# Two commands do everything on a fresh machine:
#   make quickstart    install, then run the main job to its end
#   make test          install, then pass the tests
VENV ?= .venv
PY ?= python3
BIN := $(VENV)/bin

.PHONY: quickstart test test-trainers lint bench clean

quickstart: $(VENV)/.ok
	scripts/quickstart

# Three on two cores: the tests wait for servers, leases and trainers more than they compute.
test: $(VENV)/.ok
	$(BIN)/pytest -n 3 --dist worksteal -m 'not soak'

# Real trainings with the common frameworks, killed on the way. Installs them into the same environment.
test-trainers: $(VENV)/.ok
	scripts/install $(VENV) $(PY) dev,trainers
	$(BIN)/pytest -n 3 --dist worksteal -m 'not soak' tests/trainers

lint: $(VENV)/.ok
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ok
	$(BIN)/python scripts/bench/footprint.py

clean:
	rm -rf $(VENV) quickstart-data

$(VENV)/.ok: pyproject.toml constraints-ci.txt scripts/install
	scripts/install $(VENV) $(PY)
	touch $@
