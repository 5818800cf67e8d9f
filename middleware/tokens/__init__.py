"""Token validation from a cache that follows each change Keystone commits."""
