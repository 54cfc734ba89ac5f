"""What tests of verbs share with those of an emulated cluster."""

from tests.emulated.conftest import namespaces

__all__ = ["namespaces"]
