# make setup   create .venv and install pinned requirements
# make demo    train the tiny mixture-of-experts model on this machine
# make test    run the test suite, two files at a time; LANES=0 runs one
# make test-unit  the tests that start no real Megatron, vLLM or gloo process, three files at a time: most of them wait
# make test-all  the same with nightly sizes: more seeds, samples and publishes
# make test-gpu   the tests that need a CUDA GPU (tests/gpu/README.md); each takes at most 10 minutes
# make check   ruff (format and rules), import-linter and mypy, which the test suite runs as well
# make format  format the code with ruff
# make golden  rewrite the recorded plans and batch scripts of tests/unit/launcher/golden, and docs/en/results.md
.PHONY: setup demo test test-unit test-all test-gpu check lint types format docs golden clean
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
PYTHON ?= $(PY)
LANES ?= 2
CONFIGS := --config examples/math/gsm8k_grpo_megatron_lora_moe.yaml --config examples/math/embedded.yaml

setup: .venv/.ready

.venv/.ready: requirements/cpu.txt requirements/install.sh pyproject.toml
	@requirements/install.sh .venv

demo: setup
	$(PY) -m areal_lora.launch $(CONFIGS) $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(LANES) $(ARGS)

test-unit: LANES = 3
test-unit: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(LANES) -m "not slow" tests/unit tests/repository tests/examples tests/benchmarks $(ARGS)

test-all: export AREAL_LORA_NIGHTLY = 1
test-all: test

test-gpu:
	OMP_NUM_THREADS=4 $(PYTHON) -m pytest tests/gpu -v --timeout 600 $(ARGS)

check: lint types

lint: setup
	$(PY) -m ruff format --check areal_lora tests examples benchmarks docs/tools
	$(PY) -m ruff check areal_lora tests examples benchmarks docs/tools
	.venv/bin/python -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

types: setup
	$(PY) -m mypy areal_lora docs/tools

format: setup
	$(PY) -m ruff format areal_lora tests examples benchmarks docs/tools

docs: setup
	$(PY) -m docs.tools

golden: setup
	AREAL_LORA_GOLDEN=1 $(PY) -m pytest -q tests/unit/launcher/test_plan_golden.py tests/repository/test_internals.py

clean:
	rm -rf .venv build dist *.egg-info
