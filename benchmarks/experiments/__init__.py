"""Five published experiments, repeated: what was found then, what is found here, what differs."""
