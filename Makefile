# The long parts are scripts in .ci/.

PYTHON ?= python3
ARGS ?=

.PHONY: help serve test lint clean

help:
	@echo "make serve   run Keystone behind keyfront here; options: make serve ARGS='...'"
	@echo "make test    bindep.txt's packages, then lint, layers, typing, docs and all tests"
	@echo "make lint    style, common mistakes and the layers of the packages"
	@echo "make clean   remove everything that was built or installed in this folder"

serve:
	@PYTHON='$(PYTHON)' exec .ci/serve $(ARGS)

test:
	@PYTHON='$(PYTHON)' exec .ci/test

lint:
	@PYTHON='$(PYTHON)' exec .ci/test lint layers

clean:
	rm -rf .venv .venv-tox .tox build dist *.egg-info .coverage .coverage.*
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
