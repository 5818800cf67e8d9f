"""Reloads that nobody waits for: the new application is loaded while the old one still answers.

:mod:`.uwsgi_manager` runs uWSGI, and for a reload a second one beside it, on the sockets that it
keeps open itself; :mod:`.uwsgi_ini` reads and writes the ini files that this takes.
:mod:`.daemons` replaces mod_wsgi's daemon processes one after the other.
"""

__all__ = ["daemons", "uwsgi_manager"]
