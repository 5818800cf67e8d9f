"""Comparisons: ``python -m keyfront.benchmarks.compare.NAME --help`` says what is measured."""
