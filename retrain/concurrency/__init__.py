"""Deadlines, threads, folder locks and the watchdog: every await has an owner and a deadline."""
