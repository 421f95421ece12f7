"""One command each: `python -m benchmarks.NAME` prints its table, ratios taken in one run."""
