"""What a run writes and shows: run directory, callbacks, console, report, loggers."""
