"""Servers under load: the Keystone they serve, their files, their processes."""
