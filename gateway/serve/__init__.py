"""``keyfront serve``: Keystone from nothing to answering, on this machine, with one command.

``state`` makes and checks the folder that holds a Keystone; ``shapes`` knows the server line-ups;
``supervisor`` starts, watches and stops their processes; ``command`` puts them together.
"""
