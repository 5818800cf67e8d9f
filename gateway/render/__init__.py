"""Configuration files of a deployment: rendered from a plan, and kept in a folder.

:mod:`.servers` knows which line-up takes which files, :mod:`.files` makes their text,
:mod:`.folder` writes them, :mod:`.versions` asks the servers of this machine what they are, and
:mod:`.certificates` makes a pair for trying. :mod:`.site` is what the operator tells.
"""
