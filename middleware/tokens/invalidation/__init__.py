"""Invalidation: the tags of the answers that a database write of Keystone makes stale."""

__all__ = ["change_log", "reads", "rules", "sqlalchemy_plugin"]
