"""The wire contract, `kv_cache.proto`, and the modules generated from it (`scripts/generate-stubs`)."""

PROTOCOL_VERSION = 1
