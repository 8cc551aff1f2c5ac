"""The scheduler side: what is looked up, loaded and dumped. :mod:`.scheduler` answers vLLM's calls;
it touches no tensor."""
