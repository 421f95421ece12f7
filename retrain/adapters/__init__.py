"""Who executes a batch and serves the samples: one folder per backend, one face (base.py)."""
