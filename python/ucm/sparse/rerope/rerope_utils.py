"""The configuration of ReRoPE, by the name of the original and the book."""

from ucm.sparse.rerope.rule import default_config as default_config
