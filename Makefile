# Every command a newcomer needs. `make` alone lists them.
# The virtual environment .venv is made from requirements/lock.txt and remade only when that file changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Hundreds of processes start here, each in less than half the time if modules stay compiled.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input --quiet
LOCK := requirements/lock.txt
LOCK_VENV := .venv-lock
PIP_TOOLS := pip==26.3 pip-tools==7.6.2
# Programs that the tests drive, each with the Debian package that has it.
DEBIAN_PROGRAMS := kcat:kcat etcd:etcd-server initdb:postgresql
# Debian keeps PostgreSQL's server programs out of the path, in a folder for each version.
has_program = { command -v "$(1)" || compgen -G "/usr/lib/postgresql/*/bin/$(1)"; } >/dev/null
JAVA_PACKAGES := openjdk-17-jre-headless default-jre-headless
ARGS ?=
# An etcd for `make cluster`, as etcd://host:port[,host:port...]; without it one is started.
ETCD ?=

# Prints the newest usable interpreter of those named, or nothing. Version managers leave shims that
# exist but do not run, so each one is tried.
first_python = for name in $(1); do \
	if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$name"; break; fi; \
	done

# Installs the named Debian packages if root or passwordless sudo allows it; fails quietly otherwise.
apt_install = { \
	if [ "$$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else exit 1; fi; \
	command -v apt-get >/dev/null || exit 1; \
	$$as_root apt-get -qq update >/dev/null 2>&1 || true; \
	DEBIAN_FRONTEND=noninteractive $$as_root apt-get -qq install -y --no-install-recommends $(1) >/dev/null 2>&1; \
	}

name_missing_programs = for program in $(DEBIAN_PROGRAMS); do \
	$(call has_program,$${program%:*}) || \
		echo "missing: $${program%:*} (the tests that drive it are skipped). Install it with: apt-get install $${program\#*:}"; \
	done

# Succeeds if there is a Java for Spark: 17 or newer, in JAVA_HOME or else in the path.
has_java = "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | \
	awk -F '"' '/version/ {split($$2, part, "."); found = part[1]} END {exit !(found + 0 >= 17)}'
no_java := missing: Java 17 or newer, which Spark needs. Install it with: apt-get install openjdk-17-jre-headless; or set JAVA_HOME

no_java_clients := missing: javac or mvn (the tests of Java's Kafka clients are skipped). Install them with: apt-get install default-jdk-headless maven

.PHONY: help setup run cluster test test-long check lint types layers format bench lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed $(VENV)/.debian ## Create .venv from the lock file; install kcat, etcd, PostgreSQL and Java where possible
	@$(name_missing_programs)
	@$(has_java) || echo "$(no_java)"
	@{ command -v javac && command -v mvn; } >/dev/null || echo "$(no_java_clients)"
	@echo "ready: $$($(PY) --version) in $(VENV)"

run: $(VENV)/.installed $(VENV)/.debian ## Run the shop: a node, Kafka producers, a Spark pipeline, and a report
	@$(has_java) || { echo "$(no_java)" >&2; exit 1; }
	@$(PY) examples/shop --report build/shop.html $(ARGS)

cluster: $(VENV)/.installed $(VENV)/.debian ## Run three nodes, kill one after the other under load, and compare every record
	@$(PY) examples/cluster --directory build/cluster $(if $(ETCD),--etcd $(ETCD)) $(ARGS)

test: $(VENV)/.installed $(VENV)/.debian ## Run the tests; ARGS="-k name" narrows them
	@$(name_missing_programs)
	@{ command -v javac && command -v mvn; } >/dev/null || echo "$(no_java_clients)"
	@$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS) || $(PY) tests/alone.py $$?

test-long: $(VENV)/.installed $(VENV)/.debian ## Run the long campaigns: thousands of simulated stories; 100 kills, pauses and cuts of a real cluster under load; kills of nodes, workers and cursors
	@$(name_missing_programs)
	@CLUSTER_STORY_SEEDS=2000 TIDEMILL_REPLICA_SEEDS=2000 TABLE_STORY_SEEDS=$$(seq -s, 1 40) CLUSTER_EVENTS=100 \
		TIDEMILL_SHARE_WALKS=20000 SHARE_KILLS=30 WORKER_KILLS=70 CURSOR_KILLS=67 \
		$(PY) -m pytest -n auto --no-loadscope-reorder tests/sim tests/system/test_table_model.py \
		tests/system/test_cluster.py tests/unit/share/partition/test_model.py \
		tests/system/test_share_crash.py tests/system/test_ordered_worker_kills.py tests/system/test_cursor_kills.py $(ARGS)

check: lint types layers ## Lint, format check, types, layers: what the pre-commit hooks run, too

lint: $(VENV)/.installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	@$(VENV)/bin/mypy

layers: $(VENV)/.installed
	@$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/.installed ## Format the code and fix what the linter can fix
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .

bench: $(VENV)/.installed ## Run the benchmarks
	@$(PY) -m bench $(ARGS)

lock: ## Compile requirements/lock.txt anew from pyproject.toml; ARGS="--upgrade" takes newer versions
	@python="$$($(call first_python,python3.11))"; \
	if [ -z "$$python" ]; then echo "make lock needs python3.11, the oldest supported version: its lock holds for newer ones too" >&2; exit 1; fi; \
	[ -x $(LOCK_VENV)/bin/pip-compile ] || { "$$python" -m venv --clear $(LOCK_VENV) && \
		$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(PIP_TOOLS); }; \
	CUSTOM_COMPILE_COMMAND="make lock" $(LOCK_VENV)/bin/pip-compile --quiet --extra cluster --extra demo --extra spark --extra test --extra dev --all-build-deps \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --strip-extras --allow-unsafe \
		--output-file $(LOCK) $(ARGS) pyproject.toml
	@echo "wrote $(LOCK)"

clean: ## Remove the virtual environments and all caches
	@rm -rf $(VENV) $(LOCK_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The locked packages. Rebuilt from nothing when the lock changes, so that no stale package stays behind.
$(VENV)/.locked: $(LOCK)
	@python="$$($(call first_python,$(PYTHON) python3.13 python3.12 python3.11 python3))"; \
	if [ -z "$$python" ]; then \
		echo "Tidemill needs Python 3.11 or newer; none was found. Install it, or name one: make setup PYTHON=/path/to/python" >&2; exit 1; fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null && ! ( $(call apt_install,python3-venv) ); then \
		echo "$$python has no venv module. Install it with: apt-get install python3-venv" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@$(PIP) install --require-hashes --no-deps -r $(LOCK)
	@touch $@

# Tidemill itself, editable. Needs nothing beyond the lock: the build backend is in it.
$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# One attempt per virtual environment: without root it fails, and setup and test say what is missing.
$(VENV)/.debian: | $(VENV)/.locked
	@for program in $(DEBIAN_PROGRAMS); do \
		package="$${program#*:}"; \
		$(call has_program,$${program%:*}) || ( echo "installing $$package"; $(call apt_install,"$$package") ) || true; \
	done
	@$(has_java) || for package in $(JAVA_PACKAGES); do \
		echo "installing $$package"; ( $(call apt_install,"$$package") ) && break; \
	done || true
	@touch $@
