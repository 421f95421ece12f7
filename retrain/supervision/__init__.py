"""The owner of what user code may do: whoever waits for it keeps the deadline."""
