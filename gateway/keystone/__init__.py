"""Everything that reaches into Keystone's own application."""
