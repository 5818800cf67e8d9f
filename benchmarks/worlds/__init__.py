"""Real servers that measurements and tests start: private, on loopback, gone with the block."""
