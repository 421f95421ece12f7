"""`python -m retrain.run config.yaml`, the same as `retrain run config.yaml`."""

from retrain.cli.process import leave
from retrain.cli.run import main

if __name__ == "__main__":
    leave(main())
