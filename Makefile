# The front door. Needs python3 (3.11 or newer) with venv; everything else is installed into .venv.
PORT ?= 8888
FUZZ_SECONDS ?= 600
MODEL ?= smollm2
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MEMBERS := atlas_core $(patsubst %/pyproject.toml,%,$(filter-out atlas_core/%,$(wildcard */pyproject.toml plugins/*/pyproject.toml)))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

.PHONY: serve test check format kernels clients bench fuzz dist clean

serve: kernels            ## serve MODEL on PORT
	@$(BIN)/atlas serve $(MODEL) --port $(PORT)

test: kernels clients     ## every test that needs no GPU
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.tools     ## style, types, layers, declared dependencies
	@$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/mypy --explicit-package-bases bench && \
		$(BIN)/lint-imports --no-logo
	@for member in $(MEMBERS); do (cd $$member && $(abspath $(BIN))/deptry --no-ansi src) || exit 1; done

format: $(VENV)/.tools    ## rewrite as the style wants it
	@$(BIN)/ruff check --fix && $(BIN)/ruff format

kernels: $(VENV)/.members ## build the CPU kernels of this machine; a second run builds nothing
	@$(BIN)/atlas kernels build --hw cpu --arch native

clients: $(VENV)/.clients ## the command-line clients that tests drive, where npm is

bench: kernels            ## time the CPU kernels
	@$(BIN)/atlas kernels bench --hw cpu

fuzz: kernels $(VENV)/.fuzz    ## send odd requests for FUZZ_SECONDS to the interface, then to what translates them
	@$(BIN)/python tests/fuzz/api.py $(FUZZ_SECONDS)
	@$(BIN)/python tests/fuzz/translation.py $(FUZZ_SECONDS)

dist: $(VENV)/.tools      ## build the wheels, and prove that each installs without the others
	@$(BIN)/python .ci/dist $(MEMBERS)

clean:                    ## forget the environment and everything built
	rm -rf $(VENV) dist
	find $(MEMBERS) -name _compiled -type d -prune -exec rm -rf {} +

# What fails leaves no environment behind that a second run would take for a sound one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Atlas needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Members first, by one hatchling for all of them, then what they ask for: pip must not look for one of them in an index.
# Without a C++ compiler, the ziglang wheel is one.
$(VENV)/.members: $(BIN)/python constraints.txt $(MEMBERS:%=%/pyproject.toml)
	$(PIP) --upgrade pip hatchling editables
	env -u PIP_BUILD_CONSTRAINT $(PIP) --no-build-isolation --no-deps $(MEMBERS:%=-e ./%)
	$(PIP) $(notdir $(MEMBERS))
	@command -v $${CXX:-g++} >/dev/null || command -v clang++ >/dev/null || $(PIP) ziglang
	@touch $@

$(VENV)/.tools: $(VENV)/.members pyproject.toml
	$(PIP) --no-compile --group dev --group clients 'atlas_core[otel,test]'
	@touch $@

# Beside the environment, since npm wants its package.json where it installs.
$(VENV)/.clients: $(VENV)/.tools tests/clients/package.json
	@mkdir -p $(VENV)/clients && cp tests/clients/package.json $(VENV)/clients/
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --no-package-lock --prefix $(VENV)/clients
	@touch $@

$(VENV)/.fuzz: $(VENV)/.tools
	$(PIP) --group fuzz
	@touch $@
