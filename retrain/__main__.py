"""`python -m retrain COMMAND`, the same as the command `retrain`."""

from retrain.cli.commands import main

if __name__ == "__main__":
    main()
