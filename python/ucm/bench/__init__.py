"""``ucm bench``: figures of servers, stores and devices, and comparisons of them."""

from ucm.bench.metrics import BenchmarkMetrics, check_performance_regression

__all__ = ["BenchmarkMetrics", "check_performance_regression"]
