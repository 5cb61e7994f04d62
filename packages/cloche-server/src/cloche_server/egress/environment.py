"""What a command's environment must say so that ordinary programs use the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROXY_PORT: Final = 3128
SLOTS_MAX: Final = 63
TRUST_FILE: Final = "/run/cloche/trust.pem"
JAVA_TRUST_FILE: Final = "/run/cloche/cacerts"
_NO_PROXY: Final = "localhost,127.0.0.1,::1"
_TRUST_NAMES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
)


def proxy_address(slot: int) -> str:
    """Where the agent listens for one slot's connections, inside."""
    assert 0 <= slot <= SLOTS_MAX, "a slot is 0 to 63"
    return f"127.127.0.{1 + slot}:{PROXY_PORT}"


def environment(slot: int, *, trust: bool, presets: Mapping[str, str] | None = None) -> dict[str, str]:
    """Not ALL_PROXY: some clients fail on it. `presets`: what tools need to use the operator's mirrors."""
    proxy = f"http://{proxy_address(slot)}"
    values = {
        "HTTP_PROXY": proxy,
        "http_proxy": proxy,
        "HTTPS_PROXY": proxy,
        "https_proxy": proxy,
        "NO_PROXY": _NO_PROXY,
        "no_proxy": _NO_PROXY,
        "NODE_USE_ENV_PROXY": "1",
        "CLOCHE_SOCKS": f"socks5h://{proxy_address(slot)}",
        **(presets or {}),
    }
    if trust:
        values |= dict.fromkeys(_TRUST_NAMES, TRUST_FILE)
        values["JAVA_TOOL_OPTIONS"] = (
            f"-Djavax.net.ssl.trustStore={JAVA_TRUST_FILE} -Djavax.net.ssl.trustStorePassword=changeit"
        )
    return values
