"""The commands of `prefixd` beside `serve`: each file one command, what they share in `ask.py` and `text.py`.

All of them ask a running server over its gRPC address (`--server`, PREFIXD_SERVER), except `check`, `config` and
`completion`, which need none. With `--json` a command prints one JSON value to stdout; a server's figures in it have
the shape of `status.py`. Exit status: 0 done; 1 the server does not answer, or something failed; 2 a setting or
argument is not allowed.
"""
