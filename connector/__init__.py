"""The vLLM plug-in. `PrefixCacheConnector` is imported when it is asked for: this package itself needs no vLLM.

vLLM resolves the class while it checks its configuration, in the process that the operator started and before it
loads anything. It hands no settings to that look-up, and gives its connectors none until the model is loaded; so the
settings are read from the frame that asks (docs/decisions/0002). A mistake in them costs seconds, not minutes.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PrefixCacheConnector":
        _check_name(name, sys._getframe(1))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_settings(sys._getframe(1))
    from connector.plugin import PrefixCacheConnector

    return PrefixCacheConnector


def _asking(frame: Any) -> tuple[Any, Any]:
    """The `kv_transfer_config` of the frames that ask, and the parallel configuration beside it; None where not."""
    transfer = None
    for _ in range(4):
        if frame is None:
            break
        transfer = transfer or frame.f_locals.get("kv_transfer_config")
        parallel = getattr(frame.f_locals.get("self"), "parallel_config", None)
        if transfer is not None and parallel is not None:
            return transfer, parallel
        frame = frame.f_back
    return transfer, None


def _check_name(name: str, frame: Any) -> None:
    """Ends the process with one line if vLLM was told to look for a class here that is not ours."""
    transfer, _ = _asking(frame)
    if (
        getattr(transfer, "kv_connector", None) == name
        and getattr(transfer, "kv_connector_module_path", None) == "connector"
    ):
        raise SystemExit(f"prefixd: kv_connector = {name[:80]!r}: PrefixCacheConnector is allowed")


def _check_settings(frame: Any) -> None:
    """Ends the process with one line if a caller's `kv_transfer_config` names us with settings we cannot take."""
    transfer, parallel = _asking(frame)
    if getattr(transfer, "kv_connector", None) != "PrefixCacheConnector":
        return
    from connector.config import ConfigError, ConnectorConfig

    try:
        ConnectorConfig.parse(transfer.kv_connector_extra_config)
    except ConfigError as error:
        raise SystemExit(f"prefixd: {error}") from None
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, key, 1) or 1
        if size > 1:
            raise SystemExit(f"prefixd: {key} = {size}: only 1 is allowed with PrefixCacheConnector")
