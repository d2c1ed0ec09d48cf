"""Where a setting comes from: flag, else environment variable, else the one settings file, else default.

A command of class `SettingsCommand` gets this for each of its options without anything being said twice: `--redis-ttl`
is the variable PREFIXD_REDIS_TTL and the key `redis-ttl` of the file. click does the reading and remembers the source
of each value; what is added here is the file, and that all three are closed: a flag, a variable that begins with
PREFIXD_ or a key that is none of ours is refused with the nearest that is.

Not here: what values are allowed (`config.py`, `redis_config.py`), which options there are (`cli.py`).
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from cache_server.cli_security import CLIENT_VARIABLES
from cache_server.commands.text import fail
from cache_server.config import ConfigError

VARIABLE_PREFIX: Final = "PREFIXD_"
CONFIG_OPTION: Final = "config"
_NO_SETTINGS: Final = (CONFIG_OPTION, "json")
# Variables that mean something to other commands, to deploy/ (OPTIONS, LIMIT), to the scripts or to the tests.
OTHER_VARIABLES: Final = (
    "PREFIXD_SERVER",
    *CLIENT_VARIABLES,
    "PREFIXD_REDIS_PASSWORD",
    "PREFIXD_OPTIONS",
    "PREFIXD_LIMIT",
    "PREFIXD_PYTHON",
    "PREFIXD_REDIS_SERVER",
)
OTHER_PREFIXES: Final = ("PREFIXD_TEST_",)
# Kubernetes sets these in every pod beside a Service whose name begins with prefixd; nobody asked for them.
_OF_KUBERNETES: Final = re.compile(
    r"PREFIXD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def key_of(parameter: click.Parameter) -> str:
    """'redis-ttl' for --redis-ttl."""
    return parameter.opts[0].removeprefix("--")


def variable_of(parameter: click.Parameter) -> str:
    """'PREFIXD_REDIS_TTL' for --redis-ttl."""
    return VARIABLE_PREFIX + key_of(parameter).upper().replace("-", "_")


def settings_of(command: click.Command) -> list[click.Parameter]:
    """The options that have a variable and a key in the file."""
    return [one for one in command.params if one.opts[0].startswith("--") and key_of(one) not in _NO_SETTINGS]


class SettingsCommand(click.Command):
    """A command whose options are settings."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        for parameter in self.settings:
            parameter.envvar = variable_of(parameter)
            if isinstance(parameter, click.Option):
                parameter.show_envvar = True
        self.params.append(
            click.Option(
                [f"--{CONFIG_OPTION}"],
                envvar=VARIABLE_PREFIX + CONFIG_OPTION.upper(),
                show_envvar=True,
                metavar="FILE",
                is_eager=True,
                expose_value=False,
                callback=self._read_file,
                help="Settings as in --help, one key each, without the dashes before it: FILE.yaml or FILE.toml.",
            )
        )

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        """As click does it; a setting that is refused ends the process with one line."""
        try:
            return super().make_context(*arguments, **more)
        except ConfigError as error:
            fail(2, str(error))

    @property
    def settings(self) -> list[click.Parameter]:
        """All options but --config, --json and --help."""
        return settings_of(self)

    def _read_file(self, context: click.Context, _option: click.Parameter, file: str | None) -> str | None:
        by_key = {key_of(parameter): parameter for parameter in self.settings}
        check_variables(os.environ, map(variable_of, by_key.values()))
        if file is not None:
            given = read_file(file)
            for key, value in given.items():
                if key not in by_key:
                    raise ConfigError(f"{file}: {key}", _shown(value), f"no such setting{_nearest(key, by_key)}")
                _check_shape(f"{file}: {key}", value, by_key[key])
            context.default_map = {by_key[key].name: value for key, value in given.items()}
            context.meta[CONFIG_OPTION] = file
        return file

    def origins(self, context: click.Context) -> dict[str, str]:
        """Key → where its value came from, in words."""
        return {key_of(one): self._origin(context, one) for one in self.settings}

    @staticmethod
    def _origin(context: click.Context, parameter: click.Parameter) -> str:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE:
            return f"flag --{key_of(parameter)}"
        if source is ParameterSource.ENVIRONMENT:
            return f"environment {variable_of(parameter)}"
        if source is ParameterSource.DEFAULT_MAP:
            return f"file {context.meta[CONFIG_OPTION]}"
        return "default"


def is_given(context: click.Context, name: str) -> bool:
    """Whether anybody set the parameter, in whatever way."""
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def read_file(file: str) -> dict[str, Any]:
    """Key → value of a YAML or TOML file, in its own words; ConfigError."""
    path = Path(file)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(CONFIG_OPTION, file, f"a file that can be read ({reason})") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(CONFIG_OPTION, file, f"TOML ({error})") from None
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(file, text)
    raise ConfigError(CONFIG_OPTION, file, "a file whose name ends with .yaml, .yml or .toml")


def _read_yaml(file: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        top = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(CONFIG_OPTION, file, f"YAML ({' '.join(str(error).split())})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(CONFIG_OPTION, file, "one setting per line, KEY: VALUE")
    keys = [key.value for key, _ in top.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"{file}: {twice}", "twice", "each key once")
    return {str(key): value for key, value in content.items()}


def _check_shape(where: str, value: Any, parameter: click.Parameter) -> None:
    many = getattr(parameter, "multiple", False)
    values = value if many and isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values) or not values:
        raise ConfigError(where, _shown(value), "a list of texts" if many else "one text or number")
    if many and not isinstance(value, list):
        raise ConfigError(where, _shown(value), "a list, also of one")


def check_variables(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse a variable that looks like ours and is not."""
    allowed = [*known, VARIABLE_PREFIX + CONFIG_OPTION.upper(), *OTHER_VARIABLES]
    for name, value in environment.items():
        if (
            name.startswith(VARIABLE_PREFIX)
            and name not in allowed
            and not name.startswith(OTHER_PREFIXES)
            and not _OF_KUBERNETES.fullmatch(name)
        ):
            raise ConfigError(name, _shown(value), f"no such variable{_nearest(name, allowed)}")


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]}?" if near else "; see prefixd serve --help"


def _shown(value: Any) -> str:
    """A value as it may stand in a message: short, and without what might be a password."""
    text = re.sub(r"//[^/@]*@", "//***@", str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
