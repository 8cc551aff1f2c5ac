"""The store on a network share, where the original has it."""
