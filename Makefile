# Everything a newcomer needs:  make demo   make test
# Set-up happens by itself: a virtual environment in .venv from the lock file, and whatever of Prometheus, Alertmanager,
# Docker and PostgreSQL is not installed, unpacked from Debian's packages into .parts. Nothing is installed system-wide.

PYTHON ?= python3
BIN := .venv/bin
# What is imported is compiled once, and not by each of the hundreds of programs that the tests start.
unexport PYTHONDONTWRITEBYTECODE

# Processes that share a run. Most tests wait, so that two cores serve more than two.
PROCESSES ?= 5
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadgroup

.PHONY: help demo test kubernetes mutation check collected coverage covered tested ci nightly docs bench up setup lock fmt clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.ready: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: apt-get install python3 python3-venv, or make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; found $$($(PYTHON) -V). Say which with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up .venv from requirements.lock (first run only)"
# Nothing is resolved: the lock file holds all. Debian's pip takes the newest release of what something asks for with an
# extra, whatever is pinned, and then has no hash of it.
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@said=$$($(BIN)/pip check --disable-pip-version-check) || { echo "$$said" >&2; echo "requirements.lock is not whole: make lock makes it anew" >&2; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

setup: .venv/.ready  ## make the virtual environment and fetch the real parts
	@$(BIN)/python -m deploy.standalone.debian_packages
	@$(BIN)/python -m testbed.kubernetes.helm

demo: .venv/.ready  ## a wedged worker is seen, freed, requeued and finished, by real parts (under 90 s)
	@$(BIN)/python -m testbed.demo

test: .venv/.ready  ## the tests that a change needs first, through real Prometheus, Docker and PostgreSQL (under 10 min)
	@$(BIN)/python -m deploy.standalone.debian_packages
	@$(BIN)/python -m testbed.kubernetes.helm
	@$(PYTEST) -m "not slow and not nightly" $(PYTEST_ARGS)

kubernetes: .venv/.ready  ## the tests on a real cluster, from the programs in $KUBEBUILDER_ASSETS
	@$(BIN)/python -m testbed.kubernetes check
	@$(PYTEST) -m kube --no-skips $(PYTEST_ARGS)

mutation: .venv/.ready  ## plant thousands of faults: which does no test catch? MUTATION_ARGS="--rules FILE" for one rule file
	@$(BIN)/python -m deploy.standalone.debian_packages
	@$(BIN)/python -m tools.mutation $(MUTATION_ARGS)

check: .venv/.ready  ## style, types, import contracts, limits of size, docs, rules, configuration
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tools.limits
	@$(BIN)/python -m tools.plain
	@$(BIN)/python -m dashboards.render --check
	@$(BIN)/python -m exporter.reference --check
	@$(BIN)/python -m remediator.reference --check
	@$(BIN)/python -m testbed.reference --check
	@$(BIN)/python -m testbed.chart --check
	@$(BIN)/python -m tools.site
	@$(BIN)/python -m testbed.check_release $(CHECK_ARGS)

# The import contract names the pure modules, a mark their tests.
coverage: .venv/.ready  ## the pure modules' tests, which test every branch of these
	@$(BIN)/python -m pytest -m pure --quiet --cov --cov-report= --no-skips $(COVERAGE_ARGS)
	@$(BIN)/python -m coverage report --include="$$($(BIN)/python -m tools.pure)" --fail-under=100 --precision=1

# Each process of a run collects every test: who finds them compiled does so in a third of the time.
collected: .venv/.ready
	@said=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$said"; exit 1; }

# Beside the other tests, most of which wait: by what they leave of the processors. What it says comes when it is done.
covered:
	@nice -n 19 $(MAKE) --no-print-directory --output-sync=target coverage

tested:
	@$(BIN)/python -m deploy.standalone.debian_packages
	@$(BIN)/python -m testbed.kubernetes.helm
	@$(PYTEST) -m "not nightly and not pure" --no-skips --junit-xml=.work/tests.xml $(PYTEST_ARGS)

# A test of what ships runs the rules' own tests: they are not run here before it.
ci: .venv/.ready  ## what CI runs: the checks, coverage of the pure modules, all but the nightly tests, no skip (under 15 min)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check collected CHECK_ARGS="--but rules_pass_their_tests"
	@$(MAKE) --no-print-directory --jobs 2 covered tested

nightly: .venv/.ready  ## everything: the checks, every test, the planted faults (under 90 min)
	@$(MAKE) --no-print-directory check coverage COVERAGE_ARGS="--hypothesis-profile=nightly"
	@$(BIN)/python -m deploy.standalone.debian_packages
	@$(BIN)/python -m testbed.kubernetes.helm
	@$(PYTEST) -m "not pure" --hypothesis-profile=nightly --no-skips --junit-xml=.work/nightly.xml $(PYTEST_ARGS)
	@$(BIN)/python -m tools.mutation $(MUTATION_ARGS)

docs: .venv/.ready  ## build the site into .work/site, strictly: links, menus, images, words per page
	@$(BIN)/python -m tools.site

bench: .venv/.ready  ## measure: medians and ratios, in one run
	@$(BIN)/python -m bench

up: .venv/.ready  ## the whole chain on this host, in dry run, until Ctrl-C; UP_ARGS="--help" says more
	@$(BIN)/python -m deploy.standalone.up --data-dir .work/up $(UP_ARGS)

# All but `all`, which names this package itself.
EXTRAS := bench demo dev docs evidence exporter jobs kubernetes postgresql remediator up
lock: .venv/.ready  ## make requirements.lock anew from pyproject.toml
	@$(BIN)/pip-compile --quiet --upgrade --generate-hashes $(EXTRAS:%=--extra %) --strip-extras --allow-unsafe --no-header \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links -o requirements.lock pyproject.toml

fmt: .venv/.ready  ## format and mend what ruff can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, .parts and everything made here
	@rm -rf .venv .parts .work .coverage* htmlcov dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
