"""The vLLM plug-in. `PrefixCacheConnector` is imported when it is asked for: this package itself needs no vLLM.

vLLM resolves the class while it checks its configuration, in the process that the operator started and before it
loads anything. It hands no settings to that look-up, and gives its connectors none until the model is loaded; so the
settings are read from the frame that asks (docs/decisions/0002). A mistake in them costs seconds, not minutes.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PrefixCacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_settings(sys._getframe(1))
    from connector.plugin import PrefixCacheConnector

    return PrefixCacheConnector


def _check_settings(frame: Any) -> None:
    """Ends the process with one line if a caller's `kv_transfer_config` names us with settings we cannot take."""
    for _ in range(3):
        if frame is None:
            return
        transfer = frame.f_locals.get("kv_transfer_config")
        if getattr(transfer, "kv_connector", None) == "PrefixCacheConnector":
            from connector.config import ConfigError, ConnectorConfig

            try:
                ConnectorConfig.parse(transfer.kv_connector_extra_config)
            except ConfigError as error:
                raise SystemExit(f"prefixd: {error}") from None
            return
        frame = frame.f_back
