"""``python -m runner`` is ``cloudrun``."""

from runner.cli.main import main

if __name__ == "__main__":
    main()
