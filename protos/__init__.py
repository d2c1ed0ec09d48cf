"""The wire contract, `kv_cache.proto`, and the modules generated from it (`scripts/generate-stubs`)."""

# What this release speaks: all versions from the lower to the higher one, with whoever speaks one of them.
MIN_PROTOCOL_VERSION = 1
PROTOCOL_VERSION = 1

# The one place where the version of the distribution stands: pyproject.toml reads it here.
__version__ = "0.1.0"
