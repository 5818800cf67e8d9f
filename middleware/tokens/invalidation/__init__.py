"""Invalidation: the tags of the answers that a database write of Keystone makes stale."""

__all__ = ["change_log", "rules", "sql_reads", "sqlalchemy_plugin"]
