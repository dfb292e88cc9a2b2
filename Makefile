# Two commands: `make demo` trains a model on a worker process, `make test` runs every test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# lazygt with its dependencies; and with those of its tests and examples.
PRODUCT := $(VENV)/.product
STAMP   := $(VENV)/.installed
# The C++ extension, where there is a compiler or a wheel that fits; without it all works, too.
NATIVE  := $(VENV)/.native
# On two cores, since tests also wait.
JOBS   ?= 3

# Thousands of processes of the tests import lazygt: the first one compiles it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo pictures test test-native test-fast test-slow test-deep test-programs \
	test-clusters test-cuda-host lint bench clean

help:
	@echo "make demo       train on the digits data set, on one CPU worker process"
	@echo "make test       every test; those that bound how long something takes run alone, at the end"
	@echo "make test-native  the tests of recording with the recorder in C++"
	@echo "make test-deep  property tests with many more examples, and Ctrl-C a thousand times"
	@echo "make test-programs  installs other people's libraries and compares their programs with eager"
	@echo "make test-clusters  programs on several hosts, in network namespaces (as root)"
	@echo "make test-cuda-host  the CUDA branches, without a GPU: stubs of CUDA's libraries (downloads 4 GB)"
	@echo "make pictures   the pictures of the documentation (needs Graphviz)"
	@echo "make lint       ruff and mypy"
	@echo "make bench      every benchmark, results into benchmarks/RESULTS.md"

setup: $(STAMP) $(NATIVE)

# The stamps make the second call quick: pip runs again only when the dependencies changed.
$(PRODUCT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e . -c constraints.txt
	@touch $@

$(STAMP): $(PRODUCT)
	$(BIN)/python -m pip install -e ".[dev,examples]" -c constraints.txt
	@touch $@

$(NATIVE): $(PRODUCT) $(wildcard lazygt/native/*.cpp lazygt/native/*.h lazygt/native/*.py)
	$(BIN)/lazygt build-native --if-possible
	@touch $@

# The extension takes minutes to build, and the demo runs without it: it is built afterwards, by itself.
demo: $(PRODUCT)
	$(BIN)/python examples/train_digits.py
	@$(MAKE) -q $(NATIVE) || { nohup $(MAKE) $(NATIVE) > $(VENV)/native.log 2>&1 & \
		echo "the C++ extension is built in the background, for faster runs: see $(VENV)/native.log"; }

pictures: $(PRODUCT)
	$(BIN)/lazygt viz examples/first_session.py -o docs/pictures/step.svg

PYTEST   = HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest
# By files in the order of their names: by the number of their tests, long ones would come last.
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Where tests are marked `timed`.
TIMED = tests/faults tests/transfer

# What the recorder has part in.
RECORDING = tests/record tests/property tests/models tests/native -m "not slow" $(PARALLEL)
# What `make test` runs once more with the recorder in Python, where the other one is chosen. The rest
# of RECORDING it runs in `test-deep`.
AGAIN     = tests/record tests/property -m "not slow" $(PARALLEL)
RECORDER  = $$($(BIN)/python -c "from lazygt import native; print(native.choice().recorder)")

# The seconds of the clock at the end of each pass.
PASSES = $(VENV)/.passes
PASS   = @echo $$(date +%s) $(1) >> $(PASSES)

test: $(STAMP) $(NATIVE)
	@date +%s > $(PASSES)
	$(PYTEST) -m "not timed and not clusters" $(PARALLEL)
	$(call PASS,all but timed tests)
	$(PYTEST) -m timed $(TIMED)
	$(call PASS,timed tests)
	if [ "$(RECORDER)" = native ]; then LAZYGT_RECORDER=python $(PYTEST) $(AGAIN); fi
	$(call PASS,recording in Python)
	@awk 'NR > 1 { printf "%5.1f min  %s\n", ($$1 - last) / 60, substr($$0, 12) } { last = $$1 }' $(PASSES)

test-native: $(STAMP) $(NATIVE)
	LAZYGT_RECORDER=native $(PYTEST) $(RECORDING)

test-fast: $(STAMP) $(NATIVE)
	$(PYTEST) -m "not slow and not clusters" $(PARALLEL)

test-slow: $(STAMP) $(NATIVE)
	$(PYTEST) -m "slow and not timed and not clusters" $(PARALLEL)
	$(PYTEST) -m timed $(TIMED)

test-deep: $(STAMP) $(NATIVE)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/property tests/passes tests/native tests/conformance --timeout 3600
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/faults/test_interrupts.py
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/recovery --timeout 3600
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/record/test_recorder.py tests/runtime/test_nonsense.py
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -m "deep or sampled" --timeout 3600
	LAZYGT_RECORDER=python $(PYTEST) tests/models tests/native -m "not slow" $(PARALLEL)

# Programs on several hosts: network namespaces, which only root can make; torchrun, srun, mpirun and
# Ray where they are installed.
test-clusters: $(STAMP) $(NATIVE)
	$(PYTEST) -m clusters tests/clusters tests/pool tests/runtime tests/benchmarks

# Libraries that other people wrote; their programs have to give eager torch's bits.
test-programs: $(STAMP) $(NATIVE)
	$(BIN)/python -m pip install -e ".[dev,programs]" -c constraints.txt
	$(BIN)/python -m pytest tests/conformance/programs tests/docs/test_frameworks.py

# CUDA branches on stubs of CUDA's libraries, with torch's CUDA build (===: no other) in a venv of its own;
# the last command fails where no test has entered one.
CUDA = .venv-cuda
CUDA_HOST = CUDA_HOME=$$(echo $(CURDIR)/$(CUDA)/lib/python*/site-packages/nvidia/cu13) \
	LIBRARY_PATH=$(CURDIR)/$(CUDA)/stub LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/stub LD_PRELOAD=$(CURDIR)/$(CUDA)/stub/libstub.so \
	CUDA_HOST_CONTROL=$(CURDIR)/$(CUDA)/stub/control
test-cuda-host: $(CUDA)/stamp
	$(CUDA)/bin/lazygt build-native --if-possible
	$(CUDA)/bin/python tests/cuda_host/build.py $(CUDA)/stub
	rm -rf $(CUDA)/coverage && mkdir $(CUDA)/coverage
	$(CUDA_HOST) $(CUDA)/bin/coverage run --rcfile tests/cuda_host/coverage.ini -m pytest tests/cuda_host
	$(CUDA)/bin/coverage combine --rcfile tests/cuda_host/coverage.ini --quiet
	$(CUDA)/bin/python -m tests.cuda_host.branches $(CUDA)/coverage/data

$(CUDA)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA)
	sed 's/^torch==/torch===/' constraints.txt > $(CUDA)/constraints.txt
	$(CUDA)/bin/python -m pip install -e ".[dev]" nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.3.5.0.6 coverage \
		-c $(CUDA)/constraints.txt
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BENCHMARKS := record_cost client_step step_messages training_steps data_movement small_syncs startup long_run \
	workloads worker_step peak_memory compile_cost placement planning generation \
	sharded collectives transfer transfer_sharded foresight

bench: $(STAMP) $(NATIVE)
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --save || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
