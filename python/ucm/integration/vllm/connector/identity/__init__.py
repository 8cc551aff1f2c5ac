"""Names: the identity of what an engine computes, from its configuration and weights, and the keys of its blocks."""
