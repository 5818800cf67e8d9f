"""keyfront makes OpenStack Keystone fast, steady and honest.

The parts an operator meets:

* :mod:`keyfront.gateway` -- the life of a server process: entrypoints for uWSGI and mod_wsgi,
  loading an application, what is reopened after a fork, ``keyfront serve``;
* :mod:`keyfront.middleware` -- WSGI filters for a paste pipeline;
* :mod:`keyfront.deploy` -- the configuration files of the servers, as templates.
"""

__version__ = "0.1.0"
