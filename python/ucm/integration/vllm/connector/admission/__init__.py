"""Which hits are worth loading: :mod:`.rates` measures how fast this engine computes prompts and
how fast a tier loads, :mod:`.admission` compares the two for each hit and remembers both."""
