"""HTTP: calls to a service, their retries and refusals, the network under them; and serving."""
