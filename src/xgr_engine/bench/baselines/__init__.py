"""What the engine is measured against: one module per contender, imported when it is asked for."""
