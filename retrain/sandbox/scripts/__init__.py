"""Scripts that run in a sandbox, in an interpreter without this package."""
