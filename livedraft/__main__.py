"""The program. Importing the command line takes half a second, and Ctrl-C in it is no traceback either."""

import sys


def main() -> None:
    try:
        from livedraft.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
