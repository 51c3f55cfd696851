"""Whom the engine is measured against: one module a contender, imported when it is asked for."""
