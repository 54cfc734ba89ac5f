"""What tests of verbs share with those of an emulated cluster."""

from tests.runtimes.emulated.conftest import namespaces

__all__ = ["namespaces"]
