"""The worker side: one rank's KV tensors, its store, and the transfers between them. It knows no
request logic."""
