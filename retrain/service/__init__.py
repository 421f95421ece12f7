"""A local training service that speaks the Tinker and the Weaver protocol over one torch engine.

From the bottom up: errors, trainer (one model in training), store (checkpoints on disk), jobs
(numbered work), samplers (live snapshots), state and core (the service without a protocol); bodies
and protocol (what both protocols share), tinker and weaver; app (the ASGI app) and serve (the
command). Nothing is imported here: torch is heavy.
"""
