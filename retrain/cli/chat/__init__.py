"""Talk to a model or to what a run trained: `retrain chat` and `retrain serve --openai`."""
