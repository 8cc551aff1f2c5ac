"""The connector in vLLM's scheduler: what is looked up, loaded and dumped. Touches no tensor."""
