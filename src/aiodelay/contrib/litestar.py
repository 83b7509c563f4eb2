"""`AiodelayPlugin`: opens a scheduler with a Litestar application, and gives it to route handlers."""

from __future__ import annotations

from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.plugins import InitPlugin

from aiodelay import ConfigurationError, Scheduler

__all__ = ["AiodelayPlugin"]


class AiodelayPlugin(InitPlugin):
    """A plugin for Litestar. The scheduler is open while the application serves.

    Litestar enters the lifespans of the application first, then the lifespans of plugins, in the order of the plugins.
    So the scheduler's handlers can use the resources of your lifespans, and of the plugins before this one.

    Args:
        scheduler: The scheduler.
        name: The dependency of route handlers: they declare `scheduler: NamedDependency[Scheduler]`.
    """

    __slots__ = ("_name", "_scheduler")

    def __init__(self, scheduler: Scheduler, *, name: str = "scheduler") -> None:
        self._scheduler, self._name = scheduler, name

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add the scheduler's lifespan, and the scheduler as a dependency.

        Raises:
            ConfigurationError: The application has a dependency of this name.
        """
        if self._name in app_config.dependencies:
            raise ConfigurationError("AiodelayPlugin name", repr(self._name), "a name that no dependency has")
        app_config.lifespan.append(self._scheduler.lifespan())
        app_config.dependencies[self._name] = Provide(lambda: self._scheduler, sync_to_thread=False)
        return app_config
