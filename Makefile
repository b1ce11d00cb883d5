# Every target needs Python 3.11 or newer, make and gcc, and nothing installed before: `.venv` is made on the first call.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# For `make vllm` alone.
VLLM := .venv-vllm

# Set to pass more to pytest: make test PYTEST='-k prefix'
PYTEST ?=
# Hypothesis examples of `make campaign`, over all machines.
EXAMPLES ?= 100000
# Names of the faults that `make faults` tries, and options; all of them if none is named.
FAULTS ?=
# Flags of `make sanitize`, behind the usual ones.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -g -O1
# Requests of `make served`.
REQUESTS ?= 10000
# Wheels that `make gpu` installs for itself, and the Python that they are for.
WHEELS ?= build/wheels
WHEELS_PYTHON ?= 3.12
# Options of `make gpu`: `--device cpu --small` runs its parts on a stand-in.
GPU ?=
# Rounds of `make disk`.
KILLS ?= 1000
# Random worlds of `make pressure`.
WORLDS ?= 1000

.DEFAULT_GOAL := help
.PHONY: help install demo test lint check docs wheel format bench served campaign pressure architectures sanitize processors soak disk faults mutants signals vllm dynamo ray gpu wheels clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(STAMP) ## build .venv with everything that the other targets use

# An interrupted install leaves no stamp, so the next call begins again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "paged needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "building $(VENV): a few minutes, 2.6 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,engine,gpu,testing,dev]'
	@touch $@
	@echo "done; \`source $(BIN)/activate\` puts its python and paged on your path"

demo: $(STAMP) ## watch a model answer a real service's requests on a memory far too small for them
	@$(BIN)/paged demo

# Tests start some hundred programs of ours: none of them is to compile the sources anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## run every test, on all cores
	@$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST)

lint: $(STAMP) ## check format, habits, types and who imports whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# The rooms alone: no model, no server, no program of ours is started.
check: lint ## the inner loop of a change (a minute): lint, the tests of memory, scheduler and attention, and some new examples of two machines
	@$(BIN)/python -m pytest -q -n auto --dist worksteal tests/acceptance tests/block_manager tests/scheduler tests/attention \
		tests/properties/test_found_programs.py -m "not slow" $(PYTEST)
	@$(BIN)/python -c 'from paged.testing.machines import ManagerMachine, SchedulerMachine, run_machine; \
		[run_machine(machine, few=few, steps=15) for machine, few in ((ManagerMachine, 200), (SchedulerMachine, 100))]'

docs: $(STAMP) ## build the site of all pages and an API reference in build/site; fails for a link that leads nowhere
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

wheel: $(STAMP) ## build the wheel, and use it and test it in an empty environment
	@$(BIN)/python tools/try_wheel.py

format: $(STAMP) ## rewrite the sources as `lint` wants them
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## time a scheduler step
	@$(BIN)/paged bench scheduler

served: $(STAMP) ## press a server with REQUESTS requests (10,000) on a pool far too small, and with 1,000 bodies a path that Schemathesis makes up
	@PAGED_SERVED=$(REQUESTS) PAGED_EXAMPLES=1000 $(BIN)/python -m pytest tests/serving/test_pressure.py \
		tests/serving/test_schemathesis.py --capture=no $(PYTEST)

campaign: $(STAMP) ## run the state machines of manager, scheduler (layers of several kinds, too) and engine (ours and a stand-in) for EXAMPLES examples in all (100,000; forty minutes on two cores)
	@$(BIN)/python tools/campaign.py --examples $(EXAMPLES)

pressure: $(STAMP) ## answers of models in WORLDS random worlds (1,000; ten minutes) that are short of memory, bit by bit
	@PAGED_EXAMPLES=$(WORLDS) $(BIN)/python -m pytest tests/model/test_pressure_changes_nothing.py \
		tests/model/test_late_batches_change_nothing.py $(PYTEST)

architectures: $(STAMP) ## try a small model of every family of decoders in transformers against its generate, short of memory, too (ten to twenty minutes on two cores)
	@PYTHONPATH=. $(BIN)/python -m conformance.architectures --out benchmarks/results/architectures
	@PAGED_ALL_FAMILIES=1 $(BIN)/python -m pytest tests/model/test_groups.py

sanitize: $(STAMP) ## run the native code's tests under the address and undefined-behaviour sanitizers
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so):$$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		CC=gcc PAGED_CFLAGS='$(SANITIZERS)' PAGED_CACHE=build/sanitized $(BIN)/python -m pytest --capture=no \
		-k 'native or test_packed or test_experts or test_quantised_products or test_fused or test_recurrences' tests/attention/test_backends_agree.py tests/attention/test_invariance.py \
		tests/model/test_groups.py tests/model/test_packed.py tests/model/test_experts.py tests/model/test_quantised_products.py \
		tests/model/test_fused.py tests/model/test_recurrences.py $(PYTEST)

# Flags that take instructions away, one set a line of `make processors`: AVX2, without dot products of bytes, too, without fused additions;
# SSE; AVX-512 without matrix units (AMX), without bfloat16, too, and without dot products of bytes.
PROCESSORS := -mno-avx512f -mno-avx512f,-mno-avxvnni -mno-avx512f,-mno-fma -mno-avx -mno-amx-tile -mno-amx-tile,-mno-avx512bf16 \
	-mno-avx512vnni

processors: $(STAMP) ## run the native code's tests as processors with fewer instructions would (x86-64, a minute)
	@for flags in $(PROCESSORS); do echo "without: $$flags"; \
		PAGED_CFLAGS="$$(echo $$flags | tr , ' ')" PAGED_CACHE=build/processors $(BIN)/python -m pytest -q \
		-k 'native or test_packed or test_experts or test_quantised_products or test_fused or test_recurrences' tests/attention/test_backends_agree.py tests/attention/test_invariance.py \
		tests/model/test_packed.py tests/model/test_experts.py tests/model/test_quantised_products.py \
		tests/model/test_fused.py tests/model/test_recurrences.py $(PYTEST) || exit 1; done

soak: $(STAMP) ## 10,000 random requests with aborts and cancels on a tiny pool
	@PAGED_FAILURES=failures PAGED_SOAK=10000 $(BIN)/python -m pytest -m soak $(PYTEST)

disk: $(STAMP) ## kill a process that uses a disk cache KILLS times (1,000), and spoil as many objects: no wrong byte, nothing lost that was written (ten minutes)
	@$(BIN)/python tools/kill_disk.py --kills $(KILLS) --corruptions $(KILLS) --out benchmarks/results/disk.md

faults: $(STAMP) ## plant each fault of tests/faults in a copy of the sources, and see that the kit finds it (a quarter of an hour on two cores)
	@$(BIN)/python tools/try_faults.py $(FAULTS)

mutants: $(STAMP) ## change the memory layer and the scheduler in 300 small ways, and see which changes no test notices (an hour on two cores)
	@$(BIN)/python tools/mutants.py --out benchmarks/results/mutants

signals: $(STAMP) ## interrupt each command a hundred times at random moments, and see that it is gone at once (half an hour)
	@$(BIN)/python tools/try_signals.py

vllm: $(VLLM)/.installed ## build an environment with vLLM's CPU build, and test our scheduler in it (ten minutes after the install)
	@PYTHONPATH=. $(VLLM)/bin/python -m pytest -c conformance/vllm/pytest.ini --rootdir . tests/integrations conformance/vllm $(PYTEST)
	@$(VLLM)/bin/python -m conformance.vllm.scheduler_tests

# vLLM's CPU build asks for torch's own +cpu build and for packages that a text model has no use for: torch first, then what its wheel
# lists without those, then the wheel alone.
$(VLLM)/.installed: conformance/vllm/install.py
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python conformance/vllm/install.py
	@touch $@

ray: $(STAMP) ## install Ray Serve into build/ray, and ask, press and kill replicas of a running server (two minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/ray 'ray[serve]==2.60.0'
	@PYTHONPATH="$(CURDIR):build/ray" $(BIN)/python -m pytest tests/serving/test_replicas.py $(PYTEST)

# With the Python, torch, Triton and transformers that are there: a machine with a GPU may reach no index of packages.
gpu: ## on a machine with CUDA: what only a GPU can show, into benchmarks/results/gpu.md (under eight minutes; installs WHEELS, and nothing else)
	@if test -d $(WHEELS); then $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl; fi
	@PYTHONPATH="$(CURDIR):build/gpu" $(PYTHON) benchmarks/on_gpu.py $(GPU)

wheels: $(STAMP) ## fetch the wheels for `make gpu` into WHEELS, for Python WHEELS_PYTHON (3.12) on Linux, x86-64
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(WHEELS_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(WHEELS) msgspec xformers transformers==5.23.0

dynamo: $(STAMP) ## install Dynamo's runtime into build/dynamo, and see that its index finds the blocks of a running server
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/dynamo ai-dynamo-runtime==1.6.1
	@PYTHONPATH=build/dynamo $(BIN)/python -m pytest tests/serving/test_kv_events_dynamo.py $(PYTEST)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
