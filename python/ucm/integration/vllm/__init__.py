"""ucm inside vLLM: the connector, its plug-in entry point."""
