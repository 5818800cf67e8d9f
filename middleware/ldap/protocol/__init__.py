"""LDAP (RFC 4511) on one connection: messages, transport, TLS."""
