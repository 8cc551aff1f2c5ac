"""Sparse attention: a prompt's KV may lie anywhere, and only the blocks that matter are attended
to.

One host (:mod:`ucm.sparse.method`) drives small pure *selectors* (:mod:`ucm.sparse.selectors`): it
owns windows, budgets and steps (:mod:`ucm.sparse.policy`), the representations of blocks
(:mod:`ucm.sparse.rep_store`), when blocks are chosen (:mod:`ucm.sparse.retriever`) and which lie on
the device (:mod:`ucm.sparse.residency`). :mod:`ucm.sparse.base` is the face that an engine calls
and that users subclass. ``docs/sparse.md`` says which method when,
``docs/sparse-formulas.md`` gives each formula with its source.

Nothing here imports vLLM; what computes imports torch when it is first used.
"""
