"""Names of the original; see :mod:`ucm.store.factory`."""

from ucm.store.factory import StoreClass, UcmConnectorFactoryV1, select_storage, why_unavailable

__all__ = ["StoreClass", "UcmConnectorFactoryV1", "select_storage", "why_unavailable"]
