"""The chat endpoint: an agent's rollout calls the run's sampler as if it were a vendor's API.

- `server`: a private URL and key per rollout, disconnects, errors; `connections` is its HTTP,
  `guests` are the rollouts
- `calls`: the calls of a rollout, and by `histories` which earlier one each continues
- `openai`, `completions`, `responses`, `anthropic`: the APIs, as conversions from and to `calls`;
  `api` is what they share
- `public`: the endpoint of one model for any client; `live` streams its replies token by token
- `child`: a process that calls an agent's function
"""
