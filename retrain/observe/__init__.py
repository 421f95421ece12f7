"""What a run writes and shows: files, metrics, console, report, loggers."""
