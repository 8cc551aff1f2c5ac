"""The connector in a vLLM worker: one rank's KV tensors, its store and the transfers between them. No request logic."""
