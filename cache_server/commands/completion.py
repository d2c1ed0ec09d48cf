"""`prefixd completion`: what a shell needs to complete commands and options."""

import click
from click.shell_completion import get_completion_class

from cache_server.commands.text import fail


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    bash: prefixd completion bash > ~/.local/share/bash-completion/completions/prefixd
    """
    cls = get_completion_class(shell)
    if cls is None:
        fail(1, f"completion: click knows no {shell}")
    click.echo(cls(context.find_root().command, {}, "prefixd", "_PREFIXD_COMPLETE").source())
