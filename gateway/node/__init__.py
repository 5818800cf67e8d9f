"""A node: the processes of one served application, what they count, and whether they are wanted.

``KEYFRONT_NODE`` names the folder that they share. Without it nothing is counted for others and a
node cannot be drained; health is answered all the same.
"""

__all__ = ["counters", "drain", "health", "installation", "login_turns"]
