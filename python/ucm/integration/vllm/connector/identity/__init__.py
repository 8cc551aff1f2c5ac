"""The names under which KV is stored: the identity of what an engine computes, and the keys of its
blocks.

:mod:`.engine_identity` describes the engine from its configuration, :mod:`.weights` adds the digest
of the weights' files, and :mod:`.live_identity` follows weights that are replaced while the engine
runs. :mod:`.keys` hashes the tokens of a request into block keys under that identity, with the
extra keys of adapters and multimodal items.
"""
