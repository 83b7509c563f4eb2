"""The loops inside `async with scheduler`.

Begin with `lifecycle`, which starts and ends them, and with `subscriptions`, which holds the handlers and sinks that
are served. `sending` brings commands to the store; `delivery` brings messages from the store.

`Scheduler` inherits most of its methods from `openable`, `sending.commands`, `registration` and `control`.
"""

__all__: list[str] = []
