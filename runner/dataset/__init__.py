"""Datasets: from the store into a local cache."""
