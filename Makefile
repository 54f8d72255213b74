# Needs only Python >= 3.11, make and git: every target makes .venv itself and installs into it what it needs.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf, ...) pass through; they choose, among other
# things, between torch's CPU and CUDA builds.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
LAYOUTS := .venv-layouts
FRAMEWORKS := .venv-frameworks
SINKS := .venv-sinks
DOCS := $(VENV)/.docs
FUZZ ?= -max_total_time=600
BROWSER ?= slow and not thorough
TORCH ?=


# The first interpreter that is new enough; PYTHON=/path/to/python overrides.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if "$$p" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; exit; fi; done)

# Where it is set, each process of the tests compiles every module anew: a second of each, and twenty of each run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test thorough browser fuzz gpu-check bench bench-diagnosis bench-recommend bench-alerts peers layouts scalers sinks versions docs docs-linkcheck lint format types clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(STAMP)  ## Diagnose sick training runs, and watch one (no GPU, no download of data)
	$(BIN)/python fixtures/demo/run_demo.py

test: $(STAMP)  ## Run the tests, without the slow ones
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

thorough: $(STAMP)  ## Run all slow tests, those too that .ci/run leaves out (before a release)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow --ignore=tests/browser
	$(MAKE) browser BROWSER=thorough

browser: $(STAMP)  ## Click through the HTML report in headless Chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		if [ "$(CI)" = true ]; then apt-get update -qq && apt-get install -qq -y chromium; \
		else echo "no Chromium here; on Debian: apt-get install chromium" >&2; exit 1; fi
	AMPDOCTOR_BROWSER=required $(BIN)/python -m pytest -n 2 -m "$(BROWSER)" tests/browser

fuzz: $(STAMP)  ## Fuzz the parsers of checkpoints (FUZZ="-max_total_time=3600" for an hour; files in .fuzz)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/security/fuzz/make_seeds.py .fuzz/seeds
	@mkdir -p .fuzz/corpus
	$(BIN)/python tests/security/fuzz/fuzz_readers.py $(FUZZ) -max_len=16384 -artifact_prefix=.fuzz/ .fuzz/corpus .fuzz/seeds

gpu-check: $(if $(GPU_PYTHON),,$(STAMP))  ## Hold the emulation against a CUDA device (GPU_PYTHON=python3: its torch; GPU_CHECK: options)
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu_check $(GPU_CHECK)

bench: $(STAMP)  ## Measure speed, as ratios against what a user would write instead
	$(BIN)/python benchmarks/run.py

bench-diagnosis: $(STAMP)  ## Compare who names the culprit, over the labelled corpus (others than ampdoctor: make peers)
	$(BIN)/python benchmarks/diagnosis.py

bench-recommend: $(STAMP)  ## Train ten small runs with torch's default scaler and with the recommended one (an hour)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/recommend.py

bench-alerts: $(STAMP)  ## Train small runs that end in harm and healthy ones, and count which rules alarm in time (hours; ALERTS="--seed 7" draws anew)
	$(BIN)/python benchmarks/alerts.py --collect --judge $(ALERTS)

peers: $(PEERS)/.installed  ## Make .venv-peers with the tools that the benchmarks compare with

layouts: $(LAYOUTS)/.installed  ## Make the checkpoints of fixtures/checkpoints anew, with the libraries that people save with
	$(LAYOUTS)/bin/python fixtures/checkpoints/make_all.py

scalers: $(FRAMEWORKS)/.installed  ## Run the tests beside the real frameworks: scalers, loops, and the pages about them
	$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist worksteal -m "not thorough" \
		$(addprefix tests/scaling/,test_real_scalers.py test_emit_frameworks.py test_rules.py) \
		tests/batching/test_emitting.py tests/loops/frameworks tests/replay/frameworks \
		$(addprefix tests/replay/bundles/,test_libraries.py test_nothing_is_fetched.py) \
		tests/replay/positioning tests/precision/fake_gpu/test_heard_by_libraries.py tests/docs/test_pages.py \
		-k "not test_pages or hf-trainer or lightning or accelerate or peft or trl"

sinks: $(SINKS)/.installed  ## Run the tests of --export beside the real libraries and promtool (Debian: apt-get install prometheus)
	@command -v promtool >/dev/null || if [ "$(CI)" = true ]; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus; \
		else echo "no promtool here; on Debian: apt-get install prometheus" >&2; exit 1; fi
	AMPDOCTOR_SINKS=required $(SINKS)/bin/python -m pytest -n 2 --dist worksteal tests/health/sinks tests/docs/test_prometheus.py

versions: $(STAMP)  ## Run ampdoctor on torch 2.6 to the newest, and write the table in benchmarks/README.md (an hour; 6 GB at a time)
	$(BIN)/python benchmarks/versions.py $(TORCH)

docs: $(DOCS)  ## Build the documentation as a site in build/docs, and check its links
	rm -rf build/docs
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs build/docs
	$(BIN)/python docs/check_links.py build/docs

docs-linkcheck: $(DOCS)  ## Ask the network about the documentation's links to other sites
	$(BIN)/python -m sphinx -q -b linkcheck docs build/linkcheck

lint: $(STAMP)  ## Check style and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP)  ## Format the code
	$(BIN)/python -m ruff format .

types: $(STAMP)  ## Check types (mypy, strict)
	$(BIN)/python -m mypy

clean:  ## Remove .venv, .venv-peers, .venv-layouts, .venv-frameworks, .venv-sinks, .venv-versions and every cache
	rm -rf $(VENV) $(PEERS) $(LAYOUTS) $(FRAMEWORKS) $(SINKS) .venv-versions build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an install that was cut short starts again. A .venv whose interpreter has gone is made anew.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ampdoctor needs Python 3.11 or newer, and none was found; name one with make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || { \
		echo "ampdoctor needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" -V 2>&1)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		v=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "$(PYTHON) cannot make a virtual environment: it lacks ensurepip. On Debian or Ubuntu: apt-get install python$$v-venv" >&2; exit 1; }
	@"$(BIN)/python" -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

# Beside what is there: Sphinx is light, and autodoc has to import ampdoctor and so torch.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# An environment of their own: none of the peers is needed by, or may change, what the project itself is tested with.
$(PEERS)/.installed: benchmarks/peers.txt benchmarks/peers/fetch_fairseq.py constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -r benchmarks/peers.txt
	$(PEERS)/bin/python benchmarks/peers/fetch_fairseq.py nan_detector.py
	@touch $@

# DS_BUILD_OPS=0: DeepSpeed without its compiled kernels, which nothing here calls.
$(LAYOUTS)/.installed: fixtures/checkpoints/requirements.txt constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(LAYOUTS)
	DS_BUILD_OPS=0 $(LAYOUTS)/bin/python -m pip install --quiet -c constraints.txt -r fixtures/checkpoints/requirements.txt
	@touch $@

$(FRAMEWORKS)/.installed: tests/scaling/frameworks.txt pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(FRAMEWORKS)
	DS_BUILD_OPS=0 $(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt -r tests/scaling/frameworks.txt -e '.[test]'
	@touch $@

# Beside .venv, whose packages it sees: fifty more, which transformers and others would find there and behave differently for.
$(SINKS)/.installed: pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(SINKS)
	$(BIN)/python -c 'import site, subprocess; there = subprocess.check_output(["$(SINKS)/bin/python", "-c", \
		"import site; print(site.getsitepackages()[0])"], text=True).strip(); \
		open(there + "/beside.pth", "w").write(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")'
	$(SINKS)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,sinks]'
	@touch $@
