"""What tests of Redis start; `aiodelay.testing.servers` finds it."""

from __future__ import annotations

from aiodelay.testing.servers import Found, RedisServer, redis_programs, redis_servers, serving

__all__ = ["Found", "RedisServer", "redis_programs", "redis_servers", "serving", "start"]


def start(program: str, *options: str) -> RedisServer:
    """Start a server."""
    server = RedisServer(program, *options)
    server.start()
    return server
