"""HTTP: calls to services, and what our own servers share.

- `client`: calls to one service; `retries` and `refusals`: what comes of a failed one; `network`:
  the connections under it
- `chat`: a model behind OpenAI's chat API; `budgets`: what its calls may cost; `replies`: a cache
- `vendors`, `training` and `tinker`: the protocols of training services
- `serving` and `web`: the settings of servers, and the requests of browsers that they reject
"""
