"""Publishers, subscribers and demand, for users. The public names of `aiodelay.ports.reactive`."""

from aiodelay.ports.reactive import Publisher, Subscriber, Subscription

__all__ = ["Publisher", "Subscriber", "Subscription"]
