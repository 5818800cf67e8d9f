"""Servers that benchmarks and tests start: real ones, on loopback, private, gone with their block.

Where something is not installed each raises ``MissingPartError``, which names the command that
installs it, and where a server does not start ``ServerError``, which says why.
"""
