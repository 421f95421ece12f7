"""Deadlines, threads, locks of folders and the watchdog: every await has an owner and a deadline."""
