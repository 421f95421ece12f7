"""The commands: `retrain run | check | report | chat | serve | schema`."""
