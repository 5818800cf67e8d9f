"""A gate for benchmarks that noise cannot fool: a pytest plugin for any project.

``pip install keyfront[bench]`` gives pytest the fixtures ``paired``, ``counted`` and
``instructions``; see docs/gate.md. Nothing of it is imported before a test asks for one of them.
"""

__all__ = ["plugin"]
