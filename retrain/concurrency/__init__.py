"""Deadlines, threads and child processes: each has an owner, and something that ends it."""
