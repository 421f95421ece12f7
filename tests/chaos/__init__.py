"""Campaigns that try to break the promises: simulated histories, kills, and tables of faults."""
