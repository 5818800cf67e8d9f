"""``keyfront plan --measure``: runs the user's application under several plans, loaded in turn.

:mod:`.candidates` are the plans, :mod:`.server` runs each under uWSGI, :mod:`.generator` loads it,
:mod:`.rounds` says when, and :mod:`.results` chooses the best.
"""

__all__ = ["candidates", "results", "rounds", "server"]
