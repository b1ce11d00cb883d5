"""`python -m paged` is the `paged` command."""

from paged.cli import main

if __name__ == "__main__":
    main()
