"""The coordinator of many nodes: an epoch table in Redis or Valkey."""
