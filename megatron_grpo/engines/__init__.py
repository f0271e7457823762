"""Adapters around what trains and samples. Each subpackage knows one heavy library and not the others."""
