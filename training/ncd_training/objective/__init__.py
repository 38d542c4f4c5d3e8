"""Discovery methods: the paper's own (`dual.py`), the systems that it compares with, and what they share."""
