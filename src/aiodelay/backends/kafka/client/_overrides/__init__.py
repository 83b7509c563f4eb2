"""Subclasses of aiokafka's classes, which only aiodelay uses. Begin with `rebound.py` and `client.py`."""
