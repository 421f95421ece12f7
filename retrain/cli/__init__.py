"""The commands: `retrain run | check | report | chat | serve | schema`.

- `commands`: the command line; `run` is `retrain run`, `chat` is `retrain chat` and
  `retrain serve --openai`
- `process`: the event loop of a command, its signals and its exit code
"""
