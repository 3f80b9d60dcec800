"""Measurements of fcoll beside its peers; `make bench` runs them."""
