"""WSGI filters for a paste pipeline, and what they stand on."""

__all__ = ["ldap", "tokens"]
