"""``keyfront render``: the configuration files of a deployment, rendered from a plan.

:mod:`.settings` has what the operator tells, :mod:`.lineups` knows which line-up takes which files,
:mod:`.writer` makes their text and writes them, :mod:`.versions` asks the servers of this machine
for their versions, and :mod:`.certificates` makes a self-signed pair for trying.
"""
