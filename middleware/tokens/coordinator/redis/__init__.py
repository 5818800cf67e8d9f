"""The coordinator of many nodes: an epoch table in Redis or Valkey."""

__all__ = ["address", "coordinator"]
