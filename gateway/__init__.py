"""The life of a server process: entrypoints, loading, forking, serving."""
