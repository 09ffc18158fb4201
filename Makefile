# The verbs. `make` alone lists them, from the comments beside the targets, in the order of this file.
# Every verb does its own set-up; all that is needed beforehand is make and Python >= 3.11.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

START := $(shell date +%s)
elapsed = $$(( $$(date +%s) - $(START) )) s

VENV := .venv
BIN := $(VENV)/bin
KDTR := $(BIN)/kdtr
# Not `python -m pytest`: that would put the folders on sys.path, and `import contract` would work.
PYTEST := $(BIN)/pytest
RUFF := $(BIN)/ruff
WORKERS ?= auto
# The CuPy of the GPU verbs: 12x or 13x, whichever the driver serves. Two of them in one environment
# break each other, so the GPU verbs have one of their own.
CUDA ?= 12x
IN_GPU_VENV = $(MAKE) --no-print-directory VENV=.venv-gpu-$(CUDA)

TINY := build/golden/tiny.kdtr
# What records a bundle. A change of the report or of another verb does not.
RECORDERS := case cases_file corpus* tiny_corpus seed_model bundle* golden golden_cli \
  golden_corpus golden_margins golden_plant
TINY_SOURCES := contract/RULES.md \
  $(shell find contract reference kdtr_format -name '*.py' 2>/dev/null) \
  $(wildcard $(RECORDERS:%=conformance/%.py))
RECORD_TINY = $(KDTR) golden --tiny --out $(TINY)
CORPUS := conformance/corpus
RUN_GATE = $(KDTR) gate --engine host $(CORPUS)/*.kdtr $(TINY)

# Engines of others, each in an environment of its own (docs/adapters.md).
HF_GATE = $(KDTR) gate --engine hf --expectations adapters/hf-expectations.toml
LLAMACPP_GATE = $(KDTR) gate --engine llamacpp
# Without these llama.cpp builds its servers and tools too, which takes three times as long.
LLAMA_CMAKE = $(foreach part,LLAVA_BUILD GGML_NATIVE LLAMA_BUILD_COMMON LLAMA_BUILD_TOOLS \
  LLAMA_BUILD_SERVER LLAMA_BUILD_APP,-D$(part)=OFF)
TEST_ADAPTERS = $(PYTEST) -o addopts=--import-mode=importlib -rs tests/adapters

.PHONY: _gate-gpu _bench-gpu _peer-cpp _peer-hf _run-hf _peer-llamacpp _run-llamacpp
.PHONY: help setup kernels gate-gpu bench-gpu gate peers test bench calibrate campaign golden golden-check mutants quick-corpus properties lint types format dist clean

help: ## list the verbs
	@echo "kdtr: a conformance suite for tree-speculative decoding with Multi-head Latent Attention"
	@echo
	@awk -F ': .*## |:## ' '/^[a-z-]+: .*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make test ARGS="-k tree"           more arguments for the tool behind the verb'
	@echo '  make gate PYTHON=/path/to/python   another Python than the first one that fits'

gate: $(VENV)/ready-runtime $(TINY) ## the main job: judge the host engine against the golden bundles
	$(RUN_GATE) $(ARGS)
	@echo "make gate: passed, $(elapsed) in all"

peers: $(VENV)/ready-test $(TINY) ## judge C++, transformers, llama.cpp; took 24.5 minutes on 2 busy cores
	@$(MAKE) --no-print-directory _peer-cpp
	@$(MAKE) --no-print-directory _peer-hf
	@$(MAKE) --no-print-directory _peer-llamacpp
	@echo "make peers: passed, $(elapsed) in all"

_peer-cpp: $(VENV)/ready-test $(TINY)
	KDTR_PEERS=1 $(PYTEST) -rsP tests/conformance/test_cpp_engine.py \
	  tests/test_your_engine_guide.py $(ARGS)
	@echo "cpp: passed, $(elapsed) in all"

_peer-hf:
	@$(MAKE) --no-print-directory VENV=.venv-hf _run-hf

_run-hf: $(VENV)/ready-hf $(TINY)
	$(HF_GATE) $(CORPUS)/*.kdtr $(TINY)
	$(HF_GATE) --engine-option dtype=bfloat16 $(CORPUS)/*.kdtr $(TINY)
	$(TEST_ADAPTERS)
	@echo "hf: passed, $(elapsed) in all"

_peer-llamacpp: export CMAKE_ARGS = $(LLAMA_CMAKE)
_peer-llamacpp:
	@$(MAKE) --no-print-directory VENV=.venv-llamacpp _run-llamacpp

_run-llamacpp: $(VENV)/ready-llamacpp $(TINY)
	$(LLAMACPP_GATE) $(CORPUS)/*.kdtr $(TINY)
	$(LLAMACPP_GATE) --engine-option cache=float16 $(CORPUS)/*.kdtr $(TINY)
	$(TEST_ADAPTERS)
	@echo "llamacpp: passed, $(elapsed) in all"

# Without bytecode each of the processes that the tests start compiles some hundred modules anew.
test: $(VENV)/ready-test ## run the tests, the laws in brief, and the doctests
	PYTHONDONTWRITEBYTECODE= KDTR_HYPOTHESIS_PROFILE=brief $(PYTEST) -rs -n $(WORKERS) --dist loadfile $(ARGS)

properties: $(VENV)/ready-test ## run the laws alone, on every engine that ships here (profile ci)
	KDTR_HYPOTHESIS_PROFILE=ci $(PYTEST) property_tests -n $(WORKERS) --dist worksteal $(ARGS)
	@echo "make properties: passed, $(elapsed) in all"

campaign: $(VENV)/ready-test ## run 2,000 examples of the laws over processes; ARGS="--cases N" for more
	$(KDTR) campaign --engine host --engine-option page_size=3 --engine-option split_size=5 \
	  --twin-option page_size=2 --cases 2000 --out build/campaign $(ARGS)

kernels: $(VENV)/ready-test ## compile the CUDA kernels for sm_90, sm_100, sm_120; registers, spills
	$(BIN)/python -m kdtr.engine.cuda_compile

gate-gpu: ## judge the CUDA engine on the GPU of this machine; CUDA=13x for CUDA 13
	@$(IN_GPU_VENV) _gate-gpu

_gate-gpu: $(VENV)/ready-gpu $(TINY)
	$(BIN)/python benchmarks/kernels/gate.py --out benchmarks/results/gate-gpu.md $(TINY) $(ARGS)

bench-gpu: ## time the CUDA kernels and rounds, beside torch if it is installed; CUDA=13x likewise
	@$(IN_GPU_VENV) _bench-gpu

_bench-gpu: $(VENV)/ready-gpu
	$(BIN)/python benchmarks/kernels/verify_attn.py --time --peers --table benchmarks/results/verify-attn-gpu.md
	$(BIN)/python benchmarks/kernels/linear.py --time --table benchmarks/results/linear-gpu.md
	$(BIN)/python benchmarks/kernels/rounds.py --out benchmarks/results/rounds-gpu.md

bench: $(VENV)/ready-test $(TINY) ## measure reading, judging, campaigns; tables in benchmarks/results
	$(PYTEST) benchmarks --benchmark-enable --benchmark-only $(ARGS)
	$(BIN)/python benchmarks/judging.py --out benchmarks/results/judging.md
	$(BIN)/python benchmarks/bundle_reading.py --out benchmarks/results/bundle-reading.md
	$(BIN)/python benchmarks/campaign.py --out benchmarks/results/campaign.md

calibrate: $(VENV)/ready-test ## 20,000 rounds of honest engines, and planted faults: half an hour
	$(BIN)/python benchmarks/calibration.py --out benchmarks/results/calibration.md $(ARGS)

golden: $(VENV)/ready-runtime ## record the golden bundles anew: the corpus, and tiny in build/
	$(KDTR) golden --corpus --out $(CORPUS)
	$(RECORD_TINY)

golden-check: $(VENV)/ready-runtime ## record the corpus anew in many environments, compare bytes
	$(KDTR) golden-check $(CORPUS)

mutants: $(VENV)/ready-runtime $(TINY) ## plant real faults one by one, and their families; writes docs
	$(KDTR) mutants $(TINY) $(CORPUS)/*.kdtr --out docs/kill-matrix.md \
	  --families-out docs/mutant-families.md $(ARGS)
	@echo "make mutants: the list is killed, what lives of the families is explained, $(elapsed) in all"

quick-corpus: $(VENV)/ready-runtime ## choose the cases of kdtr gate --quick anew: half an hour
	$(KDTR) mutants $(CORPUS)/*.kdtr --quick-out conformance/quick_corpus.json $(ARGS)

lint: $(VENV)/ready-dev ## check style and format with ruff
	$(RUFF) check . $(ARGS)
	$(RUFF) format --check .

types: $(VENV)/ready-dev ## check types with mypy
	$(BIN)/mypy $(ARGS)

format: $(VENV)/ready-dev ## format, and mend what ruff can mend
	$(RUFF) check --fix --exit-zero .
	$(RUFF) format .

dist: $(VENV)/ready-dev ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --quiet $(ARGS)
	@ls dist/*

setup: $(VENV)/ready-dev ## install everything for development into .venv

clean: ## remove what was built, and caches; .venv stays
	rm -rf build dist kdtr.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(TINY): $(TINY_SOURCES) | $(VENV)/ready-runtime
	$(RECORD_TINY)

# Set-up. A stamp $(VENV)/ready-X says that kdtr is installed, editable, with the extras of X. Stamps
# and $(VENV)/origin are written last: after an interrupted set-up the next one starts afresh. One
# that another stamp of this run implied has nothing to do.
# No pip upgrade: every Python from 3.11 on brings one that knows editable installs.
STAMPS := $(addprefix $(VENV)/ready-,runtime test dev gpu hf llamacpp)
CONSTRAINTS = $(if $(filter %-hf %-llamacpp,$(VENV)),constraints-peers.txt,constraints.txt)
$(VENV)/ready-runtime: extras :=
$(VENV)/ready-test: extras := [test,compile]
$(VENV)/ready-dev: extras := [dev,compile]
$(VENV)/ready-gpu: extras := [test,cupy-cuda$(CUDA)]
$(VENV)/ready-hf: extras := [hf,properties]
$(VENV)/ready-llamacpp: extras := [llamacpp,properties]
$(VENV)/ready-runtime: implied := $(VENV)/ready-runtime
$(VENV)/ready-test: implied := $(VENV)/ready-runtime $(VENV)/ready-test
$(VENV)/ready-dev: implied := $(addprefix $(VENV)/ready-,runtime test dev)
$(VENV)/ready-gpu: implied := $(addprefix $(VENV)/ready-,runtime test gpu)
$(VENV)/ready-hf: implied := $(addprefix $(VENV)/ready-,runtime hf)
$(VENV)/ready-llamacpp: implied := $(addprefix $(VENV)/ready-,runtime llamacpp)

# A venv holds absolute paths: in a copied or moved checkout it would run the code of the old place.
# So $(VENV)/origin names the checkout and its Python. If another is asked for now, start afresh,
# but not before it is known to fit: a name with a slip of the pen must not cost a good set-up.
define origin_fits
origin_fits() { \
  [ -x $(BIN)/python ] && [ -f $(VENV)/origin ] || return 1; \
  { read -r checkout; read -r python; } < $(VENV)/origin; \
  [ "$$checkout" = "$(CURDIR)" ] && [ "$$python" = "$(or $(PYTHON),$$python)" ]; \
};
endef
ifneq ($(shell $(origin_fits) origin_fits && echo yes),yes)
$(STAMPS): FORCE
endif
.PHONY: FORCE
FORCE:

$(STAMPS): pyproject.toml $(CONSTRAINTS)
	@$(origin_fits) $(find_python) \
	if origin_fits && [ $@ -nt pyproject.toml ] && [ $@ -nt $(CONSTRAINTS) ]; then \
	  exit 0; \
	fi; \
	start=$$(date +%s); \
	if ! origin_fits; then \
	  find_python || exit 1; \
	  echo "Setting up $(VENV) with $$python ($$version)"; \
	  rm -rf $(VENV) && "$$python" -m venv $(VENV) || exit 1; \
	fi; \
	rm -f $(VENV)/origin; \
	echo "Installing kdtr$(extras) with the versions of $(CONSTRAINTS)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --constraint $(CONSTRAINTS) --editable '.$(extras)' || exit 1; \
	printf '%s\n' "$(CURDIR)" "$$python" > $(VENV)/origin; \
	touch $(implied); \
	echo "Set-up took $$(( $$(date +%s) - start )) s"

# Sets $python and $version to the first Python that fits, or says what was found instead.
PYTHON_NAMES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python)
define find_python
find_python() { \
  found=; \
  for python in $(PYTHON_NAMES); do \
    if ! command -v "$$python" > /dev/null; then answer="not found"; \
    else answer=$$("$$python" -c '$(probe)' 2> /dev/null) || answer="does not start"; fi; \
    case $$answer in \
      "fits "*) version=$${answer#fits }; return 0 ;; \
      "not found") [ -z "$(PYTHON)" ] && continue ;; \
    esac; \
    found="$$found  $$python: $$answer\n"; \
  done; \
  { echo "kdtr needs Python 3.11 or newer, with its modules venv and ensurepip. Found:"; \
    printf "$${found:-  no Python on PATH\n}"; \
    echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv),"; \
    echo "or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; } >&2; \
  return 1; \
};
endef
# Runs on any Python since 2.7, to learn that it is too old.
define probe
import sys; v = sys.version_info[:3]; \
lacks = v >= (3, 11) and [m for m in ("venv", "ensurepip") \
  if not __import__("importlib.util").util.find_spec(m)]; \
print("too old, version %d.%d.%d" % v if v < (3, 11) else \
  "version %d.%d.%d without %s" % (v + (" and ".join(lacks),)) if lacks else \
  "fits %d.%d.%d" % v)
endef
