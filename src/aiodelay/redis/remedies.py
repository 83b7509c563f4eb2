"""Causes that keep a store from being opened, found by the words of its error, each with its remedy."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["explained"]


class _Cause(Struct, frozen=True):
    signs: tuple[str, ...]
    meaning: str
    mend: str


_CREDENTIALS = "the server's user and password in the URL, redis://user:password@host, percent-encoded"
_CAUSES = (
    _Cause(("command 'HELLO'",), "the server does not speak RESP3", "protocol=2"),
    _Cause(
        ("invalid username-password pair", "WRONGPASS", "without any password configured"),
        "the server refuses this user or password",
        _CREDENTIALS,
    ),
    _Cause(("NOAUTH", "Authentication required"), "the server wants a password", _CREDENTIALS),
    _Cause(
        ("DB index is out of range", "Invalid Database"),
        "the server has no database of this number",
        "another number at the end of the URL; a server has 0 to 15, unless its setting `databases` says otherwise",
    ),
    _Cause(
        ("CERTIFICATE_VERIFY_FAILED",),
        "the server's certificate is not trusted",
        "ca_certs=<file of its authority>, and in the URL the host that the certificate names",
    ),
    _Cause(
        (
            "in the TLS handshake",
            "WRONG_VERSION_NUMBER",
            "RECORD_LAYER_FAILURE",
            "record layer failure",
            "UNEXPECTED_MESSAGE",
        ),
        "the server does not speak TLS at this port",
        "redis:// in place of rediss://, or the port for TLS",
    ),
    _Cause(
        ("Connection closed by server", "Connection reset by peer"),
        "the server ended the connection at once, as one does that speaks TLS at this port",
        "rediss:// in place of redis://, or the port without TLS",
    ),
    _Cause(
        (
            *(
                "Connect call failed",
                "Connection refused",
                "No route to host",
                "Network is unreachable",
                "Timeout connecting",
            ),
            *("Name or service", "nodename nor servname", "name resolution", "No address associated", "No such file"),
        ),
        "nothing answers there",
        "start the server, or correct host and port in the URL",
    ),
)


def explained(reason: str) -> str:
    """Return the reason of an error at the opening, followed by its meaning and its remedy where they are known."""
    for cause in _CAUSES:
        if any(sign in reason for sign in cause.signs):
            return f"{reason.rstrip('. ')}; {cause.meaning}. To mend it: {cause.mend}"
    return reason
