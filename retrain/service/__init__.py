"""A local training service that speaks the Tinker and the Weaver protocol over one torch engine.

Lowest first: errors; trainer (one model in training), store (checkpoints on disk), jobs (numbered
work), samplers (live snapshots), validation; core (the service without a protocol); web, tinker and
weaver (HTTP); app (the ASGI app); server (it on a port); serve (the command). Nothing is imported
here: torch is heavy.
"""
