"""`python -m cache_server` is `prefixd`."""

from cache_server.cli import main

if __name__ == "__main__":
    main(prog_name="prefixd")
