"""vLLM as the sampler: its HTTP client, the servers of a run, and how weights get there."""
