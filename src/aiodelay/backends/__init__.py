"""The stores, sinks and sources of aiodelay: one package for each product. `registry` opens them by URL."""

__all__: list[str] = []
