"""Which hits are worth loading: how fast this engine computes, how fast its store loads, and which is quicker."""
