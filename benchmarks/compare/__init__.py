"""Comparisons side by side: each a script, with its helpers beside it."""
