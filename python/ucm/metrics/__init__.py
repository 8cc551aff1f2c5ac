"""Names of metrics, the dashboard over them, and their server where there is no vLLM."""
