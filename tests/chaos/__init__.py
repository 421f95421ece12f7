"""Campaigns that try to violate the guarantees: simulated histories, kills, tables of faults."""
