# make run   sets everything up and runs the agent, live
# make test  sets everything up and runs every check and test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LISTEN ?= :9836

.PHONY: run test setup lint clean bench bench-detectors soak fuzz chaos audit golden model-report packages

run: $(VENV)/installed
	@# Without the driver's library there are no GPUs to sample: they are played from the bundled simulated trace.
	exec $(BIN)/warpwatch run --listen $(LISTEN) \
		$$($(BIN)/python -c 'import ctypes; ctypes.CDLL("libnvidia-ml.so.1")' 2>/dev/null || echo --demo)

test: setup lint
	@# A process a core and one more, since some mostly wait, each with one thread, files in the order of their names; then those
	@# that measure and want the machine for themselves.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -q -m alone

setup: $(VENV)/installed
	.ci/setup

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

golden: $(VENV)/installed
	$(BIN)/python -m pytest -q tests/exporters/test_golden.py tests/end_to_end/test_machine_pages.py --update-golden

bench: $(VENV)/installed
	$(BIN)/python -m tests.bench

# make bench-detectors SHARE=1/30
SHARE ?= 1
bench-detectors: $(VENV)/installed
	$(BIN)/python -m tests.detector_bench --share $(SHARE) $(ARGUMENTS)

# The Debian and the RPM package, into dist/.
packages: $(VENV)/installed
	$(BIN)/python packaging/build.py

# make model-report TRACES=../shared/traces
model-report: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[evaluate]'
	$(BIN)/warpwatch evaluate --report docs $(TRACES)

# Published advisories on the installed packages; skipped with a reason where they cannot be reached.
audit: $(VENV)/installed
	.ci/audit $(VENV)

# make chaos MINUTES=5, and SEED=... to repeat one that failed
chaos: $(VENV)/installed
	$(BIN)/python -m tests.chaos $(MINUTES) $(if $(SEED),--seed $(SEED))

# make fuzz MINUTES=10
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz $(MINUTES)

# make soak MINUTES=60, or a day of the agent's time in half an hour: make soak MINUTES=30 HOURS=24
soak: $(VENV)/installed
	$(BIN)/python -m tests.soak $(MINUTES) $(if $(HOURS),--hours $(HOURS))

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "warpwatch needs Python 3.11 or newer; name one with make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "the venv module of $(PYTHON) is missing: install the package python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) tests/nvml_emulator/build .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
