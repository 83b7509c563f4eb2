"""Grant and revoke the rights of users in a Kafka, and wait until the change is in effect."""

from __future__ import annotations

import time

from confluent_kafka.admin import AclBinding, AclBindingFilter, AdminClient  # type: ignore[attr-defined]

__all__ = ["grant", "revoke"]

WAIT_S = 60.0


def grant(admin: AdminClient, *rights: AclBinding) -> None:
    """Grant rights. Return when the broker applies them, which is later than its answer that they are stored."""
    for each in admin.create_acls([*rights]).values():
        each.result(WAIT_S)
    for right in rights:
        _wait_for(admin, right, is_there=True)


def revoke(admin: AdminClient, right: AclBinding) -> None:
    """Revoke a right. Return when the broker applies the change."""
    (ended,) = admin.delete_acls([_as_filter(right)]).values()
    ended.result(WAIT_S)
    _wait_for(admin, right, is_there=False)


def _wait_for(admin: AdminClient, right: AclBinding, *, is_there: bool) -> None:
    deadline = time.monotonic() + WAIT_S
    while bool(admin.describe_acls(_as_filter(right)).result(WAIT_S)) is not is_there:
        assert time.monotonic() < deadline, f"the broker does not heed {right}"
        time.sleep(0.02)


def _as_filter(right: AclBinding) -> AclBindingFilter:
    where = right.restype, right.name, right.resource_pattern_type
    return AclBindingFilter(*where, right.principal, right.host, right.operation, right.permission_type)
