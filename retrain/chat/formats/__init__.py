"""The built-in tool-call formats: one file per format, found by its name."""
