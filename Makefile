# Sluice: `make` without a target lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-long lint format diagrams docs docs-serve bench chaos chart release setup setup-docs \
	setup-dev setup-servers setup-clients setup-peers check check-style check-types check-imports

BIN := .venv/bin
# scripts/setup.sh does not compile Python code. With this variable, each process would compile its
# imports again.
unexport PYTHONDONTWRITEBYTECODE
# Two more than the cores of the smallest test machines: tests spend half of their time waiting
# for other processes.
TEST_PROCESSES ?= 4
# Minimum coverage of lines and branches, in percent.
COVERAGE_FLOOR := 95
ARGS ?=

help: ## List the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | \
		while IFS=$$'\t' read -r verb text; do printf '  make %-9s %s\n' "$$verb" "$$text"; done

run: setup ## Install Sluice and start it on loopback (ARGS="--help" lists options)
	@exec $(BIN)/sluice up $(ARGS)

# Databases of tests write each transaction to disk, unless they are in memory. A container may have
# too little shared memory (64 MB).
MEMORY := /dev/shm
TMPDIR ?= $(shell [ -w $(MEMORY) ] && \
	[ "$$(df --output=avail $(MEMORY) | tail -1)" -gt 4000000 ] && \
	echo $(MEMORY) || echo /tmp)
PYTEST := env TMPDIR=$(TMPDIR) $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadscope \
	--no-loadscope-reorder
PREPARED := setup-dev setup-servers setup-clients check

test: $(PREPARED) ## Install the tools, lint, run the default tests
	@echo "test: Running the tests in $(TEST_PROCESSES) processes ..."
	@exec $(PYTEST) $(ARGS)

# Measures the coverage, in which the slow tests have their share.
test-slow: $(PREPARED) ## Run `make test` with the slow tests and coverage, as CI does (20 minutes)
	@echo "test: Running the tests in $(TEST_PROCESSES) processes ..."
	@rm -rf .coverage && mkdir .coverage
	@COVERAGE_FOLDER=$(CURDIR)/.coverage $(PYTEST) --slow -p tests.support.measuring
	@$(BIN)/python -m tests.support.measuring .coverage --floor $(COVERAGE_FLOOR)

test-long: override ARGS += --long
test-long: test ## Run `make test` with the long forms of tests (hours)

lint: setup-dev check ## Lint, check format, types and import directions

format: setup-dev ## Format the code and apply automatic fixes
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

# Draws the diagrams of the site, once: readers load pictures.
MERMAID := .venv/mermaid-js-tiny-11.17.2.tgz
MERMAID_SHA256 := 28302a2f6bd556bfd223acff76a1fd511bcc9e6f1cac1bad91b904469aeca102

# Lets pages search without a server, where browsers start no workers.
WORKER := .venv/iframe-worker-1.0.3.tgz
WORKER_SHA256 := 4f13bc180acc6af377b54b1dfb3de98f530be43b02d82e080c59930912da93ad
MKDOCS := .venv/docs/bin/mkdocs

$(MERMAID): | setup-dev
	@npm pack --silent --pack-destination=$(@D) @mermaid-js/tiny@11.17.2 >/dev/null

$(WORKER): | setup-docs
	@npm pack --silent --pack-destination=$(@D) iframe-worker@1.0.3 >/dev/null

docs: setup-docs $(WORKER) ## Build the documentation as a web site in site/
	@NO_MKDOCS_2_WARNING=1 $(MKDOCS) build --strict
	@echo "$(WORKER_SHA256)  $(WORKER)" | sha256sum --check --quiet
	@mkdir -p site/javascripts
	@tar --extract --to-stdout --file=$(WORKER) package/shim/index.js >site/javascripts/iframe-worker.js
	@echo "docs: Open site/index.html, or run make docs-serve."

diagrams: setup-dev setup-servers $(MERMAID) ## Draw the diagrams of the documents again, after a change of one
	@echo "$(MERMAID_SHA256)  $(MERMAID)" | sha256sum --check --quiet
	@$(BIN)/python -m scripts.diagrams $(MERMAID)

docs-serve: docs ## Build the web site, and serve it on loopback (ARGS="9000" is the port)
	@exec $(BIN)/python -m http.server --bind 127.0.0.1 --directory site $(or $(ARGS),8000)

bench: setup-dev $(if $(filter affinity agents peers,$(ARGS)),setup-peers) ## Compare with other servers (ARGS="--help" lists options)
	@exec $(BIN)/python -m bench $(ARGS)

chaos: setup-dev setup-servers ## Inject faults under load (ARGS="--minutes 30 --seed 7")
	@exec $(BIN)/python -m tests.failures.chaos $(ARGS)

chart: setup-dev ## Generate the dashboards, and the Helm chart's README, rules and dashboards
	@$(BIN)/python -m ops.dashboards >/dev/null
	@$(BIN)/python scripts/chart.py

release: setup-dev ## Build the wheel, SBOMs and provenance of a release in dist/
	@$(BIN)/python scripts/release.py build $(ARGS)

setup:
	@scripts/setup.sh gateway local worker

setup-docs:
	@scripts/setup.sh docs

setup-dev:
	@scripts/setup.sh gateway local worker dev

# Redis 7 in addition to the bundled 6.2, a pooler of PostgreSQL, a clock that tests can set,
# Prometheus with promtool, and a browser.
# Tests are skipped by name if their server cannot be installed.
setup-servers: setup-dev
	@if { ! command -v redis-server || ! command -v promtool || \
		! command -v chromium-headless-shell || ! command -v pgbouncer || \
		! ls /usr/lib/*/faketime/libfaketimeMT.so.1; } >/dev/null 2>&1 && \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: Installing redis-server, pgbouncer, libfaketime, prometheus and a browser ..."; \
		scripts/debian.sh redis-server pgbouncer libfaketime prometheus chromium-headless-shell || \
		echo "setup: Installation failed; tests that need them are skipped."; \
	fi

# The benchmark skips those that cannot be installed.
setup-peers: setup-dev
	@scripts/setup.sh peers-litellm peers-smg peers-tensorzero peers-vllm-router
	@if ! command -v nginx >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: Installing nginx for the benchmark ..."; \
		scripts/debian.sh nginx-light || echo "setup: Installation failed; nginx is skipped."; \
	fi

setup-clients: setup-dev
	@scripts/setup.sh newest npm clients-python \
		$(if $(findstring --long,$(ARGS)),npm-agents clients-aider clients-lm-eval clients-load)

# In parallel: mypy uses one core for a minute without its cache (.mypy_cache).
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
