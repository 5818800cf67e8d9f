"""From a database write of Keystone to the tags of what it makes stale."""
