# All commands of development; `make help` lists them. Environments and builds are made on first use and kept, so an
# up-to-date target starts at once. Needs Rust, Python 3.11 and the package registries.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11 python3))
# A wheel to test or to demonstrate instead of the source tree: make demo WHEEL=dist/<file>
WHEEL ?=
# Processors of the wheels of make wheels, and this machine's.
WHEEL_MACHINES ?= x86_64 aarch64
MACHINE := $(shell uname -m)

# Device of the demo's KV: the host's memory, or a device over the software driver of the tests.
DEVICE ?= host
# Store of its blocks: posix (a directory), nfs (a share mounted by two hosts), redis (a Redis server), s3 (a bucket)
# or mooncake (a pool of memory).
STORE ?= posix
# Its model: llama, or hybrid, which has layers with windows.
MODEL ?= llama
DEMO_SERVER_redis := servers
DEMO_SERVER_s3 := servers-long
DEMO_SERVER_mooncake := .tools/.stamp-mooncake
# An algorithm of sparse attention to show instead: gsa_on_device, esa, gsa, kvstar, quest, infllm.
SPARSE ?=
SPARSE_NAMES := gsa_on_device esa gsa kvstar quest infllm

# Not empty: show a prefill and a decode server with the proxy before them instead.
PD ?=

# For the peer of bench-peers that has a wheel only for this version.
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python3.12; do \
	"$$python" -c "" 2>/dev/null && echo "$$python" && break; done)
# Arguments of benches/peers/run.py: make bench-peers PEERS_ARGS=--quick
PEERS_ARGS ?=
# Arguments of benches/python/remote.py: make bench-remote REMOTE_ARGS="--medium redis --rounds 21"
REMOTE_ARGS ?=
# Revision of the other side of bench-beside, and arguments: make bench-beside REV=HEAD~1 BESIDE_ARGS=--quick
REV ?=
BESIDE_ARGS ?=
# Arguments of tests/gpu/checks.py and benches/python/gpu.py.
GPU_ARGS ?=
# Arguments of benches/python/ttft.py and chat.py, and their variants: ucm's stores and other projects' connectors.
TTFT_ARGS ?=
CHAT_ARGS ?=
TTFT_OVER := none file segment cache-pc example lmcache mooncake
CHAT_OVER := none file lmcache mooncake

UV := .tools/bin/uv
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
STAGE := tools/stage
INSTALL := $(UV) pip install --quiet --constraint requirements/lock.txt --overrides requirements/overrides.txt
NEXTEST := $(shell command -v cargo-nextest)
RUST_SOURCES := $(shell find crates -name tests -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print) Cargo.toml Cargo.lock
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

export STAGE_RUN := $(shell date +%s.%N)
# Compiled Python is always kept: vLLM is imported some forty times below.
unexport PYTHONDONTWRITEBYTECODE
# Use the machine's own certificates, as pip does if configured.
export UV_NATIVE_TLS ?= true

# Environment of the Python tests and the demo: that of the source tree, or one for the wheel.
ifeq ($(WHEEL),)
RUN_ENV := $(VENV)/.stamp-vllm $(VENV)/.stamp-core
RUN_BIN := $(BIN)
else
RUN_ENV := wheel-env
RUN_BIN := .venv-wheel/bin
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  demo and test-py take WHEEL=<file> and then run from that wheel instead of the source tree"

.PHONY: demo
demo: $(RUN_ENV) $(DEMO_SERVER_$(STORE)) ## run the demo: one prompt, three engines: cold, warm, a damaged block (DEVICE=softcuda, STORE=nfs, redis, s3, mooncake, MODEL=hybrid, PD=1, SPARSE=NAME, BLEND=1, or REROPE=1)
ifneq ($(PD),)
	@$(RUN_BIN)/python demo/pd.py
else ifneq ($(SPARSE),)
	@$(RUN_BIN)/python demo/sparse.py $(SPARSE)
else ifneq ($(REROPE),)
	@$(RUN_BIN)/python demo/rerope.py
else ifneq ($(BLEND),)
	@$(RUN_BIN)/python demo/blend.py
else
ifeq ($(DEVICE),softcuda)
	@$(STAGE) "build the software driver" $(DRIVERS) --release -p softcuda
endif
	@$(RUN_BIN)/python demo/run.py --store $(STORE) --model $(MODEL) --device $(DEVICE) --driver $(subst /debug/,/release/,$(SOFTCUDA))
endif

# --- tests ---------------------------------------------------------------------------------------------------------

# Tests with engines wait most of the time, so the other Python tests and (in make test) the crates run beside them.
BESIDE = tools/beside build "$(MAKE) $(1)" test-engines "$(MAKE) test-engines"
.PHONY: test
test: servers $(RUN_ENV) .tools/.stamp-mooncake drivers ## run all tests of this machine
	@$(STAGE) "build the tests of the crates" $(RUST_TESTS) --no-run
	@$(call BESIDE,test-main) test-crates "$(MAKE) test-rust loom test-wheel test-kinds test-apart"

# ucm-py is tested from Python: a Rust test binary of it would need the interpreter as a shared library.
.PHONY: test-rust
# Suites whose tests declare the stores that they need (crates/ucm-store/tests/common/over.rs), and their columns:
# layout, upper tier. The first run below is over file,none; the other columns are for test-long.
# The model has a matrix of its own: it runs once, and over every column in test-long.
SUITES := rules first_failure ends transfer verifying trust damage health lost_roots room
LONG_SUITES := $(SUITES) model
COLUMNS := segment,none file,memory
MORE_COLUMNS := segment,memory file,map
SKIPPED := build/skipped-tests.txt
comma := ,
space := $(subst ,, )
# Tests of a crate by their files: $(call tests_in,ucm-store,rules model). It selects from the whole workspace, so that
# cargo reuses the build of test-rust instead of one with other features.
tests_in = $(if $(NEXTEST),$(RUST_TESTS) -E 'package($(1)) & test(/^($(subst $(space),|,$(strip $(2))))::/)',\
	cargo test --locked --quiet -p $(1) --test all -- $(patsubst %,%::,$(2)))
over = $(STAGE) "the store over $(1)$(2)" env UCM_TEST_SKIPPED=$(CURDIR)/$(SKIPPED) \
	UCM_TEST_LAYOUT=$(word 1,$(subst $(comma), ,$(1))) UCM_TEST_TIERS=$(word 2,$(subst $(comma), ,$(1))) \
	$(call tests_in,ucm-store,$(or $(3),$(SUITES)))
# The software drivers, for Python and the columns below. They have a directory of their own: built alone their
# dependencies have fewer features, and in the same one each build would undo the other.
DRIVERS := env CARGO_TARGET_DIR=target/drivers cargo build --locked --quiet
SOFTCUDA := $(CURDIR)/target/drivers/debug/libsoftcuda.so
.PHONY: drivers
drivers: ## build the software driver and the client of 3FS for the tests
	@$(STAGE) "build the software drivers" $(DRIVERS) -p softcuda -p soft3fs
# The same over the software driver (tests/softcuda), as CUDA, where every copy uses streams, staging and kernels, or as
# the runtime of another vendor.
over_device = UCM_TEST_DEVICE=$(1) UCM_TEST_DRIVER=$(SOFTCUDA) $(call over,$(2), on $(1),$(3))
VENDORS := hip musa maca ascend
# The same with compressed records, in segments, except three tests that count bytes of uncompressed segments.
COMPRESSED := test(/^(rules|first_failure|ends|segments|segments_sealing|merging|merging_faults)::/) \
	- test(/a_segment_that_is_full|a_damaged_segment_gives|the_limit_holds_while_both/)
skipped = echo "$$(sort -u $(SKIPPED) 2>/dev/null | wc -l) tests mean nothing over some of these; why: $(SKIPPED)"

RUST_TESTS := $(if $(NEXTEST),cargo nextest run --locked,cargo test --locked --quiet --lib --bins --tests) \
	--workspace --exclude ucm-py
test-rust: servers drivers ## run unit, property and documentation tests of the crates
	@$(STAGE) "tests of the crates" $(RUST_TESTS)
ifneq ($(NEXTEST),)
	@$(STAGE) "the store over compressed segments" env UCM_TEST_COMPRESS=zstd UCM_TEST_LAYOUT=segment \
	    $(RUST_TESTS) -E 'package(ucm-store) & ($(COMPRESSED))'
endif
	@mkdir -p build && rm -f $(SKIPPED)
	@$(foreach column,$(COLUMNS),$(call over,$(column));) $(skipped)
	@$(call over_device,cuda,segment$(comma)none,rules transfer)
	@$(foreach vendor,$(VENDORS),$(call over_device,$(vendor),segment$(comma)none,transfer);)
	@$(STAGE) "doc tests" cargo test --locked --quiet --workspace --exclude ucm-py --doc

.PHONY: loom
loom: ## check every interleaving of the hand-written atomics
	@RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
		$(STAGE) "loom" cargo test --locked --quiet -p ucm-infra --test loom

.PHONY: test-py
test-py: $(RUN_ENV) servers .tools/.stamp-mooncake drivers ## run the Python tests, with and without vLLM engines
	@$(call BESIDE,test-without-engines)

.PHONY: test-without-engines
test-without-engines: test-main test-apart ## run the Python tests without vLLM engines

test-main test-apart test-engines: export UCM_TEST_DRIVER = $(SOFTCUDA)
test-main test-apart test-engines: export UCM_TEST_SOFT3FS = $(dir $(SOFTCUDA))libsoft3fs.so
# Processes of pytest that share one run. More than there are processors, because most tests wait most of their time.
PARALLEL := --numprocesses 3 --dist worksteal
.PHONY: test-main
test-main: $(if $(WHEEL),,$(RUN_ENV)) drivers ## run the Python tests that need no engine and no process of their own
	@$(STAGE) "pytest" $(RUN_BIN)/python -m pytest $(PARALLEL) --quiet --durations 20 --timeout 300 tests \
		--ignore tests/vllm --ignore tests/wheel --ignore tests/trust/test_engine.py --ignore tests/trans --ignore tests/gpu \
		--ignore tests/triton --ignore tests/mooncake --ignore tests/remote/test_engine.py \
		--ignore tests/connector/test_long_prompts.py --ignore tests/e2e

.PHONY: test-apart
test-apart: $(if $(WHEEL),,$(RUN_ENV)) drivers ## run the Python tests that need processes of their own
	@TRITON_INTERPRET=1 $(STAGE) "pytest triton, interpreted" $(RUN_BIN)/python -m pytest --quiet tests/triton
	@$(MAKE) --no-print-directory test-mooncake
	@$(STAGE) "pytest trans" $(RUN_BIN)/python -m pytest --quiet tests/trans tests/gpu
	@# A process of its own, because a loaded driver stays for all later tests.
	@$(STAGE) "pytest long prompts" $(RUN_BIN)/python -m pytest --quiet tests/connector/test_long_prompts.py
	@$(foreach device,$(VENDORS),UCM_TEST_DEVICE=$(device) \
		$(STAGE) "pytest trans on $(device)" $(RUN_BIN)/python -m pytest --quiet tests/trans -k $(device);)

.PHONY: test-engines
test-engines: $(if $(WHEEL),,$(RUN_ENV)) drivers ## run the Python tests with vLLM engines, one at a time
	@$(STAGE) "pytest vllm" $(RUN_BIN)/python -m pytest --durations 20 tests/vllm tests/trust/test_engine.py \
		tests/remote/test_engine.py
	@$(STAGE) "end to end, without the evaluator" $(RUN_BIN)/python -m pytest --quiet tests/e2e --stage 0-2

# Against another server: make e2e URL=http://host:8000. More: make e2e E2E_ARGS="--stage 1+ --baseline build/e2e-before"
URL ?=
E2E_ARGS ?=
.PHONY: e2e
e2e: $(if $(URL),$(VENV)/.stamp-core,$(RUN_ENV)) ## run the end-to-end tests: on a tiny server, or on URL= (E2E_ARGS=)
	@$(STAGE) "end to end" $(RUN_BIN)/python -m pytest -rs tests/e2e --report build/e2e $(if $(URL),--url $(URL)) $(E2E_ARGS)

# Mooncake's client brings threads and a runtime of its own into the process that loads it, so these tests run in one of their own.
.PHONY: test-mooncake
test-mooncake: $(if $(WHEEL),,$(RUN_ENV)) .tools/.stamp-mooncake ## test the store over a real Mooncake pool
	@$(STAGE) "pytest mooncake" $(RUN_BIN)/python -m pytest --quiet -rs --timeout 120 tests/mooncake

# A new kind of tier from Python: with a core that contains the toy, beside the usual one.
.PHONY: test-kinds
test-kinds: $(VENV)/.stamp-dev .tools/.stamp-mooncake ## test a new kind of tier from Python, with a core built for tests
	@$(STAGE) "build ucm._core with a toy" cargo build --locked --quiet -p ucm-py --features extension-module,test-utils
	@UCM_TEST_CORE=$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug/lib_core.so \
		$(STAGE) "pytest kinds" $(BIN)/python -m pytest --quiet tests/kinds

# Longer tests, in four parallel lines, because they wait as much as they compute.
.PHONY: test-long
test-long: $(RUN_ENV) servers-long .tools/.stamp-mooncake drivers ## run the long tests: all columns of the stores, the long trust matrix (tables: build/trust*.md), engines
	@tools/beside build "$(MAKE) test-long-engines" test-long-stores "$(MAKE) test-long-stores" \
		test-long-processes "$(MAKE) test-long-processes" test-long-rust "$(MAKE) test-long-rust"

.PHONY: test-long-rust
test-long-rust: drivers ## part of test-long: the store's suites over all columns and devices, and copies
	@mkdir -p build && rm -f $(SKIPPED)
	@export UCM_TEST_LONG=1; \
	    $(foreach column,$(COLUMNS) $(MORE_COLUMNS),$(call over,$(column),,$(LONG_SUITES));) $(skipped)
	@$(foreach column,segment$(comma)none file$(comma)memory,$(call over_device,cuda,$(column),$(LONG_SUITES));)
	@$(foreach vendor,$(VENDORS),$(call over_device,$(vendor),segment$(comma)none,$(LONG_SUITES));)
	@UCM_TEST_LONG=1 $(STAGE) "copies over the software driver" \
		$(if $(NEXTEST),$(RUST_TESTS) -E 'binary(policy) + (package(ucm-device) & test(/^properties::/))',\
		cargo test --locked --quiet -p ucm-device --test policy --test all)
	@UCM_TEST_LONG=1 $(STAGE) "the store over objects" \
		$(call tests_in,ucm-store,object rules model)

.PHONY: test-long-stores
test-long-stores: $(RUN_ENV) drivers ## part of test-long: the trust matrix, properties and the remote stores from Python, without engines
	@UCM_TEST_LONG=1 $(STAGE) "trust matrix" $(RUN_BIN)/python -m pytest --timeout 3600 tests/trust \
		--ignore tests/trust/test_engine.py --trust-table build/trust.md -k "not test_processes"
	@UCM_TEST_LONG=1 $(STAGE) "properties with more examples" $(RUN_BIN)/python -m pytest --timeout 1800 \
		tests/connector/test_never_slower.py tests/vllm_unit/test_ended_requests.py tests/sparse/test_blend_quality.py
	@UCM_TEST_LONG=1 $(STAGE) "stores of the network" $(RUN_BIN)/python -m pytest --timeout 1800 tests/remote \
		--ignore tests/remote/test_engine.py
	@UCM_TEST_DEVICE=cuda UCM_TEST_DRIVER=$(SOFTCUDA) $(STAGE) "trust matrix on cuda" \
		$(RUN_BIN)/python -m pytest --timeout 1800 tests/trust --ignore tests/trust/test_engine.py

.PHONY: test-long-processes
test-long-processes: $(RUN_ENV) ## part of test-long: the rows of the trust matrix with several processes
	@UCM_TEST_LONG=1 $(STAGE) "trust matrix of processes" $(RUN_BIN)/python -m pytest --timeout 3600 \
		tests/trust/test_store.py -k test_processes --trust-table build/trust-processes.md

.PHONY: test-long-engines
test-long-engines: $(RUN_ENV) drivers ## part of test-long: tests with vLLM engines, one at a time
	@UCM_TEST_LONG=1 $(STAGE) "trust matrix through engines" $(RUN_BIN)/python -m pytest --timeout 3600 \
		tests/trust/test_engine.py --trust-table build/trust-engines.md
	@UCM_TEST_LONG=1 $(STAGE) "engines over the network" $(RUN_BIN)/python -m pytest --timeout 1800 tests/remote/test_engine.py
	@UCM_TEST_DEVICE=cuda UCM_TEST_DRIVER=$(SOFTCUDA) $(STAGE) "engines on cuda" \
		$(RUN_BIN)/python -m pytest --timeout 1800 tests/trust/test_engine.py tests/vllm
	@UCM_TEST_LONG=1 UCM_TEST_DRIVER=$(SOFTCUDA) $(STAGE) "what is on one runner every day, or on none" \
		$(RUN_BIN)/python -m pytest -m "one_runner or long" tests/vllm
	@UCM_TEST_COMPILED=1 $(STAGE) "sparse attention, compiled" $(RUN_BIN)/python -m pytest tests/vllm/test_sparse.py -k "not v2"
	@$(MAKE) e2e
	@$(foreach name,$(SPARSE_NAMES),$(STAGE) "demo of $(name)" $(RUN_BIN)/python demo/sparse.py $(name);)
	@$(STAGE) "demo of ReRoPE" $(RUN_BIN)/python demo/rerope.py
	@$(STAGE) "demo of Blend" $(RUN_BIN)/python demo/blend.py
	@$(STAGE) "demo of windows beside full attention" $(RUN_BIN)/python demo/run.py --model hybrid
	@$(STAGE) "demo of P and D" $(RUN_BIN)/python demo/pd.py
	@$(MAKE) test-versions
	@$(MAKE) test-readme

# The other versions of vLLM, each unpacked into build/vllm to stand before the installed one: make test-versions
# VERSIONS="0.30.0 0.33.0". The installed version runs all tests in make test.
VERSIONS ?= $(shell sed -n 's/^[^#].*==//p' requirements/versions.txt)
with_version = $(STAGE) "$(2) on vLLM $(1)" env PYTHONPATH=$(CURDIR)/build/vllm/$(1) $(BIN)/python -m pytest --quiet $(3)
.PHONY: test-versions
test-versions: $(VENV)/.stamp-core $(foreach version,$(VERSIONS),build/vllm/$(version)/.stamp) ## run short tests on the other versions of vLLM that are served (VERSIONS=)
	@$(foreach version,$(VERSIONS),\
		$(call with_version,$(version),classes,$(PARALLEL) --timeout 300 tests/vllm_unit tests/connector \
			--ignore tests/connector/test_long_prompts.py --ignore tests/connector/test_never_slower.py);\
		$(call with_version,$(version),engines,-m versions tests/vllm);)

build/vllm/%/.stamp: $(VENV)/.stamp-vllm tools/vllm_version.py requirements/versions.txt
	@$(STAGE) "unpack vLLM $*" $(BIN)/python tools/vllm_version.py $(UV) \
		$$(grep -E '==$*$$' requirements/versions.txt) $(@D)
	@touch $@

TEST_WHEEL = UCM_TEST_UV=$(abspath $(UV)) UCM_TEST_DEBIAN=$(CURDIR)/build/debian \
	$(STAGE) "pytest wheel" $(BIN)/python -m pytest --quiet tests/wheel
.PHONY: test-wheel
test-wheel: $(VENV)/.stamp-dev $(VENV)/.stamp-wheel build/debian/$(MACHINE)/.stamp ## test the wheel in a clean environment, without Rust, vLLM or torch
	@UCM_TEST_WHEEL=$$(ls $(CURDIR)/dist/*.whl) $(TEST_WHEEL)

.PHONY: test-wheels
test-wheels: wheels $(foreach machine,$(WHEEL_MACHINES),build/debian/$(machine)/.stamp) ## build the wheels of make wheels and test them, that of another processor in qemu
	@UCM_TEST_WHEEL=$$(ls $(CURDIR)/dist/manylinux/*.whl) $(TEST_WHEEL)

# Debian 13 for a processor, because of its Python 3.13: unpacked, not set up (tests/wheel/other_python.py). NumPy needs
# libstdc++6. A failing mmdebstrap sends SIGHUP to its whole process group, so it has one of its own.
DEBIAN_x86_64 := amd64
DEBIAN_aarch64 := arm64
build/debian/%/.stamp:
	@$(call packages,mmdebstrap $(if $(filter $(MACHINE),$*),,qemu-$*-static:qemu-user-static),UCM_REQUIRE_DEBIAN)
	@rm -rf $(@D) && mkdir -p $(@D)
	@if command -v mmdebstrap > /dev/null; then $(STAGE) "unpack Debian 13 for $*" setsid --wait bash -o pipefail -c \
		"mmdebstrap --quiet --variant=extract --architectures=$(DEBIAN_$*) --include=python3,libstdc++6 \
			--aptopt='Acquire::Retries \"5\"' trixie - \
			| tar --extract --no-same-owner --exclude=./dev --directory $(@D)" && touch $@ || true; fi

.PHONY: test-readme
test-readme: $(VENV)/.stamp-vllm $(VENV)/.stamp-wheel ## follow the README in a new environment, with a server of vLLM and the wheel
	@UCM_TEST_WHEEL=$$(ls $(CURDIR)/dist/*.whl) UCM_TEST_UV=$(abspath $(UV)) \
		$(STAGE) "pytest README" $(BIN)/python -m pytest --quiet tests/vllm/test_readme.py

# Over mount points of a real NFS server: ROOT=/mnt/kv, or two mounts of one export, ROOT=/mnt/a:/mnt/b (nosharecache).
# Without ROOT over the file system of tests/trust/nfs.py, which make test runs too.
ROOT ?=
.PHONY: test-nfs
test-nfs: $(RUN_ENV) ## test stores over NFS, two hosts on one export (ROOT=<mount point>[:<another of the same export>])
	@UCM_NFS_ROOT=$(ROOT) UCM_TEST_LONG=1 $(STAGE) "pytest nfs" $(RUN_BIN)/python -m pytest --quiet -rs tests/trust/test_nfs.py

.PHONY: mutants
mutants: $(RUN_ENV) servers ## break each promise on purpose, in a copy, and check that the tests fail (not part of test)
	@$(BIN)/python tests/mutants.py

# On a machine with a GPU; without one they print that. Without make: the same lines, with any Python that has torch and the
# wheel.
.PHONY: test-gpu
test-gpu: $(RUN_ENV) ## test copies, order, processes, errors and Triton kernels on a GPU (GPU_ARGS=--quick)
	@$(RUN_BIN)/python tests/gpu/checks.py $(GPU_ARGS)
	@$(RUN_BIN)/python -m pytest --quiet tests/triton || [ $$? = 5 ]  # no GPU: no tests

# --- checks --------------------------------------------------------------------------------------------------------

# Types are read from an environment without vLLM, so that a fresh clone and a tree that has run its tests get one answer.
TYPES := .venv-types
MYPY := $(BIN)/mypy --python-executable $(TYPES)/bin/python
.PHONY: lint
lint: $(VENV)/.stamp-dev $(TYPES)/.stamp $(VENV)/.stamp-core ## check formatting, lints and types of Rust and Python
	@$(STAGE) "cargo fmt" cargo fmt --all --check
	@$(STAGE) "lines" $(BIN)/python tools/lines.py --budget
	@$(STAGE) "shape" $(BIN)/python tools/gates.py
	@$(STAGE) "clippy" cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
	@$(STAGE) "without codecs" cargo check --locked --quiet -p ucm-store --no-default-features --lib
	@$(STAGE) "ruff" bash -c '$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .'
	@$(STAGE) "mypy" $(MYPY)
	@$(STAGE) "mypy demo" env MYPYPATH=python:demo:benches/quality $(MYPY) demo/run.py demo/engine.py demo/sparse.py demo/pd.py \
		demo/rerope.py demo/blend.py demo/sparse_engine.py examples/*.py
	@$(STAGE) "mypy benches" env MYPYPATH=python:tests/vllm:tests/mooncake:demo:tests/gpu:benches/peers:benches/python:benches/quality \
		$(MYPY) benches/peers/*.py benches/python/*.py benches/quality/*.py
	@$(STAGE) "stubtest" env MYPYPATH=python $(BIN)/python -m mypy.stubtest --concise ucm._core
	@$(STAGE) "documents" $(MKDOCS)
	@$(STAGE) "image" $(BIN)/hadolint Dockerfile
	@$(STAGE) "compose files" $(BIN)/check-jsonschema --builtin-schema vendor.compose-spec examples/compose/*.yaml
	@$(STAGE) "workflows" $(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	@$(STAGE) "workflows, security" $(BIN)/zizmor --offline --quiet .github/workflows

# Fails for a link, an anchor or a page that does not exist.
MKDOCS := env NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
.PHONY: docs
docs: $(VENV)/.stamp-dev ## build the documents as a site, into build/site
	@$(STAGE) "documents" $(MKDOCS)

# A server of vLLM with requests of five minutes, scraped by Prometheus.
.PHONY: picture
picture: $(RUN_ENV) servers ## draw the panels of the dashboard, of a server under load, into docs/dashboard.svg
	@UCM_PICTURE=docs/dashboard.svg UCM_PICTURE_MINUTES=5 $(STAGE) "picture of the dashboard" \
		$(RUN_BIN)/python -m pytest --quiet tests/vllm/test_dashboard.py -k picture

.PHONY: format
format: $(VENV)/.stamp-dev ## format Rust and Python
	@cargo fmt --all
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .

.PHONY: deny
deny: ## check licences, bans and sources of the crates (needs cargo-deny)
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is not installed: nothing checked"; exit 1; }
	@$(STAGE) "cargo deny" cargo deny --locked check licenses bans sources

.PHONY: bench
bench: ## run the Rust benches: ratios to a reference of the same run
	@cargo bench --locked -p ucm-benches

.PHONY: bench-peers
bench-peers: $(PEERS)/.stamp $(PEERS)-cp312/.stamp $(VENV)/.stamp-core ## compare ucm with other stores (PEERS_ARGS=--quick)
	@$(PEERS)/bin/python benches/peers/run.py --python312 $(PEERS)-cp312/bin/python $(PEERS_ARGS)

# LMCache's adapters are measured too where make bench-peers has installed them.
.PHONY: bench-remote
bench-remote: $(VENV)/.stamp-core servers-long .tools/.stamp-mooncake ## compare network stores with their client libraries (REMOTE_ARGS=--quick)
	@$(STAGE) "build the clients alone" cargo build --locked --quiet --release -p ucm-benches --bin clients
	@$(BIN)/python benches/python/remote.py --clients $(or $(CARGO_TARGET_DIR),target)/release/clients $(REMOTE_ARGS)

.PHONY: bench-ttft
bench-ttft: $(PEERS)/.stamp-mooncake $(VENV)/.stamp-core ## measure the time to first token: ucm and other connectors (TTFT_ARGS=)
	@PYTHONPATH=python $(PEERS)/bin/python benches/python/ttft.py --variant $(TTFT_OVER) $(TTFT_ARGS)

.PHONY: bench-chat
bench-chat: $(PEERS)/.stamp-mooncake $(VENV)/.stamp-core ## measure chats of many turns: ucm and other connectors (CHAT_ARGS=)
	@PYTHONPATH=python $(PEERS)/bin/python benches/python/chat.py --variant $(CHAT_OVER) $(CHAT_ARGS)

.PHONY: bench-gpu
bench-gpu: $(RUN_ENV) ## measure copies and a store on a GPU against the bus and torch (GPU_ARGS=--quick)
	@$(RUN_BIN)/python benches/python/gpu.py $(GPU_ARGS)

.PHONY: bench-sparse
bench-sparse: $(RUN_ENV) ## measure decoding over long prompts on a CPU, dense and sparse (SPARSE_ARGS=)
	@$(RUN_BIN)/python benches/python/retrieval.py --json build/bench-sparse/layer.json
	@$(RUN_BIN)/python benches/python/sparse.py --json build/bench-sparse/steps.json $(SPARSE_ARGS)

.PHONY: bench-quality
bench-quality: $(RUN_ENV) ## measure answers of the recall model under every selector, and under every rule of Blend, into docs (QUALITY_ARGS=--quick)
	@$(RUN_BIN)/python benches/quality/recall_suite.py $(or $(QUALITY_ARGS),--write docs/sparse-quality.md)
ifeq ($(QUALITY_ARGS),)
	@$(RUN_BIN)/python tests/sparse/blend_harness.py --write docs/blend-rules.md
endif

.PHONY: bench-beside
bench-beside: $(VENV)/.stamp-vllm ## compare this tree with another revision, in turns (REV=<revision> BESIDE_ARGS=--quick)
	@test -n "$(REV)" || { echo "say which revision: make bench-beside REV=<revision>"; exit 2; }
	@$(BIN)/python benches/python/beside.py "$(REV)" $(BESIDE_ARGS)

# --- builds --------------------------------------------------------------------------------------------------------

.PHONY: wheel
wheel: $(VENV)/.stamp-wheel ## build the wheel into dist/
	@ls dist/*.whl

# For other machines: every glibc from 2.28 on, linked by zig, with the standard library of each target (rustup target add).
.PHONY: wheels
wheels: $(VENV)/.stamp-wheels ## build wheels for x86-64 and aarch64, tagged manylinux_2_28, into dist/manylinux
	@rm -rf dist/manylinux
	@$(foreach machine,$(WHEEL_MACHINES),PATH="$(abspath $(BIN)):$$PATH" $(STAGE) "build the wheel for $(machine)" $(COMMIT) \
		$(BIN)/maturin build --quiet --release --locked --zig --compatibility manylinux_2_28 \
		--target $(machine)-unknown-linux-gnu --out dist/manylinux;)
	@$(foreach machine,$(WHEEL_MACHINES),$(BIN)/auditwheel show dist/manylinux/*_$(machine).whl | tee build/auditwheel.txt; \
		grep --quiet 'manylinux_2_28_$(machine)' build/auditwheel.txt;)

# The value of ucmtrans.commit_id.
COMMIT = env UCM_COMMIT_ID=$(or $(shell git rev-parse HEAD 2>/dev/null),unknown)

# With the environment that the extension was built for: for another Python cargo would build it again.
$(VENV)/.stamp-wheel: $(VENV)/.stamp-core $(PYTHON_SOURCES) README.md LICENSE THIRD-PARTY-LICENSES.txt
	@rm -f dist/*.whl
	@VIRTUAL_ENV=$(abspath $(VENV)) $(STAGE) "build the wheel" $(COMMIT) $(BIN)/maturin build --quiet --release --locked --out dist
	@touch $@

# The extension is built once, optimised as in the wheel. It lies in the source tree and the package is an editable
# install: tests see edited Python files at once, and vLLM finds the entry point.
$(VENV)/.stamp-core: $(VENV)/.stamp-dev $(RUST_SOURCES) pyproject.toml
	@VIRTUAL_ENV=$(abspath $(VENV)) PATH="$(abspath .tools/bin):$$PATH" \
		$(STAGE) "build ucm._core" $(COMMIT) $(BIN)/maturin develop --quiet --uv --release --locked
	@touch $@

# --- servers -------------------------------------------------------------------------------------------------------

# Servers for the tests and the demo of network stores, and for tests of metrics. redis-server, openssl and prometheus
# are packages of Debian, installed if permitted; moto is one of the Python test requirements. s3s-fs, which keeps its data over a restart, is built once,
# separately; that takes minutes, so only make test-long and make demo STORE=s3 do it.
S3S_FS := .tools/bin/s3s-fs
.PHONY: servers servers-long
servers-long: servers $(S3S_FS) ## set up these servers and the S3 server of make test-long
servers: ## set up the servers for the tests of network stores
	@$(call packages,redis-server openssl prometheus,UCM_REQUIRE_SERVERS)

# Packages of Debian, installed if permitted: each a program, or a program:package. $(2) makes their absence a failure.
packages = for entry in $(1); do command -v $${entry%%:*} > /dev/null || missing="$${missing:-} $${entry\#\#*:}"; done; \
	if [ -z "$${missing:-}" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    $(STAGE) "install$$missing" env DEBIAN_FRONTEND=noninteractive bash -c \
	        "apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends $$missing" \
	    || echo "not installed:$$missing; tests that need it are skipped, or fail with $(2)=1"; \
	else echo "not there:$$missing; tests that need it are skipped (apt-get install$$missing)"; fi

$(S3S_FS): | .tools/.stamp-uv
	@$(STAGE) "build s3s-fs" env CARGO_TARGET_DIR=target/servers CARGO_PROFILE_DEV_OPT_LEVEL=1 \
		cargo install --quiet --debug --locked --root .tools s3s-fs@0.14.1 --features binary

# --- environments --------------------------------------------------------------------------------------------------

.tools/.stamp-uv: requirements/uv.txt
	@$(STAGE) "set up uv" bash -c '$(PYTHON) -m venv .tools && .tools/bin/python -m pip install --quiet -r $<'
	@touch $@

.tools/.stamp-mooncake: .tools/.stamp-uv requirements/mooncake.txt
	@$(STAGE) "install Mooncake" $(UV) pip install --quiet --python $(PYTHON) --no-deps --target .tools/mooncake \
		-r requirements/mooncake.txt
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
		! $(PYTHON) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2> /dev/null; then \
		$(STAGE) "install libibverbs1" env DEBIAN_FRONTEND=noninteractive bash -c \
			"apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends libibverbs1" || true; fi
	@touch $@

$(VENV)/.stamp-dev: .tools/.stamp-uv requirements/dev.txt requirements/lock.txt requirements/overrides.txt
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) $(STAGE) "install tools" $(INSTALL) -r requirements/dev.txt
	@touch $@

$(TYPES)/.stamp: .tools/.stamp-uv pyproject.toml requirements/dev.txt requirements/lock.txt requirements/overrides.txt
	@test -x $(TYPES)/bin/python || $(UV) venv --quiet --python $(PYTHON) $(TYPES)
	@VIRTUAL_ENV=$(TYPES) $(STAGE) "install types" $(INSTALL) -r requirements/dev.txt -r pyproject.toml
	@touch $@

$(VENV)/.stamp-vllm: $(VENV)/.stamp-dev requirements/vllm.txt
	@VIRTUAL_ENV=$(VENV) $(STAGE) "install vLLM" $(INSTALL) -r requirements/vllm.txt
	@touch $@

$(VENV)/.stamp-wheels: $(VENV)/.stamp-dev requirements/wheels.txt
	@VIRTUAL_ENV=$(VENV) $(STAGE) "install zig" $(INSTALL) -r requirements/wheels.txt
	@touch $@

# Only for bench-peers, bench-ttft and bench-chat: other projects, which are not built or tested here.
$(PEERS)/.stamp: .tools/.stamp-uv benches/peers/requirements.txt benches/peers/lock.txt requirements/overrides.txt
	@test -x $(PEERS)/bin/python || $(UV) venv --quiet --python $(PYTHON) $(PEERS)
	@VIRTUAL_ENV=$(PEERS) $(STAGE) "install the peers" $(UV) pip install --quiet --constraint benches/peers/lock.txt \
		--overrides requirements/overrides.txt -r benches/peers/requirements.txt
	@touch $@

# Left out if it cannot be loaded, because LMCache would not start beside it. Checked again the next time.
$(PEERS)/.stamp-mooncake: $(PEERS)/.stamp benches/peers/requirements-mooncake.txt
	@if $(PEERS)/bin/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then \
		VIRTUAL_ENV=$(PEERS) $(STAGE) "install Mooncake" $(UV) pip install --quiet \
			--constraint benches/peers/lock.txt -r benches/peers/requirements-mooncake.txt && touch $@; \
	else echo "Mooncake is left out: it needs libibverbs.so.1 (libibverbs1, a package of the system)"; fi

# Without a CPython 3.12 the bench reports this peer as missing.
$(PEERS)-cp312/.stamp: .tools/.stamp-uv benches/peers/requirements-cp312.txt
	@python=$(PYTHON312); if [ -n "$$python" ]; then \
		test -x $(PEERS)-cp312/bin/python || $(UV) venv --quiet --python "$$python" $(PEERS)-cp312; \
		VIRTUAL_ENV=$(PEERS)-cp312 $(STAGE) "install UCM 0.8.1" \
			$(UV) pip install --quiet --no-deps -r benches/peers/requirements-cp312.txt && touch $@; \
	fi

.PHONY: wheel-env
wheel-env: .tools/.stamp-uv
	@test -f "$(WHEEL)" || { echo "WHEEL=$(WHEEL): no such file; make wheel builds one"; exit 1; }
	@test -x .venv-wheel/bin/python || $(UV) venv --quiet --python $(PYTHON) .venv-wheel
	@VIRTUAL_ENV=.venv-wheel $(STAGE) "install the wheel" $(INSTALL) --reinstall-package ucm-kv \
		-r requirements/dev.txt -r requirements/vllm.txt "$(WHEEL)"
	@.venv-wheel/bin/python -c 'import sys, ucm; assert ucm.__file__.startswith(sys.prefix), ucm.__file__'

.PHONY: lock
lock: $(VENV)/.stamp-vllm ## record the versions of the environment, after a change in requirements/
	@{ echo "# Every package of the development environment at the version the tests were last run with."; \
	   echo "# Made by \`make lock\`; used as constraints for dev.txt and vllm.txt."; \
	   VIRTUAL_ENV=$(VENV) $(UV) pip freeze | grep -E '^[A-Za-z0-9_.-]+=='; } > build/lock.txt
	@mv build/lock.txt requirements/lock.txt

.PHONY: clean
clean: ## remove all builds and environments
	@rm -rf .tools .venv .venv-wheel $(TYPES) $(PEERS) $(PEERS)-cp312 target build dist demo-out
	@find python tests demo tools -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis python/ucm/*.so
