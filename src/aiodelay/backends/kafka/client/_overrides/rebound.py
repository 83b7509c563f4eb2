"""Copies of aiokafka's functions that use classes of ours.

aiokafka's methods name the classes that they make: a consumer's constructor makes `AIOKafkaClient`. A subclass that
wants another class would have to repeat the whole method.
"""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType
from typing import Any

__all__ = ["rebound"]


def rebound(function: FunctionType, **names: Any) -> Any:  # noqa: ANN401 - aiokafka has no types
    """Return a copy of a function in which some names of its module mean other things.

    The function and its module do not change, so the user's own clients keep aiokafka's classes.

    Args:
        function: A function or method of aiokafka's.
        names: The other things, by the names that the function looks up.

    Raises:
        ImportError: The function does not use one of the names, so the copy would do the same as aiokafka.
    """
    if unused := sorted(names.keys() - set(function.__code__.co_names)):
        raise ImportError(f"aiokafka's {function.__qualname__} does not use {', '.join(unused)}")
    namespace = function.__globals__ | names
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)
