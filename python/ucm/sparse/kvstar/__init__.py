"""KVStar MultiStep, by the names of the original and of the book."""
