"""A local training service that speaks the Tinker and the Weaver protocol over one torch engine.

From the bottom up: errors and fields (values of requests); tuning, passes and trainer (one model in
training), thread (that all trainers belong to) and memory; store (checkpoints on disk), snapshots
(their weights), samplers (live ones) and fleet (vLLM servers); jobs (numbered work), state and core
(the service without a protocol); protocol (what both protocols share), tinker and weaver; access
(who may call), app (the ASGI app), http_server and serve (the command). Nothing is imported here:
torch is heavy.
"""
