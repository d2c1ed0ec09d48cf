"""The wire contract, `kv_cache.proto`, and the modules generated from it (`scripts/generate-stubs`)."""

PROTOCOL_VERSION = 1

# The one place where the version of the distribution stands: pyproject.toml reads it here.
__version__ = "0.1.0"
