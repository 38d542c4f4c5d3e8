"""Rows of very many images: the work is cut into blocks, Ray Data spreads them over machines, each becomes one file."""
