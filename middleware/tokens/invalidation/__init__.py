"""From a database write of Keystone to the tags of what it makes stale."""

__all__ = ["change_log", "reads", "rules", "sqlalchemy_plugin"]
