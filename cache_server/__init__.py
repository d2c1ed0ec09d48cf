"""The cache server of prefixd: names (index), bytes (arena), promises (leases) and the wire that serves them.

Read `cache.py` first, it is the story; every other file is a leaf that does not know it. This package never
imports `connector`, `vllm` or `torch`; `grpc` and `protos` stop at `service`, `server` and `cli`.
"""
