"""Servers that benchmarks and tests start: real ones, on loopback, gone with their block."""
