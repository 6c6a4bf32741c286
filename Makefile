# make demo        the benchmark in miniature, start to table (CPU or GPU; sets everything up)
# make test        all tests but the long attacks
# make test-hard   the long attacks: 30 kills a script, hostile and huge input, fuzzing
# make demo-clean  forget the demo's vectors, readouts and predictions
# make demo-controls, make demo-curve   all controls of the demo; score against bytes per vector (after make demo)
# make paper EMBEDDER=... MODE=...      one row of the paper's table, from data to report

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# What the attacks draw at random: one seed, so that a red CI means a change. `make test-hard SEED=n` draws other moments and bytes.
SEED ?= 20261201
export SEED

.PHONY: demo demo-clean demo-controls demo-curve paper test test-hard

$(VENV)/ready: requirements.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/test-ready: $(VENV)/ready requirements-test.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements-test.txt
	touch $@

demo: $(VENV)/ready
	PATH="$(BIN):$$PATH" bash data/demo/demo.sh

demo-controls: $(VENV)/ready
	PATH="$(BIN):$$PATH" bash data/demo/controls.sh

demo-curve: $(VENV)/ready
	PATH="$(BIN):$$PATH" bash data/demo/curve.sh

$(VENV)/data-ready: $(VENV)/ready data/requirements.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r data/requirements.txt
	touch $@

paper: $(VENV)/data-ready
	PATH="$(BIN):$$PATH" bash data/paper.sh "$(EMBEDDER)" "$(MODE)"

demo-clean:
	rm -rf runs/demo

test: $(VENV)/test-ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder test_smoke.py tests

test-hard: $(VENV)/test-ready
	KILLS=30 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m "hard or kills" test_smoke.py tests
