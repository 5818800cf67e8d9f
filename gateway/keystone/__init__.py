"""Everything that reaches into Keystone's own application."""

__all__ = [
    "application",
    "eventlet_resolver",
    "needless_warnings",
    "readiness",
    "saml_schemas",
    "series",
    "sqlite",
]
