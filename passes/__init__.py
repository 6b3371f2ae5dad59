"""Graph-to-graph passes, one a file; `pipelines.py` orders them."""
