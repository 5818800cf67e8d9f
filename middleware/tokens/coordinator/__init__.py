"""Coordinators: where the epochs of the token cache are kept."""

__all__ = ["factory", "local", "mark_owners", "redis", "table"]
