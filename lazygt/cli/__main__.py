"""``python -m lazygt.cli``: where the console script is not on PATH."""

from lazygt.cli import main

if __name__ == "__main__":
    main()
