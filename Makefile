# Sluice: `make` alone lists what can be done.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help run test test-long lint format docs bench chaos chart setup setup-dev setup-servers setup-clients \
	check check-style check-types check-imports

BIN := .venv/bin
# The set-up compiles no Python code. With this variable each process would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
# Three more than the cores of the smallest machines that we test on: tests wait for other processes half of their time.
TEST_PROCESSES ?= 5
# Per cent of lines and branches.
COVERAGE_FLOOR := 95
ARGS ?=

help: ## List what can be done
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | \
		while IFS=$$'\t' read -r verb text; do printf '  make %-9s %s\n' "$$verb" "$$text"; done

run: setup ## Set everything up and start it on loopback (ARGS="--help" lists options)
	@exec $(BIN)/sluice up $(ARGS)

# The databases of tests write each transaction to the disk, unless they are in memory. A container may have too
# little of it (64 MB).
MEMORY := /dev/shm
TMPDIR ?= $(shell [ -w $(MEMORY) ] && [ "$$(df --output=avail $(MEMORY) | tail -1)" -gt 4000000 ] && \
	echo $(MEMORY) || echo /tmp)
PYTEST := env TMPDIR=$(TMPDIR) $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

# Only a whole run measures coverage.
test: setup-dev setup-servers setup-clients check ## Set everything up, lint, check types, run every test
ifeq ($(strip $(ARGS)),)
	@echo "test: Running the tests in $(TEST_PROCESSES) processes, measuring coverage ..."
	@rm -rf .coverage && mkdir .coverage
	@COVERAGE_FOLDER=$(CURDIR)/.coverage $(PYTEST) -p tests.support.measuring
	@$(BIN)/python -m tests.support.measuring .coverage --floor $(COVERAGE_FLOOR)
else
	@echo "test: Running the tests in $(TEST_PROCESSES) processes ..."
	@exec $(PYTEST) $(ARGS)
endif

test-long: override ARGS += --long
test-long: test ## The same with the long forms of tests: more engines, requests and random cases (hours)

lint: setup-dev check ## Lint, check format, types and import directions

format: setup-dev ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

# Draws the diagrams of the site in the browser. The theme would request it from a CDN.
MERMAID := .venv/mermaid-js-tiny-11.17.2.tgz
MERMAID_SHA256 := 28302a2f6bd556bfd223acff76a1fd511bcc9e6f1cac1bad91b904469aeca102

$(MERMAID): | setup-dev
	@npm pack --silent --pack-destination=$(@D) @mermaid-js/tiny@11.17.2 >/dev/null

docs: setup-dev $(MERMAID) ## Build the documentation as a web site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "$(MERMAID_SHA256)  $(MERMAID)" | sha256sum --check --quiet
	@mkdir -p site/javascripts
	@tar --extract --to-stdout --file=$(MERMAID) package/dist/mermaid.tiny.js >site/javascripts/mermaid.tiny.js

bench: setup-dev ## Measure against vLLM's own server (ARGS="--help" lists options)
	@exec $(BIN)/python -m bench $(ARGS)

chaos: setup-dev setup-servers ## Break a deployment while it is used (ARGS="--minutes 30 --seed 7")
	@exec $(BIN)/python -m tests.chaos $(ARGS)

chart: setup-dev ## Write the dashboards, and what the Helm chart has from elsewhere: README, rules, dashboards
	@$(BIN)/python -m ops.dashboards >/dev/null
	@$(BIN)/python scripts/chart.py

setup:
	@scripts/setup.sh gateway worker

setup-dev:
	@scripts/setup.sh gateway worker dev

# Redis 7 beside the bundled 6.2, a clock that tests can set, and Prometheus with promtool. Tests that need what
# cannot be installed are skipped by name.
setup-servers: setup-dev
	@if { ! command -v redis-server || ! command -v promtool || \
		! ls /usr/lib/*/faketime/libfaketimeMT.so.1; } >/dev/null 2>&1 && \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: Installing redis-server, libfaketime and prometheus for the tests ..."; \
		scripts/debian.sh redis-server libfaketime prometheus || echo "setup: That failed; what needs them is skipped."; \
	fi

setup-clients: setup-dev
	@scripts/setup.sh clients $(if $(findstring --long,$(ARGS)),llama-index)

# Side by side: mypy keeps one core busy for a minute without its cache (.mypy_cache).
check: setup-dev
	@$(MAKE) --no-print-directory --jobs=3 check-types check-style check-imports

check-types:
	@echo "check: Checking types with mypy (seconds; a minute or two without a cache) ..."
	@$(BIN)/mypy

check-style:
	@echo "check: Checking style and format with ruff ..."
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

check-imports:
	@echo "check: Checking the directions of imports with import-linter ..."
	@$(BIN)/lint-imports --no-logo
