"""HKVD, by the name of the documents that ucm comes from."""

from ucm.sparse.blend.tokens import HKVDCalculator as HKVDCalculator
