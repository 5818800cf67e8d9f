"""Trying plans out: the user's own application under several of them, loaded in turn."""
