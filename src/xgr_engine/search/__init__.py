"""Level-by-level search over a filled cache: ``host`` with shapes that follow the data, ``device`` with fixed ones."""
