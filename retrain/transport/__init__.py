"""HTTP to a service: calls, retries, refusals, and the network under httpx's client."""
