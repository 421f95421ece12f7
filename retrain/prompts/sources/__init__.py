"""The built-in prompt sources: one file per source, found by its name."""
