"""Wraps a module: turns its calls into keys and static inputs, and asks the manager. Captures nothing itself."""
