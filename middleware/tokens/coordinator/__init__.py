"""Coordinators: where the epochs of the token cache are kept."""
