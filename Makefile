# Everything below needs Python (3.10+) and make, nothing else: each target makes its own environment.
PYTHON ?= python3
TORCH ?= 2.13.0
NPROC ?= 2
VENV := .venv-$(TORCH)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
# Stores look up the names of hosts, which waits for 5 s where no server answers.
export RES_OPTIONS ?= timeout:1 attempts:3

DOCS_STAMP := $(VENV)/.docs
CLIENTS_VENV := .venv-clients-$(TORCH)
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
PEERS_VENV := .venv-peers-$(TORCH)
PEERS_STAMP := $(PEERS_VENV)/.installed

.PHONY: help train train-check quick test test-full test-clients test-pool lint bench bench-peers faults soak torch-gaps gpu-check dist docs docs-serve drawings clean

help:
	@echo "make train        train a language model, sharded over $(NPROC) processes"
	@echo "make train-check  the same training against an unsharded reference, loss by loss"
	@echo "make quick        what a change of the core breaks first, within a minute"
	@echo "make test         lint, types and the test suite, six minutes on two cores (TORCH=2.15.0 for another torch)"
	@echo "make test-full    the suite with its slow part, then the tests of arithmetic on each vector width of this processor"
	@echo "                  PART=3/10: a fixed tenth of what make test leaves out"
	@echo "make test-clients other people's programs (Accelerate, Lightning, torchtitan, ...) run on fsdp2"
	@echo "make test-pool    the tests on gloo ranks with memory for communication that stays, whatever they set up"
	@echo "make bench        host time, calls, copies, collectives, memory, optimizers, checkpoints beside torch's fully_shard"
	@echo "make bench-peers  whole steps beside DDP, FSDP1, SimpleFSDP, DeepSpeed and Megatron-FSDP, where they run here"
	@echo "make faults       ranks that diverge, stop or die, under both implementations, and exceptions at every line"
	@echo "make soak         a thousand drawn programs in which ranks diverge: each time all is right, or named"
	@echo "make torch-gaps   record in docs/beyond.md what torch's own fully_shard does where users want more of it, and ours"
	@echo "make dist         the wheel and the source distribution, in dist/"
	@echo "make docs         the site, in site/: strict, so a broken link or an undocumented name is an error"
	@echo "make docs-serve   the site on a port of this machine, built anew when a page changes"
	@echo "make drawings     the pictures of the docs, from the engine's own plans"
	@echo "make gpu-check    what only GPUs can show, with PYTHON, in nine minutes; a report to send"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,examples]" "torch==$(TORCH)"
	@touch $@

train: $(STAMP)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train_lm.py $(ARGS)

train-check: $(STAMP)
	$(BIN)/python examples/train_check.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: $(STAMP)
	$(BIN)/python -m tests.quick $(ARGS)

test: lint
	$(BIN)/python -m tests -m "not full" $(ARGS)

ifdef PART
test-full: $(DOCS_STAMP)
	$(BIN)/python -m tests -m full --part $(PART) $(ARGS)
else
test-full: lint $(DOCS_STAMP)
	$(BIN)/python -m tests $(ARGS)
	$(BIN)/python -m tests.arithmetic $(ARGS)
endif

test-pool: $(STAMP)
	FSDP2_TEST_POOL=1 $(BIN)/python -m pytest -m "not full" tests/multi_rank tests/parity $(ARGS)

$(CLIENTS_STAMP): pyproject.toml tests/clients/without_dependencies.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" numpy
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,clients]" "torch==$(TORCH)"
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/without_dependencies.txt
	@touch $@

test-clients: $(CLIENTS_STAMP)
	$(CLIENTS_VENV)/bin/python -m pytest tests/clients tests/programs/test_safetensors.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks --impl torch,torch-own-mesh,fsdp2,fsdp2-own-mesh
	$(BIN)/python -m benchmarks.optimizers
	$(BIN)/python -m benchmarks.programs
	$(BIN)/python -m benchmarks.micro
	$(BIN)/python -m benchmarks.first_step
	$(BIN)/python -m benchmarks.fsdp1
	$(BIN)/python -m benchmarks.state
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.compile
	$(BIN)/python -m benchmarks.scaling --columns 1,4

# DeepSpeed compiles nothing when it is installed; what it needs on CPU, it compiles when it is imported.
$(PEERS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" numpy
	DS_BUILD_OPS=0 $(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[bench-peers]" "torch==$(TORCH)"
	@touch $@

bench-peers: $(PEERS_STAMP)
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(ARGS)

faults: $(STAMP)
	$(BIN)/python -m extras.faults $(ARGS)
	$(BIN)/python -m pytest -m full tests/multi_rank/failures/test_every_line.py

soak: $(STAMP)
	$(BIN)/python -m extras.faults.drawn $(ARGS)

torch-gaps: $(STAMP)
	$(BIN)/python -m extras.torch_gaps $(ARGS)
	$(BIN)/python -m extras.torch_gaps --implementation fsdp2 $(ARGS)

# No environment: a machine with GPUs has a torch of its own, and often no network.
gpu-check:
	$(PYTHON) -m extras.gpu_check $(ARGS)

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" "torch==$(TORCH)"
	@touch $@

# Only the site's own packages change here: what mkdocs says of its own future is none of the reader's business.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

drawings: $(STAMP)
	$(BIN)/python docs/drawings/draw.py

clean:
	rm -rf .venv-* runs dist build site .pytest_cache .mypy_cache .ruff_cache
