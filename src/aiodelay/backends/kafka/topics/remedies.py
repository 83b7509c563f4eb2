"""Reasons why a Kafka cluster cannot be used, each with its remedy: a URL option, or a right to grant."""

from __future__ import annotations

import re
import shlex

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.remedies import NO_ANSWER, UNKNOWN_HOST, Cause, explained, with_remedy

__all__ = ["grant", "is_missing_right", "remedied"]

_CAUSES = (
    Cause(
        ("user or password is refused",),
        "put the broker's user and password into the URL, kafka://user:password@host:9092, percent-encoded",
    ),
    Cause(
        ("it may want a login, security=PLAINTEXT",),
        "put user and password into the URL, with security=SASL_PLAINTEXT",
    ),
    Cause(("it may want a login, security=SSL",), "put user and password into the URL, with security=SASL_SSL"),
    Cause(
        ("no login at this port, security=SASL_PLAINTEXT",),
        "use security=PLAINTEXT without user and password, or the port for logins",
    ),
    Cause(
        ("no login at this port, security=SASL_SSL",),
        "use security=SSL without user and password, or the port for logins",
    ),
    Cause(
        ("sasl= may be wrong",),
        "use sasl=PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, as the broker's setting sasl.enabled.mechanisms says",
    ),
    Cause(
        ("the broker's certificate is refused",),
        "put ca_certs=<file of its authority> into the URL, with the host that the certificate names",
    ),
    Cause(
        ("client_cert= may be missing",),
        "put client_cert=<file> and client_key=<file> into the URL, of a certificate that the broker trusts",
    ),
    Cause(("without TLS, security=SSL",), "use security=PLAINTEXT, or the port for TLS"),
    Cause(("without TLS, security=SASL_SSL",), "use security=SASL_PLAINTEXT, or the port for TLS"),
    Cause(("for TLS, security=PLAINTEXT",), "use security=SSL, or the port without TLS"),
    Cause(("for TLS, security=SASL_PLAINTEXT",), "use security=SASL_SSL, or the port without TLS"),
    Cause(UNKNOWN_HOST, "correct the host in the URL", meaning="the host name is unknown"),
    Cause(
        (*NO_ANSWER, "no answer in time"),
        "start the broker, or correct host and port, in the URL or in the broker's advertised.listeners",
        meaning="nothing answers at this address",
    ),
)
_RESOURCES = {"Topic": "--topic", "Group": "--group", "TransactionalId": "--transactional-id"}
_RIGHT = re.compile(rf"the right (\w+) on ({'|'.join(_RESOURCES)}) (.+?)( and all names with this prefix)? is missing")


def remedied(reason: str, cluster: Cluster, *, whole: str = "") -> str:
    """Return the reason why a cluster cannot be used, followed by the remedy if it is known.

    Args:
        reason: The reason in the words of `reason_of`.
        cluster: The cluster.
        whole: The whole text of the error, of which the reason may be a part.
    """
    grants = [
        grant(cluster, operation, resource, names, is_prefix=bool(prefix))
        for operation, resource, names, prefix in _RIGHT.findall(reason)
    ]
    return with_remedy(reason, "; ".join(grants)) if grants else explained(reason, _CAUSES, whole=whole)


def is_missing_right(reason: str) -> bool:
    """Say whether a reason names a missing right."""
    return _RIGHT.search(reason) is not None


def grant(cluster: Cluster, operation: str, resource: str, names: str, *, is_prefix: bool = False) -> str:
    """Return the command that grants a right to the user in a cluster's URL.

    Args:
        cluster: The cluster.
        operation: The operation, such as `Write`.
        resource: `Topic`, `Group` or `TransactionalId`.
        names: The names of the resources, separated by `, `.
        is_prefix: Whether to grant the right for all names that begin with one of `names`.
    """
    which = " ".join(f"{_RESOURCES[resource]} {name}" for name in names.split(", "))
    pattern = " --resource-pattern-type prefixed" if is_prefix else ""
    to = f"--bootstrap-server {cluster.bootstrap} --add --allow-principal {_principal(cluster)}"
    return f"kafka-acls.sh {to} --operation {operation} {which}{pattern}"


def _principal(cluster: Cluster) -> str:
    """Return the broker's name for this process. For a client certificate, only the broker's settings define it."""
    user = cluster.client.get("sasl_plain_username")
    if user is None and "ssl_context" in cluster.client:
        return "'User:<name in client_cert>'"
    return shlex.quote(f"User:{user or 'ANONYMOUS'}")
