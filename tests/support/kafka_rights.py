"""What users of a Kafka may do there: given and taken so that it holds at once."""

from __future__ import annotations

import time

from confluent_kafka.admin import AclBinding, AclBindingFilter, AdminClient  # type: ignore[attr-defined]

__all__ = ["grant", "revoke"]

WAIT_S = 60.0


def grant(admin: AdminClient, *rights: AclBinding) -> None:
    """Let rights hold, and return once the broker heeds them: it says that they are stored before it does."""
    for each in admin.create_acls([*rights]).values():
        each.result(10)
    for right in rights:
        _wait_for(admin, right, is_there=True)


def revoke(admin: AdminClient, right: AclBinding) -> None:
    """Let a right hold no longer, and return once the broker heeds that."""
    (ended,) = admin.delete_acls([_as_filter(right)]).values()
    ended.result(10)
    _wait_for(admin, right, is_there=False)


def _wait_for(admin: AdminClient, right: AclBinding, *, is_there: bool) -> None:
    deadline = time.monotonic() + WAIT_S
    while bool(admin.describe_acls(_as_filter(right)).result(10)) is not is_there:
        assert time.monotonic() < deadline, f"the broker does not heed {right}"
        time.sleep(0.02)


def _as_filter(right: AclBinding) -> AclBindingFilter:
    where = right.restype, right.name, right.resource_pattern_type
    return AclBindingFilter(*where, right.principal, right.host, right.operation, right.permission_type)
