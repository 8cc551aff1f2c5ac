"""The prefix cache store, where the original has it."""
