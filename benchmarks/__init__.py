"""Measurements of keyfront: each prints the figure that README or docs cites."""

__all__ = ["gate"]
