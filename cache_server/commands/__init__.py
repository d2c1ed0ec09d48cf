"""The commands of `prefixd` beside `serve`: each file one command, what they share in `ask.py` and `text.py`.

All of them ask a running server over its gRPC address (`--server`, PREFIXD_SERVER), except `check`, `config` and
`completion`, which need none. With `--json` each prints one JSON value to stdout, whose fields `docs/cli.md` lists.
Exit status: 0 done; 1 the server does not answer, or something failed; 2 a setting or argument is not allowed.
"""
