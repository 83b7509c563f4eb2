"""`rebound`: copies aiokafka's functions so that they use other classes.

aiokafka's methods name the classes that they use: a consumer's constructor makes an `AIOKafkaClient`. Without a copy, a
subclass that needs another class would have to repeat the whole method.
"""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType
from typing import Any

__all__ = ["rebound"]


def rebound(function: FunctionType, **names: Any) -> Any:  # noqa: ANN401 - aiokafka has no types
    """Return a copy of a function in which some global names refer to other objects.

    The function and its module do not change, so the user's own clients keep aiokafka's classes.

    Args:
        function: A function or method of aiokafka.
        names: The new object for each global name that the function uses.

    Raises:
        ImportError: The function does not use one of the names, so the copy would behave like the original.
    """
    if unused := sorted(names.keys() - set(function.__code__.co_names)):
        raise ImportError(f"aiokafka's {function.__qualname__} does not use {', '.join(unused)}")
    namespace = function.__globals__ | names
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)
