"""LDAP (RFC 4511) on one connection: messages, transport, TLS."""

__all__ = [
    "addresses",
    "ber",
    "connection",
    "controls",
    "messages",
    "result_codes",
    "sasl_gssapi",
    "search_filter",
    "srv",
    "tls",
    "transport",
    "urls",
]
