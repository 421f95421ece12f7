"""A local training service that speaks the Tinker and the Weaver protocol over one torch engine.

From the bottom up: errors, trainer (one model in training), store (checkpoints on disk), jobs
(numbered work), samplers (live snapshots), state and core (the service without a protocol);
validation, web and bodies (what both protocols share), tinker and weaver (HTTP); app (the ASGI
app), server (the app on a port), serve (the command). Nothing is imported here: torch is heavy.
"""
