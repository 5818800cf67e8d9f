"""Everything that reaches into Keystone's own application."""

__all__ = [
    "application",
    "needless_imports",
    "readiness",
    "series",
    "sqlite",
]
