"""HTTP to a service: retries, refusals, redaction."""
