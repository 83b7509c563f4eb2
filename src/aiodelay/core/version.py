"""The version of aiodelay. The build and the package both read it here."""

__all__ = ["__version__"]

__version__ = "0.1.0"
