"""Paged cache bookkeeping: blocks, prefix cache and the manager that the scheduler talks to."""
