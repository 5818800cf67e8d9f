"""Everything that reaches into Keystone's own application."""

__all__ = [
    "application",
    "needless_warnings",
    "readiness",
    "saml_schemas",
    "series",
    "sqlite_writers",
]
