"""Secure aggregation: the aggregator learns the sum of what sites send, and nothing of any one of them."""
