# Every command of the project; `make help` lists them. Settings, given as `make TARGET NAME=value`:
#   PYTHON       interpreter that everything is set up with (default: python3)
#   VENV         virtual environment that is made (default: .venv)
#   TORCH_INDEX  package index to take torch from instead of pip's own
#   NOVENV=1     make no environment: use PYTHON and what it can import (for a machine without a network)
#   PYTEST_ARGS  more arguments for pytest
#   TEST_WORKERS processes that share the tests (default: 2; empty: one after another, as with NOVENV, which may lack pytest-xdist)
#   GPU_WORKERS  processes that share the GPU tests (needs pytest-xdist; default: one after another)
#   GPU_PART     exclusive, service, kernels or mps: run only this part of the GPU tests (default: all)
#   GPU_AGAIN=1  run only GPU test files that have failed, or that tests/gpu/record.json does not have as they are
#   JOBS         processes that compile kernels (default: one a core)
#   SERVICE_ARGS arguments of the service bench (default: everything, about nine minutes on a GPU; --short for a look)
#   BENCH_ARGS   arguments of the kernel bench (default: all families, kinds of rows and output forms, 300 s)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
NOVENV ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= $(if $(NOVENV),,2)
GPU_WORKERS ?=
GPU_PART ?=
GPU_AGAIN ?=
JOBS ?= $(shell nproc)
BENCH_ARGS ?= --families all --kinds --forms --seconds 300
export TORCH_INDEX ?=

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
WHEEL := build/dist/topkd-$(VERSION)-py3-none-any.whl
PACKED := pyproject.toml README.md LICENSE client server kernels proto/topkd
# With folders, so that a removed file is noticed too.
SOURCES := $(shell find $(PACKED) ! -name '__pycache__' ! -name '*.pyc')
BENCH = cd build/check && $(PY) -m tests.bench.kernels --results $(CURDIR)/tests/bench/results
PIP := -m pip --disable-pip-version-check -qq
KERNELS := build/kernels
CHECKED := sm_80 sm_90a sm_100a
DOCUMENTED := topkd topkd.errors topkd.torch_ops topkd.kernels topkd.server.config
PROTO_VENV := build/venv-proto
DEPLOY_VENV := build/venv-deploy
PROTO_BIN := $(CURDIR)/$(PROTO_VENV)/bin

ifeq ($(NOVENV),)
PY := $(abspath $(VENV))/bin/python
BIN := $(abspath $(VENV))/bin/
BUILDER := $(VENV)/.made-by-make
READY := $(VENV)/.topkd-installed
WATCH_READY := $(VENV)/.watch-installed
else
PY := $(shell $(PYTHON) -c 'import sys; print(sys.executable)')
BIN :=
BUILDER :=
READY := build/site/.topkd-installed
WATCH_READY :=
override PYTHONPATH := $(CURDIR)/build/site:$(PYTHONPATH)
export PYTHONPATH
endif

# Tests and type checks run in a copy without the sources beside it, so that they see the wheel and nothing else.
define check-folder
@rm -rf build/check && mkdir -p build/check && cp -r README.md pyproject.toml deploy docs tests build/check
endef

##@ The two commands
.PHONY: demo test
demo: $(READY) ## Start a server and an engine that selects from real score rows; check every row
	@$(PY) docs/examples/demo.py

test: $(READY) ## Run the tests against the wheel
	$(check-folder)
	cd build/check && $(PY) -m pytest $(if $(TEST_WORKERS),-n $(TEST_WORKERS) --dist loadgroup) $(PYTEST_ARGS)

##@ Checks
.PHONY: lint types proto-check proto-oldest docs
lint: $(READY) ## Check style and shell scripts
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)shellcheck .ci/run .ci/setup-venv deploy/image/steps

types: $(READY) ## Check the types of the installed package and of a program that uses it
	$(check-folder)
	cd build/check && $(PY) -m mypy -p topkd && $(PY) -m mypy tests/typing/consumer.py

proto-check: $(PROTO_VENV)/.ready ## Check the protocol: style, generated code, compatibility with the last release
	$(call generate,build/proto)
	diff -r -x '*.proto' -x '*.typed' -x __init__.py -x __pycache__ build/proto/topkd proto/topkd || \
	  { echo 'proto-check: the generated code is not that of the .proto files; run make proto' >&2; exit 1; }
	$(PROTO_BIN)/buf lint proto
	$(PROTO_BIN)/buf breaking proto --against proto/released.binpb

proto-oldest: build/venv-oldest/.ready $(WHEEL) ## Test the protocol and the client's import with the oldest dependencies supported
	build/venv-oldest/bin/python $(PIP) install --no-deps --force-reinstall $(WHEEL)
	rm -rf build/check-oldest && mkdir -p build/check-oldest/tests
	cp pyproject.toml build/check-oldest && cp -r tests/__init__.py tests/proto build/check-oldest/tests
	cd build/check-oldest && ../venv-oldest/bin/python -m pytest $(PYTEST_ARGS) tests/proto

docs: $(READY) ## Build the API documentation into build/docs; check the links of the Markdown files
	$(PY) .ci/check_links.py
	@# pdoc warns of every name that is imported for type checkers only.
	rm -rf build/docs && cd build && $(PY) -W ignore -m pdoc --docformat google --output-directory docs $(DOCUMENTED)
	@echo 'build/docs/index.html'

##@ Kernels, without a GPU
.PHONY: precompile precompile-check resources
precompile: $(READY) ## Compile all kernels for all architectures into build/kernels
	$(PY) -m topkd precompile --arch all --jobs $(JOBS) --dir $(KERNELS)

precompile-check: build/kernels.json ## Compile them for sm_80, sm_90a, sm_100a; compare their resources with the report
	@$(PY) tests/kernels/resources.py check $<

resources: build/kernels.json ## Renew that report, tests/kernels/resources.csv
	@$(PY) tests/kernels/resources.py write $<

##@ On a GPU machine
.PHONY: gpu-test gpu-record-check bench bench-kernels bench-service bench-table
gpu-test: $(READY) ## Run the tests marked gpu and write tests/gpu/record.json
	$(check-folder)
	$(PY) tests/gpu/record.py run --tests build/check $(if $(GPU_WORKERS),--workers $(GPU_WORKERS)) $(if $(GPU_PART),--part $(GPU_PART)) $(if $(GPU_AGAIN),--again) $(PYTEST_ARGS)

gpu-record-check: ## Say whether tests/gpu/record.json is of the code as it stands
	@$(PYTHON) tests/gpu/record.py check

bench: $(READY) ## Run the tests marked bench, and print what they measured
	$(check-folder)
	cd build/check && $(PY) -m pytest -m 'bench$(if $(shell command -v nvidia-smi),, and not gpu)' -s $(PYTEST_ARGS)

bench-kernels: $(READY) ## Time the kernels, exactness first: tests/bench/results/<device>/kernels.csv and .txt
	$(check-folder)
	$(BENCH) $(BENCH_ARGS)

bench-service: $(READY) ## Time remote calls and lanes beside local ones, MPS and not: tests/bench/results/<device>/service.json
	$(check-folder)
	cd build/check && $(PY) -m tests.bench.service --results $(CURDIR)/tests/bench/results $(if $(shell command -v nvidia-smi),,--device cpu) $(SERVICE_ARGS)

bench-table: $(READY) ## Renew the chooser's table, kernels/measured.csv, and the record: about three minutes on an H200
	$(check-folder)
	$(BENCH) --grid table --families all --forms --peers none --no-warm --seconds 50
	cd build/check && $(PY) -m tests.bench.kernel_table --results $(CURDIR)/tests/bench/results
	cp "$$(cd build/check && $(PY) -c 'from tests.bench.kernel_table import INSTALLED; print(INSTALLED)')" kernels/measured.csv
	$(BENCH) --append --families all --peers torch --seconds 50
	$(BENCH) --append --grid named --families none --peers cudnn --seconds 20
	$(BENCH) --append --grid small --dtypes bf16,f16,f32 --peers none --kinds --forms --seconds 20
	$(BENCH) --seed-table --families all --seconds 12

##@ Deployment
.PHONY: image-check image-lock deploy-check deploy-render watch-check screenshots
watch-check: $(READY) $(WATCH_READY) ## Check metrics, rules, dashboard and status page with a real Prometheus and Chromium
	$(check-folder)
	cd build/check && $(PY) -m tests.watch.tools && $(PY) -m pytest -m watch $(PYTEST_ARGS) tests/watch

screenshots: $(READY) $(WATCH_READY) ## Make docs/images anew: the status page and the dashboard's panels under load
	$(check-folder)
	cd build/check && $(PY) -m tests.watch.tools && $(PY) -m tests.watch.screenshots $(CURDIR)/docs/images

image-check: ## Take the image's build steps without Docker, and start the server from the result
	$(PYTHON) deploy/image/check.py --kernels $(KERNELS) $(CHECKED:%=--arch %)

deploy-check: $(DEPLOY_VENV)/.ready ## Check Dockerfile, compose file and chart with tools that need neither Docker nor a cluster
	$(DEPLOY_VENV)/bin/python deploy/check.py

deploy-render: $(DEPLOY_VENV)/.ready ## Renew the chart's README and the plain manifests
	$(DEPLOY_VENV)/bin/python deploy/check.py render

image-lock: $(DEPLOY_VENV)/.ready ## Renew the hashed locks of the image's wheels
	PATH=$(CURDIR)/$(DEPLOY_VENV)/bin:$$PATH python deploy/image/lock.py

##@ Harm
.PHONY: chaos
chaos: $(READY) ## Kill clients and workers at random for three minutes (CHAOS_ARGS='--seconds 20'): nothing wrong, nothing hangs
	$(check-folder)
	cd build/check && $(PY) -m tests.chaos $(CHAOS_ARGS)

##@ Making
.PHONY: venv wheel proto proto-release clean help
venv: $(READY) ## Make the virtual environment, with the wheel in it

wheel: $(WHEEL) ## Build the wheel

proto: $(PROTO_VENV)/.ready ## Generate the protocol's code from the .proto files
	$(call generate,proto)

proto-release: $(PROTO_VENV)/.ready ## Take the protocol as it stands as the one that later changes must not break
	$(PROTO_BIN)/buf build proto --exclude-source-info -o proto/released.binpb

clean: ## Remove what make has made
	rm -rf build
	[ ! -e $(VENV)/.made-by-make ] || rm -rf $(VENV)

help: ## List the targets
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' Makefile

$(VENV)/.made-by-make:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make: $(PYTHON) is no Python 3.11 or newer; name one: make PYTHON=...' >&2; exit 1; }
	@[ ! -e $(VENV) ] || \
	  { echo 'make: $(VENV) is there and was not made by make; remove it, or name another: make VENV=...' >&2; exit 1; }
	@echo '== making $(VENV)' >&2
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'make: $(PYTHON) cannot make virtual environments (Debian: apt install python3-venv)' >&2; exit 1; }
	@$(PY) $(PIP) install -c constraints-dev.txt pip setuptools
	@touch $@

$(WHEEL): $(SOURCES) | $(BUILDER)
	@echo '== building the wheel' >&2
	@rm -rf build/src build/dist && mkdir -p build/src && cp -r --parents $(PACKED) build/src
	@$(PY) $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/dist build/src
	@touch $@

$(VENV)/.dependencies-installed: pyproject.toml constraints.txt constraints-dev.txt constraints-torch.txt .ci/setup-venv | $(WHEEL)
	@.ci/setup-venv $(VENV) $(PYTHON) $(WHEEL)
	@touch $@

$(VENV)/.topkd-installed: $(WHEEL) $(VENV)/.dependencies-installed
	@$(PY) $(PIP) install --no-deps --force-reinstall $(WHEEL)
	@touch $@

$(VENV)/.watch-installed: constraints-watch.txt $(VENV)/.dependencies-installed
	@$(PY) $(PIP) install -c constraints.txt -c constraints-dev.txt -r constraints-watch.txt
	@touch $@

build/site/.topkd-installed: $(WHEEL)
	@rm -rf build/site
	@$(PY) $(PIP) install --no-index --no-deps --target build/site $(WHEEL)
	@touch $@

build/kernels.json: $(READY)
	@$(PY) -m topkd precompile $(CHECKED:%=--arch %) --jobs $(JOBS) --dir $(KERNELS) --json >$@

$(PROTO_VENV)/.ready: proto/requirements.txt
	@echo '== making $(PROTO_VENV)' >&2
	@rm -rf $(PROTO_VENV) && $(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_BIN)/python $(PIP) install -r $<
	@touch $@

$(DEPLOY_VENV)/.ready: deploy/requirements.txt
	@echo '== making $(DEPLOY_VENV)' >&2
	@rm -rf $(DEPLOY_VENV) && $(PYTHON) -m venv $(DEPLOY_VENV)
	@$(DEPLOY_VENV)/bin/python $(PIP) install --no-deps -r $<
	@touch $@

build/venv-oldest/.ready: constraints-oldest.txt constraints-dev.txt | $(WHEEL)
	@echo '== making build/venv-oldest' >&2
	@rm -rf build/venv-oldest && $(PYTHON) -m venv build/venv-oldest
	@build/venv-oldest/bin/python $(PIP) install -c constraints-oldest.txt -c constraints-dev.txt $(WHEEL) pytest pytest-timeout
	@touch $@

# The generators write gRPC modules for files without a service too; those say nothing.
define generate
rm -rf build/proto && mkdir -p $(1)
cd proto && PATH=$(PROTO_BIN):$$PATH python -m grpc_tools.protoc -I . --python_out=$(CURDIR)/$(1) --pyi_out=$(CURDIR)/$(1) \
  --grpc_python_out=$(CURDIR)/$(1) --mypy_grpc_out=quiet:$(CURDIR)/$(1) topkd/v1/*.proto
cd $(1)/topkd/v1 && grep -L 'Servicer_to_server' -- *_pb2_grpc.py *_pb2_grpc.pyi | xargs -r rm
endef
