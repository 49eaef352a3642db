# Targets: demo [ARGS="--seed 1"], test, test-long, test-drills [ARGS="--trials 5"], test-portable [ARGS=--short],
# test-lowest, test-newest, check, dist, docs, test-gpu, clean. test-gpu and clean install nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Processes that run tests side by side; the tests of a file stay together. A rank that waits leaves its core to others.
JOBS   ?= 2
PYTEST := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# DeepSpeed compiles its CPU ops at first use. Each environment has its own cache. PATH must contain its ninja.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Versions that pip installs. test-lowest and test-newest replace them.
CONSTRAINTS ?= constraints.txt
# Tests that use most of each library whose range of versions pyproject.toml declares: about two minutes.
QUICK := unit/config/test_config.py unit/zero unit/ops/test_registration.py unit/checkpoint/test_deepspeed_files.py \
	unit/data/test_sources.py unit/data/test_tokenizers.py unit/models/test_descriptions.py \
	unit/models/test_open_clip_keys.py unit/commands/test_commands.py unit/engine/test_metrics.py \
	distributed/test_planned_bytes.py distributed/test_tensor_parallel_reshard.py distributed/test_resume_bits.py

.PHONY: demo test test-long test-drills test-portable test-quick test-lowest test-newest test-gpu check dist docs clean

demo: $(VENV)/.ops
	DS_ACCELERATOR=cpu $(BIN)/megaclip demo $(ARGS)

test: $(VENV)/.ops
	$(PYTEST) -m "not gpu and not long"

# Tests that take minutes more: every ds_config under the launcher, a killed launcher, signals over two hosts, a whole
# comparison of losses.
test-long: $(VENV)/.ops
	$(PYTEST) -m "long and not gpu"

# Harms runs at random times, resumes them and prints a table: hours. The long tests have a quick form of it.
test-drills: $(VENV)/.ops
	DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/python -m tests.drills $(ARGS)

# Runs the tests that compare numbers under other instruction sets, with two threads, and on a busy machine.
test-portable: $(VENV)/.ops
	$(BIN)/python tools/test_portable.py --jobs $(JOBS) $(ARGS)

# The lowest and the newest declared versions, each in an environment of its own (docs/versions.md).
test-quick: $(VENV)/.ops
	$(PYTEST) -m "not gpu and not long" $(addprefix tests/,$(QUICK))

test-lowest: build/lowest.txt
	$(MAKE) test-quick VENV=.venv-lowest CONSTRAINTS=$<

test-newest:
	$(MAKE) test-quick VENV=.venv-newest CONSTRAINTS=/dev/null

build/lowest.txt: pyproject.toml
	mkdir -p build
	grep -oE '"[A-Za-z_-]+>=[0-9.]+' $< | tr -d '"' | grep -v setuptools | sed 's/>=/==/' > $@

# Runs on a machine with a GPU, in the environment that contains the CUDA build of torch. It installs nothing.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_import_rules.py

# Builds dist/*.tar.gz, and from it dist/*.whl.
dist: $(VENV)/.installed
	$(BIN)/python -m build --outdir dist .

# Builds the documentation's website, build/site/index.html, and checks its links.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest runs data build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# Use normalised names of extras. pip before 23.3 accepts no others and only warns.
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[open-clip,megatron,lora,demo,dev]'
	touch $@

$(VENV)/.ops: $(VENV)/.installed
	@# DeepSpeed's op for updates on CPUs takes minutes to compile.
	DS_ACCELERATOR=cpu $(BIN)/python -c "from megaclip.zero.op_builds import CPUAdamBuilder, prepare_ops; prepare_ops(); CPUAdamBuilder().load()"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	touch $@
