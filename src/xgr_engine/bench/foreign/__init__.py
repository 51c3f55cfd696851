"""Other people's engines, each in its own process: ``worker`` is the program, ``process`` starts it and talks to it."""
