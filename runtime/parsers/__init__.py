"""Reading what a model writes: tool calls and reasoning become parts of their own beside the content."""
