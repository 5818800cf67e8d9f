"""One page of all results: what keyfront changes, in words first, then figures and tables."""
