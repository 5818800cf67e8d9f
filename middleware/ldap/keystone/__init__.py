"""Keystone's LDAP identity through the pool."""
