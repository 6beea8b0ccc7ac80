# Targets for people and for CI; `make help` lists them. Needs GNU make, a POSIX shell and Python 3.10 or later.
#
# Which Python: PYTHON= if given, else the active environment's or python3 if it has torch (nothing is installed
# there), else .venv, created once from BASE= (python3) with the versions in constraints.txt.

SHELL = /bin/sh
BASE ?= python3
VENV = .venv
HAS_TORCH = -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'

ifneq (,$(filter-out help clean,$(MAKECMDGOALS)))
ifneq (,$(PYTHON))
PY := $(PYTHON)
else
PY := $(shell for python in "$$VIRTUAL_ENV/bin/python" "$$CONDA_PREFIX/bin/python" "$$(command -v python3)"; do \
	[ -x "$$python" ] && "$$python" $(HAS_TORCH) 2>/dev/null && { echo "$$python"; break; }; done)
endif
ifneq (,$(or $(if $(PY),,none),$(findstring $(CURDIR)/$(VENV)/,$(PY))))
PY := $(VENV)/bin/python
READY := $(VENV)/ready
else
READY := given
endif
endif

RUN = "$(PY)" -m sdpa_repro
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help demo capture test test-fast lint bench calibrate gpu-check install clean given
.DEFAULT_GOAL = help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON= a Python that has torch; capture takes MODEL IMAGE PROMPT INPUT PAD TOTAL_LENGTH"
	@echo "PADDING_SIDE DTYPE DEVICE LAYERS RANDOM_WEIGHTS OUT, and ARGS for any other option."

demo: $(READY) ## the embedded tiny model with a known fault, end to end; succeeds when the fault is found
	@$(RUN) diagnose --demo

# Each variable reaches the command as one word, unchanged: through the environment, not through make's or the
# shell's text, so that quotes, spaces and dollar signs in a prompt are safe.
VALUES = MODEL:model IMAGE:image PROMPT:prompt INPUT:input PAD:pad TOTAL_LENGTH:total-length \
	PADDING_SIDE:padding-side DTYPE:dtype DEVICE:device LAYERS:layers OUT:out
name = $(word 1,$(subst :, ,$(1)))
flag = --$(word 2,$(subst :, ,$(1)))
$(foreach pair,$(VALUES),$(eval export CAPTURE_$(call name,$(pair)) := $$(value $(call name,$(pair)))))
unexport $(foreach pair,$(VALUES),$(call name,$(pair)))

capture: $(READY) ## capture one prefill of MODEL= (none: the embedded model) and dump the calls that go wrong
	@set --; \
	$(foreach pair,$(VALUES),[ -z "$$CAPTURE_$(call name,$(pair))" ] || \
		set -- "$$@" $(call flag,$(pair)) "$$CAPTURE_$(call name,$(pair))";) \
	case "$(RANDOM_WEIGHTS)" in ''|0|no|false) ;; *) set -- "$$@" --random-weights ;; esac; \
	$(RUN) capture "$$@" $(ARGS); status=$$?; \
	case $$status in \
		0) echo "make capture: status 0, no call diverged" >&2 ;; \
		1) echo "make capture: status 1, a call diverged (that is a finding, not a failure)" >&2 ;; \
		*) exit $$status ;; \
	esac

# One test process a core where pytest-xdist is installed, each with one thread.
PYTEST = OMP_NUM_THREADS=1 "$(PY)" -m pytest -q \
	$(shell "$(PY)" -c 'import os, xdist; print("-n", min(8, os.cpu_count() or 1))' 2>/dev/null)

test: lint ## lint, type-check and run every test
	@$(PYTEST) $(PYTEST_ARGS)

test-fast: $(READY) ## the tests that take no more than seconds
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy --strict
	@"$(PY)" -c 'import importlib.util as u, sys; \
		missing = [name for name in ("ruff", "mypy", "pytest", "rich", "hypothesis") if u.find_spec(name) is None]; \
		sys.exit("error: missing here: pip install " + " ".join(missing) if missing else 0)'
	@"$(PY)" -m ruff check .
	@"$(PY)" -m ruff format --check .
	@"$(PY)" -m mypy --strict sdpa_repro tests/gpu

bench: $(READY) ## measure the costs named in docs/bench.md and write it
	@"$(PY)" -m tests.bench $(ARGS)

calibrate: $(READY) ## check the threshold on thousands of healthy calls and write docs/calibration.md
	@"$(PY)" -m tests.calibrate $(ARGS)

gpu-check: $(READY) ## on a machine with CUDA: the GPU tests, the demo, the sample; ends with a table
	@"$(PY)" -m tests.gpu.check $(ARGS)

install: $(READY) ## put the command sdpa-repro into the Python that is used, without its dependencies
	@"$(PY)" -m pip install --no-deps --no-build-isolation -e .

clean: ## remove what make created, .venv included; dumps stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find sdpa_repro tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that has torch: nothing is installed, what is missing is named.
given:
	@"$(PY)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or later is needed, PYTHON is " + sys.version.split()[0])'
	@"$(PY)" -c 'import importlib.util as u, sys; \
		needs = {"torch": "torch", "transformers": "transformers>=5.13", "click": "click>=8.1", "numpy": "numpy"}; \
		missing = [needs[name] for name in needs if u.find_spec(name) is None]; \
		sys.exit("error: " + sys.executable + " lacks: pip install " + " ".join(map(repr, missing)) if missing else 0)'

$(VENV)/ready: setup.cfg constraints.txt
	@"$(BASE)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $(BASE) is not Python 3.10 or later; name one: make $(MAKECMDGOALS) BASE=/path/to/python3.12" >&2; exit 2; }
	@echo "creating $(VENV) (once; torch is a large download where it is not cached)" >&2
	@"$(BASE)" -m venv $(VENV) || { \
		echo "error: $(BASE) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,models]' || { \
		echo "error: installing the requirements failed (see above); run make again to go on" >&2; exit 2; }
	@touch $@
