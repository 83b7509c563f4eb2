"""`Depends`: values that a handler needs besides its event. fast-depends makes them for each run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from aiodelay.errors import HandlerSignatureError

from .context import RunContext, is_context

if TYPE_CHECKING:
    from fast_depends.core import CallModel
    from fast_depends.dependencies import Dependant

__all__ = ["Dependencies", "Depends", "dependency_of"]


def Depends(dependency: Callable[..., Any]) -> Any:  # noqa: ANN401, N802 - as FastAPI's
    """Declare that a function makes the value of a handler's parameter, anew for each run.

    In one run, the function is called once, even if several parameters depend on it.

    Write `db: Annotated[Session, Depends(open_session)]`. A dependency is a function, a coroutine function, or a
    generator of either kind that yields once. The code after its `yield` runs when the handler has ended, before the
    message is settled. A dependency may have dependencies of its own, and parameters annotated with `Context` or with
    the event's type. A plain function runs in a worker thread.

    In tests, `fast_depends.dependency_provider.scope(original, other)` replaces a dependency.

    Args:
        dependency: The function that makes the value.
    """
    import fast_depends  # noqa: PLC0415 - it imports pydantic where that is installed

    return fast_depends.Depends(dependency, cast=False)


def dependency_of(parameter: Parameter, hint: object) -> Dependant | None:
    """Return the dependency of a parameter, or None. `hint` is the annotation of the parameter, with `Annotated`."""
    if "fast_depends" not in sys.modules:
        return None  # without that module, no program can have called `Depends`
    from fast_depends.dependencies import Dependant  # noqa: PLC0415 - as above

    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note for note in (parameter.default, *notes) if isinstance(note, Dependant)), None)


class Dependencies:
    """The dependencies of one handler.

    Args:
        owner: The handler's name, for errors.
        wanted: The dependencies by parameter name.
        event_class: The annotation of the handler's events: a class, or a list of a class.
        is_coroutine: Whether the handler is a coroutine function. A plain handler and its dependencies run in a thread.

    Raises:
        HandlerSignatureError: A dependency cannot be read, or cannot be called for this handler.
    """

    def __init__(self, owner: str, wanted: Mapping[str, Dependant], event_class: object, *, is_coroutine: bool) -> None:
        from fast_depends import dependency_provider  # noqa: PLC0415 - as above
        from fast_depends.core import build_call_model  # noqa: PLC0415 - as above

        self._owner, self._event_class, self._is_coroutine = owner, event_class, is_coroutine
        self._provider = dependency_provider
        self._given: dict[str, str] = {}
        self._keys: dict[str, Any] = {}
        for name, each in wanted.items():
            try:
                model = build_call_model(each.dependency, use_cache=each.use_cache, dependency_provider=self._provider)
            except Exception as error:  # noqa: BLE001 - annotations are evaluated here
                raise self._error(
                    f"a function with the parameter {name!r}, whose dependency cannot be read ({error})"
                ) from None
            self._keys[name] = self._provider.add_dependant(model)
            self._check(model)

    def _check(self, model: CallModel) -> None:
        if model.is_async and not self._is_coroutine:
            raise self._error(f"a plain function, with the coroutine function {model.call_name!r} as a dependency")
        for parameter in model.params:
            what = self._what(parameter.field_type, has_default=parameter.default_value is not Ellipsis)
            if what is None or self._given.setdefault(parameter.field_name, what) != what:
                raise self._error(
                    f"a function with the dependency {model.call_name!r}, "
                    f"in which nothing can fill the parameter {parameter.field_name!r}"
                )
        for key in model.dependencies.values():
            self._check(self._provider.get_dependant(key))

    def _what(self, hint: object, *, has_default: bool) -> str | None:
        if is_context(hint):
            return "context"
        if hint == self._event_class:
            return "event"
        return "default" if has_default else None

    def _error(self, got: str) -> HandlerSignatureError:
        allowed = "dependencies whose parameters have a default, a dependency, the type Context or the event's type"
        return HandlerSignatureError(self._owner, got, allowed)

    def _arguments(self, event: object, context: RunContext[Any]) -> dict[str, Any]:
        values = {"event": event, "context": context}
        return {name: values[what] for name, what in self._given.items() if what in values}

    def around(self, call: Callable[..., Any]) -> Callable[[Any, RunContext[Any]], Any]:
        """Return a function that makes the dependencies, calls the handler, and then ends the dependencies.

        A dependency cannot swallow the handler's exception: otherwise a failed message would look done.
        """
        if not self._is_coroutine:
            return self._around_plain(call)

        async def with_dependencies(event: object, context: RunContext[Any]) -> object:
            arguments, made = self._arguments(event, context), dict[Any, Any]()
            failure: BaseException | None = None
            async with AsyncExitStack() as stack:
                try:
                    values = {
                        name: await self._provider.get_dependant(key).asolve(
                            stack=stack, cache_dependencies=made, nested=True, **arguments
                        )
                        for name, key in self._keys.items()
                    }
                    result = await call(event, context, **values)
                except BaseException as error:
                    failure = error
                    raise
            if failure is not None:
                raise failure
            return result

        return with_dependencies

    def _around_plain(self, call: Callable[..., Any]) -> Callable[[Any, RunContext[Any]], Any]:
        def with_dependencies(event: object, context: RunContext[Any]) -> object:
            arguments, made = self._arguments(event, context), dict[Any, Any]()
            failure: BaseException | None = None
            with ExitStack() as stack:
                try:
                    values = {
                        name: self._provider.get_dependant(key).solve(
                            stack=stack, cache_dependencies=made, nested=True, **arguments
                        )
                        for name, key in self._keys.items()
                    }
                    result = call(event, context, **values)
                except BaseException as error:
                    failure = error
                    raise
            if failure is not None:
                raise failure
            return result

        return with_dependencies
