"""The version, in the one place that the build and the package both read."""

__all__ = ["__version__"]

__version__ = "0.1.0"
