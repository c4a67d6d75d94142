"""`python -m attngen`: the command line."""

from attngen.cli.main import main

if __name__ == "__main__":
    main()
