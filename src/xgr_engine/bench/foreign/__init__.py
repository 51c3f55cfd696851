"""Engines of others in a process of their own: ``worker`` is the program, ``process`` starts it and talks to it."""
