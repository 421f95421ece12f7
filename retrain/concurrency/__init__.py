"""Deadlines, threads, folder locks and child processes: each has an owner and an end."""
