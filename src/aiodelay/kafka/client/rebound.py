"""Copies of aiokafka's functions that use classes of ours.

aiokafka's methods name the classes that they make: a consumer's constructor makes `AIOKafkaClient`. A subclass has no
other way to make them another class than to repeat such a method.
"""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType
from typing import Any

__all__ = ["rebound"]


def rebound(function: FunctionType, **names: Any) -> Any:  # noqa: ANN401 - aiokafka has no types
    """Return a copy of a function that finds other things under some names of its module.

    The function and its module stay as they are, so nobody else sees the other things.

    Args:
        function: A function or method of aiokafka's.
        names: The other things, by the names under which the function looks them up.

    Raises:
        ImportError: The function does not use one of the names, so the copy would do as aiokafka does.
    """
    if unused := sorted(names.keys() - set(function.__code__.co_names)):
        raise ImportError(f"aiokafka's {function.__qualname__} does not use {', '.join(unused)}")
    namespace = function.__globals__ | names
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)
