"""Known causes why a Redis store cannot be opened, each with its remedy."""

from __future__ import annotations

from aiodelay.backends.remedies import NO_ANSWER, UNKNOWN_HOST, Cause

__all__ = ["CAUSES"]

_CREDENTIALS = "put the server's user and password into the URL, redis://user:password@host, percent-encoded"
CAUSES: tuple[Cause, ...] = (
    Cause(
        ("which the cluster names as", "which the Sentinels name as", "the Sentinels name it as the primary"),
        "start that server; or, if it has another address here, put announce=<its address in this text>=<its address"
        " here> into the URL",
    ),
    Cause(
        ("SELECT is not allowed in cluster mode",),
        "remove the number at the end of the URL",
        "a cluster has database 0",
    ),
    Cause(
        ("CLUSTERDOWN", "names the owner of slot"),
        "start the nodes that are down; CLUSTER INFO and CLUSTER NODES name them",
        meaning="the cluster serves no calls: most of its primaries, or the node of this slot, are away",
    ),
    Cause(
        ("no Sentinel accepts the login",),
        "put sentinel_password=, and for a user sentinel_username=, into the URL",
        meaning="the Sentinels have a user and a password of their own",
    ),
    Cause(("no Sentinel answers",), "start the Sentinels, or correct their hosts and ports in the URL"),
    Cause(("command 'HELLO'",), "put protocol=2 into the URL", meaning="the server does not speak RESP3"),
    Cause(
        ("invalid username-password pair", "WRONGPASS", "without any password configured"),
        _CREDENTIALS,
        meaning="the server refuses this user or password",
    ),
    Cause(("NOAUTH", "Authentication required"), _CREDENTIALS, meaning="the server wants a password"),
    Cause(
        ("DB index is out of range", "Invalid Database"),
        "put another number at the end of the URL; a server has the databases 0 to 15, unless its setting `databases`"
        " says otherwise",
        meaning="the server has no database of this number",
    ),
    Cause(
        ("CERTIFICATE_VERIFY_FAILED",),
        "put ca_certs=<file of the certificate's authority> into the URL, and use the host that the certificate names",
        meaning="the server's certificate is not trusted",
    ),
    Cause(
        (
            "in the TLS handshake",
            "WRONG_VERSION_NUMBER",
            "RECORD_LAYER_FAILURE",
            "record layer failure",
            "UNEXPECTED_MESSAGE",
        ),
        "use redis:// in place of rediss://, or the port for TLS",
        meaning="the server does not speak TLS at this port",
    ),
    Cause(
        ("Connection closed by server", "Connection reset by peer"),
        "use rediss:// in place of redis://, or the port without TLS",
        meaning="the server ended the connection at once; the port probably expects TLS",
    ),
    Cause(
        (*NO_ANSWER, "Timeout connecting", *UNKNOWN_HOST, "No such file"),
        "start the server, or correct host and port in the URL",
        meaning="nothing answers at this address",
    ),
)
