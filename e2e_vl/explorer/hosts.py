"""Who can open the explorer's page: addresses to listen on, and names by which the page may be asked for."""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = ("localhost", LOOPBACK, "[::1]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str) -> list[str]:
    """Return the values of the `Host` header that a page listening on `host` answers to; "*": any.

    Without this check, a web site whose name leads to this machine (DNS rebinding) could use the page through the
    browser of its visitor. A page that is open to the network may have any name.
    """
    return [*LOCAL_NAMES, host] if is_loopback(host) else ["*"]
