"""One command each: `python -m benchmarks.NAME` prints a table whose ratios come from one run."""
