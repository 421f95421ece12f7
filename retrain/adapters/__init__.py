"""Backends that train a batch and serve samples: one folder each, one interface (base.py)."""
