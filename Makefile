# Development targets. `make` alone prints the table.
#
# The first target that needs Python creates a virtual environment in .venv from the hash-pinned lock,
# and updates it when the lock or pyproject.toml change. Nothing is installed elsewhere.
# To use another interpreter: PYTHON=python3.12 make test

PYTHON  ?= python3
UV      ?= uv
# Four, because many tests wait: on two quiet cores the suite must finish in twelve minutes.
WORKERS ?= 4

VENV  := .venv
BIN   := $(VENV)/bin
LOCK  := requirements/dev.lock
EXAMPLES_LOCK := requirements/examples.lock
COMPILE = --universal --python-version 3.11 --generate-hashes --quiet --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links $(LOCK_FLAGS)
# Named after the interpreter, so that a change of interpreter rebuilds it.
READY := $(VENV)/.ready-$(notdir $(PYTHON))

PYTEST := $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS)
QUICK  := -m 'not soak and not bench and not chaos and not alone'
TIMED  := -m 'alone and not soak and not bench and not chaos'

# Servers and commands are started hundreds of times by the tests: without cached bytecode each start
# compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE

SHELL         := bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS     += --no-print-directory

# $(call heading,text): one line above each stage, so that the failing one is easy to find.
heading = @printf '\n== %s\n' '$(1)'

.PHONY: help
help: ## print this table
	@printf 'usage: make TARGET\n\n'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 16

.PHONY: demo
demo: $(READY) ## show a full tenant, a research agent, an approval and a queue
	@$(BIN)/python examples/demo.py

.PHONY: serve
serve: $(READY) ## run a server on http://127.0.0.1:8420; data in .stanchion
	@$(BIN)/stanchion serve --data-dir .stanchion

.PHONY: test
test: check-and-collect browser promtool test-core test-timed test-rest ## all checks and tests, 8 to 17 minutes on two cores
	@$(BIN)/python -m tests.console.browser --report
	@command -v promtool $(BIN)/promtool >/dev/null || \
	    printf '\n!! no promtool: the unit tests of the alert rules were SKIPPED\n'
	@printf '\nall checks passed\n'

# The type checker leaves one core idle. Meanwhile the tests are collected once, which compiles them:
# each worker of the stages below would compile all of them for itself. Not $(MAKE): a line with it is
# executed by `make --dry-run` as well.
.PHONY: check-and-collect
check-and-collect: $(READY)
	@$(BIN)/python -m pytest --quiet --collect-only tests >/dev/null 2>&1 & collecting=$$!; \
	    trap 'kill $$collecting 2>/dev/null || :' EXIT; \
	    make check; \
	    wait $$collecting || { $(BIN)/python -m pytest --quiet --collect-only tests; exit 1; }

# Finds a browser for the tests of the console, or gets one. Without one those tests are skipped, and
# the last lines of `make test` say so.
.PHONY: browser
browser: $(READY)
	$(call heading,a browser for the tests of the console)
	@$(BIN)/python -m tests.console.browser

.PHONY: quick
quick: check ## lint, types, the core and one store, in under 90 seconds
	$(call heading,core and the contract on SQLite)
	@$(PYTEST) tests/core tests/contract $(QUICK) -k 'core or sqlite'

.PHONY: check
check: $(READY) ## lint, format, types and import contracts, without the tests
	$(call heading,ruff check)
	@$(BIN)/ruff check .
	$(call heading,ruff format)
	@$(BIN)/ruff format --check .
	$(call heading,mypy)
	@$(BIN)/mypy
	$(call heading,import contracts)
	@$(BIN)/lint-imports --no-logo
	$(call heading,files that a request goes through)
	@PYTHONPATH=. $(BIN)/python scripts/request_paths.py

# The unit tests of the alert rules need it; they are skipped without, and this says so.
.PHONY: promtool
promtool: $(READY)
	@scripts/get-promtool $(BIN)

# Only tests/core counts towards the core's coverage, and the other tests run without the overhead of
# measuring it. It doubles what the properties of `decide` cost, so they are among the others.
TRACED := $(filter-out tests/core/test_run_properties.py,$(wildcard tests/core/test_*.py))

.PHONY: test-core
test-core: $(READY)
	$(call heading,tests of the core with branch coverage)
	@$(PYTEST) $(TRACED) $(QUICK) --cov --cov-report=term

# Beside other tests they would measure those.
.PHONY: test-timed
test-timed: $(READY)
	$(call heading,tests that judge times: neighbours)
	@$(BIN)/python -m pytest --quiet tests/acceptance/test_neighbours.py $(TIMED)
	$(call heading,tests that judge times: drills and journeys through the console)
	@$(PYTEST) --numprocesses 3 --dist loadgroup $(TIMED) \
	    $$(grep -rl --include='test_*.py' 'mark\.alone' tests | grep -v test_neighbours)

.PHONY: test-rest
test-rest: $(READY)
	$(call heading,tests of everything around the core)
	@rm -f .pytest_cache/v/cache/lastfailed
	@$(PYTEST) --dist worksteal tests $(TRACED:%=--ignore=%) $(QUICK) || scripts/test-again $$? $(BIN)/python $(QUICK)

.PHONY: sim
sim: $(READY) ## simulate ten thousand days of faults, then every defect
	$(call heading,ten thousand simulated days)
	@$(BIN)/stanchion sim --seeds 0..10000 --workers $(WORKERS)
	$(call heading,deliberate defects must be found)
	@$(BIN)/python -m stanchion sim --mutants --workers $(WORKERS)
	$(call heading,days on a Valkey server)
	@PYTHONPATH=. $(BIN)/python scripts/simulate.py valkey --days 60
	$(call heading,lines of core and services that sixty days execute)
	@PYTHONPATH=. $(BIN)/python scripts/simulate.py coverage --days 60

.PHONY: sim-night
sim-night: $(READY) ## simulate days until stopped, and shrink what fails
	@PYTHONPATH=. $(BIN)/python scripts/simulate.py night --workers $(WORKERS)

.PHONY: drill
drill: $(READY) ## prove every policy on real processes; see drill-reports
	@$(BIN)/python -m stanchion drill all

.PHONY: chaos
chaos: $(READY) ## disconnect, pause and kill real servers; takes long
	$(call heading,chaos on real processes)
	@$(BIN)/python -m pytest --quiet tests -m chaos

.PHONY: bench
bench: $(READY) ## measure every ratio and time we claim; fail if one is missed
	@$(BIN)/python -m bench

.PHONY: soak
soak: $(READY) ## all tests at full scale, then mutation tests; takes long
	@$(BIN)/python -m pip --quiet install --no-deps --require-hashes \
	    --requirement $(EXAMPLES_LOCK)
	$(call heading,all tests at full scale)
	@STANCHION_TEST_SCALE=soak $(PYTEST) --dist worksteal tests -m 'not bench and not chaos and not alone'
	$(call heading,tests that judge times at full scale)
	@STANCHION_TEST_SCALE=soak $(BIN)/python -m pytest --quiet tests -m 'alone and not bench and not chaos'
	$(call heading,mutation run over the decisions of the core)
	@rm -rf mutants
	@STANCHION_TEST_SCALE=mutation $(BIN)/mutmut run --max-children $(WORKERS)
	@$(BIN)/mutmut results

.PHONY: pictures
pictures: $(READY) ## take the pictures of the console for docs/pictures
	@$(BIN)/python -m tests.console.browser
	@PYTHONPATH=. $(BIN)/python scripts/take_pictures.py

.PHONY: transcripts
transcripts: $(READY) ## take the transcripts of "run why" for the docs
	@PYTHONPATH=. $(BIN)/python -m tests.docs.transcripts

.PHONY: generate
generate: $(READY) ## regenerate schemas, reference pages and dashboards
	@$(BIN)/python scripts/generate_schema.py
	@$(BIN)/python scripts/generate_reference.py
	@$(BIN)/python scripts/generate_dashboards.py
	@$(BIN)/python -m stanchion.gateway > schema/openapi.json

.PHONY: lock
lock: ## rewrite the lock files (needs uv); LOCK_FLAGS=--upgrade
	@command -v $(UV) >/dev/null || { echo 'make lock needs uv: pip install uv' >&2; exit 1; }
	@$(UV) pip compile pyproject.toml --extra server --extra otel --group dev --output-file $(LOCK) $(COMPILE)
	@$(UV) pip compile pyproject.toml --group examples --constraint $(LOCK) \
	    --output-file $(EXAMPLES_LOCK) $(COMPILE)

.PHONY: clean
clean: ## remove everything that make created, .venv included
	@rm -rf $(VENV) mutants build dist reports drill-reports htmlcov .coverage .coverage.* .hypothesis \
	    .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(LOCK) pyproject.toml scripts/make-venv
	@scripts/make-venv '$(PYTHON)' $(VENV) $(LOCK)
	@rm -f $(VENV)/.ready-*
	@touch $@
