"""The connections to a Redis server: client, options, Lua scripts, wake-ups, and the checks of a store that opens.

Begin with `client`: it sends each script and each command. `pool` lends it the connections.
"""

__all__: list[str] = []
