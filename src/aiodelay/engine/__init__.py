"""The loops inside `async with scheduler`.

Begin with `lifecycle`, which opens and closes them. `sending` brings commands to the store; `delivery` brings messages
from it.
"""

__all__: list[str] = []
