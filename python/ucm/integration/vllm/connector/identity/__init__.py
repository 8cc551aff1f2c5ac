"""The names under which KV is stored: the identity of the engine (:mod:`.engine_identity`), the
digest of its weights (:mod:`.weights`), and the keys of blocks (:mod:`.keys`)."""
