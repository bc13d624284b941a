"""The version, apart from the package's own names, so that every floor can read it."""

__version__ = "0.1.0"
