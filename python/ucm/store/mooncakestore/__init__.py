"""The store in a pool of Mooncake, where the original has it."""
