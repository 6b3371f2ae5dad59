"""The `toolkit` command."""
