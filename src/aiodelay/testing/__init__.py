"""Test kit: virtual time for programs that schedule messages."""
